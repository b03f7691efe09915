"""The tiny checkpoint is a real one."""

import re
import sys

import numpy as np
import pytest
from transformers import AutoModelForImageTextToText, AutoModelForMultimodalLM

from renderers import load_renderer
from renderers.errors import MissingExtraError
from renderers.installation import install_command
from rollouts.testing import tiny_qwen2_audio, tiny_qwen3_vl


def weights(directory):
    model = AutoModelForImageTextToText.from_pretrained(directory)
    return {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}


def test_it_is_a_qwen3_vl_of_under_a_million_parameters(tiny_model_dir):
    model = AutoModelForImageTextToText.from_pretrained(tiny_model_dir)
    assert type(model).__name__ == "Qwen3VLForConditionalGeneration"
    assert 100_000 < sum(parameter.numel() for parameter in model.parameters()) < 1_000_000


def test_its_template_prints_whatever_the_model_samples_and_nothing_is_logged(tiny_model_dir, caplog):
    """Reasoning and calls too: `rollouts demo` and new projects print its turns again."""
    renderer = load_renderer(tiny_model_dir)
    random = np.random.default_rng(5)
    markers = [*map(renderer.tokenizer.control_id, ("<think>", "</think>", "<tool_call>", "</tool_call>"))]
    words = renderer.tokenizer.encode_scaffold('{"name": "f", "arguments": {}} b\n')
    parsed_kinds = set()
    for _ in range(300):
        ids = random.choice([*markers, *words], size=random.integers(1, 12)).tolist()
        if random.random() < 0.3:
            ids = renderer.tokenizer.encode_scaffold('<tool_call>{"name": "f", "arguments": {}}</tool_call>') + ids
        turn = renderer.parse_response([*ids, *renderer.get_stop_token_ids()[:1]]).to_message()
        parsed_kinds |= turn.keys()
        assert renderer.render([{"role": "user", "content": "a"}, turn]).unprinted == ()
    assert parsed_kinds == {"role", "content", "reasoning_content", "tool_calls"}
    assert caplog.records == []


@pytest.mark.slow
def test_the_seed_decides_the_weights(tiny_model_dir, tmp_path):
    ours = weights(tiny_model_dir)
    again, other = (
        weights(tiny_qwen3_vl(tmp_path / "again", seed=0)),
        weights(tiny_qwen3_vl(tmp_path / "other", seed=1)),
    )
    assert all(np.array_equal(ours[name], again[name]) for name in ours)
    assert not all(np.array_equal(ours[name], other[name]) for name in ours)


def test_weights_without_torch_are_an_error_that_names_the_extra_and_writes_no_file(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtraError, match=re.escape(install_command("torch"))):
        tiny_qwen3_vl(tmp_path / "model")
    assert not (tmp_path / "model").exists()


@pytest.mark.slow
def test_the_tiny_model_that_hears_is_a_qwen2_audio_whose_files_agree(tmp_path):
    directory = tiny_qwen2_audio(tmp_path)
    model = AutoModelForMultimodalLM.from_pretrained(directory)
    assert type(model).__name__ == "Qwen2AudioForConditionalGeneration"
    assert sum(parameter.numel() for parameter in model.parameters()) < 1_000_000
    renderer = load_renderer(directory)
    assert renderer.mm_token_type_id_map == {model.config.audio_token_index: 3}
    sound = {"type": "audio", "audio": np.zeros(24_000, np.float32), "sampling_rate": 16_000}
    rendered = renderer.render([{"role": "user", "content": [sound]}])
    (item,) = rendered.multi_modal_data.media_items["audio"]
    frames = item["feature_attention_mask"].sum()
    assert (frames, item["input_features"].shape) == (150, (model.config.audio_config.num_mel_bins, 200))
