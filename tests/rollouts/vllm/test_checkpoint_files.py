"""Checkpoints that a server would choke on are found by the headers of their files."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rollouts.engines.vllm.checkpoint_files import check_checkpoint, write_tied_head
from rollouts.errors import WeightUpdateError

FILE = "model.safetensors"
HEAD = "lm_head.weight"
EMBEDDING = "model.language_model.embed_tokens.weight"
NORM = "model.language_model.norm.weight"


@pytest.fixture(scope="module")
def model_dir(tiny_model_dir, tmp_path_factory):
    """A checkpoint of a model with tied embeddings that holds the output layer all the same."""
    directory = shutil.copytree(tiny_model_dir, tmp_path_factory.mktemp("whole") / "model")
    return rewritten(directory, lambda weights: weights.update({HEAD: weights[EMBEDDING].copy()}))


@pytest.fixture
def copy(model_dir, tmp_path):
    return shutil.copytree(model_dir, tmp_path / "copy")


def rewritten(directory, edit):
    weights = dict(load_file(directory / FILE))
    edit(weights)
    save_file(weights, directory / FILE, metadata={"format": "pt"})
    return directory


def sharded(directory):
    """The same weights in two files with an index, as large models are saved."""
    weights = load_file(directory / FILE)
    names = sorted(weights)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for name, tensors in parts.items():
        save_file({tensor: weights[tensor] for tensor in tensors}, directory / name)
    (directory / FILE).unlink()
    index = {"metadata": {}, "weight_map": {tensor: name for name, tensors in parts.items() for tensor in tensors}}
    (directory / f"{FILE}.index.json").write_text(json.dumps(index))
    return directory


def test_weights_of_another_data_type_fit(copy, model_dir):
    check_checkpoint(
        rewritten(copy, lambda weights: weights.update({k: v.astype(np.float16) for k, v in weights.items()})),
        like=model_dir,
    )


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda weights: weights.pop(NORM), f"lacks {NORM}"),
        (lambda weights: weights.update(more=np.zeros(1, np.float32)), "has more beyond"),
        (lambda weights: weights.update({NORM: weights[NORM][:-1].copy()}), f"{NORM} has shape (63,)"),
        (lambda weights: [weights.pop(name) for name in list(weights) if name != HEAD], "tensors such as"),
    ],
)
def test_the_error_names_tensors_that_do_not_fit_the_model(copy, model_dir, edit, said):
    with pytest.raises(WeightUpdateError) as caught:
        check_checkpoint(rewritten(copy, edit), like=model_dir)
    assert said in str(caught.value)
    assert "Nothing was changed" in str(caught.value)


@pytest.mark.parametrize(
    "saved", [lambda directory: directory, lambda directory: sharded(directory)], ids=["one", "index"]
)
def test_a_tied_output_layer_that_is_left_out_is_refused_until_it_is_written(copy, model_dir, saved):
    """vLLM would go on with the output layer that it had: log-probabilities more than 1 nat off, and HTTP 200."""
    saved(rewritten(copy, lambda weights: weights.pop(HEAD)))
    with pytest.raises(WeightUpdateError, match="write_tied_head"):
        check_checkpoint(copy, like=model_dir)
    write_tied_head(copy)
    check_checkpoint(copy, like=model_dir)
    (head,) = load_file(copy / "lm_head.safetensors").items()
    assert head[0] == HEAD
    assert np.array_equal(head[1], load_file(model_dir / FILE)[EMBEDDING])


def test_an_untied_output_layer_must_be_in_both_checkpoints_or_in_neither(copy, tmp_path):
    untied = shutil.copytree(copy, tmp_path / "untied")
    for directory in (copy, untied):
        config = json.loads((directory / "config.json").read_text())
        config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = False
        (directory / "config.json").write_text(json.dumps(config))
    check_checkpoint(copy, like=untied)
    rewritten(untied, lambda weights: weights.pop(HEAD))
    with pytest.raises(WeightUpdateError, match=r"lm_head\.weight"):
        check_checkpoint(copy, like=untied)


def cut_to(kept):
    def edit(directory):
        data = (directory / FILE).read_bytes()
        (directory / FILE).write_bytes(data[: int(len(data) * kept)])

    return edit


def with_header(header):
    return lambda directory: (directory / FILE).write_bytes(len(header).to_bytes(8, "little") + header)


def promised(directory):
    path = sharded(directory) / f"{FILE}.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["promised"] = "model-00001-of-00002.safetensors"
    path.write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        *((cut_to(kept), "still being written") for kept in (0.0, 0.00001, 0.001, 0.5, 0.999999)),
        (with_header(b"{"), "no complete safetensors file"),
        (with_header(b'{"a": {"shape": [1]}}'), "no complete safetensors file"),
        (lambda directory: (sharded(directory) / "model-00002-of-00002.safetensors").unlink(), "model-00002-of-00002"),
        (promised, "promised"),
        (lambda directory: (directory / FILE).unlink(), r"no \.safetensors"),
        (shutil.rmtree, "no such directory"),
    ],
)
def test_what_is_no_whole_checkpoint_is_refused(copy, edit, words):
    edit(copy)
    with pytest.raises(WeightUpdateError, match=words):
        check_checkpoint(copy, like=None)


def test_without_the_first_checkpoint_only_completeness_is_checked(copy, tmp_path):
    rewritten(copy, lambda weights: weights.pop(NORM))
    check_checkpoint(copy, like=tmp_path / "elsewhere")
    check_checkpoint(copy, like=None)
