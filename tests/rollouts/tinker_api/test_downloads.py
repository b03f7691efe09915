"""Weights leave a server: the command of `tinker` downloads an adapter, which tinker-cookbook merges."""

import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.request

import numpy as np
import pytest
import tinker
from family_rows import loaded_family
from model_families import text_config, with_seed
from safetensors.numpy import load, load_file, save_file
from served_in_thread import ServedInThread
from tinker import types
from transformers import AutoModelForCausalLM

from rollouts.models.lora_modules import LoraOptions
from rollouts.tinker.downloads import save_for_download
from rollouts.tinker.model_app import model_app
from rollouts.training.trainer import Datum, Trainer

KEY = "tml-a-key"
IDS = list(range(5, 25))
ADAPTER = ("adapter_config.json", "adapter_model.safetensors")


@pytest.fixture(scope="module")
def server(tiny_model_dir, tmp_path_factory):
    app = model_app(tiny_model_dir, tmp_path_factory.mktemp("runs"), names=["tiny"], keys=(KEY,), device="cpu")
    with ServedInThread(app) as served:
        yield served


@pytest.fixture(scope="module")
def training(server):
    """A model with an adapter that is not zero."""
    client = tinker.ServiceClient(base_url=server.base_url, api_key=KEY)
    training = client.create_lora_training_client("tiny", rank=4, seed=1, train_unembed=False).result()
    targets = {"target_tokens": IDS[1:], "weights": [1.0] * (len(IDS) - 1)}
    training.forward_backward([types.Datum(types.ModelInput.from_ints(IDS[:-1]), targets)], "cross_entropy").result()
    training.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    yield training
    client.close("success").result()


@pytest.fixture(scope="module")
def rest(server):
    return tinker.RestClient(base_url=server.base_url, api_key=KEY)


def fetched(rest, uri):
    found = {}
    for file, url in rest.get_external_weights_urls(uri).result().urls.items():
        with urllib.request.urlopen(url) as response:  # without the key
            found[file] = response.read()
    return found


@pytest.mark.slow
def test_the_command_downloads_a_checkpoint_of_training_and_leaves_no_export(server, training, rest, tmp_path):
    uri = training.save_state("final").result().path
    exported = fetched(rest, training.save_weights_external("same").result().path)
    environment = {**os.environ, "TINKER_BASE_URL": server.base_url, "TINKER_API_KEY": KEY, "HOME": str(tmp_path)}
    (tmp_path / "home").mkdir()
    for _ in range(3):
        ran = subprocess.run(
            [sys.executable, "-m", "tinker.cli", "checkpoint", "download", uri, "--force"],
            cwd=tmp_path / "home", env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if ran.returncode != -signal.SIGABRT:  # of the client when it ends
            break
    assert ran.returncode == 0, ran.stderr
    (place,) = (path for path in (tmp_path / "home").iterdir() if path.is_dir())
    assert {*ADAPTER} <= {path.name for path in place.iterdir()}
    got, wanted = load_file(place / ADAPTER[1]), load(exported[ADAPTER[1]])
    assert got.keys() == wanted.keys()
    assert all((got[name] == wanted[name]).all() for name in got)
    assert any(value.any() for name, value in got.items() if "lora_B" in name)  # what was trained
    assert json.loads((place / ADAPTER[0]).read_text())["r"] == 4
    left = {each.tinker_path for each in rest.list_user_checkpoints().result().checkpoints}
    assert left == {uri, f"tinker://{training.model_id}/external_weights/same"}


@pytest.mark.slow
def test_encryption_is_refused_before_anything_is_saved_and_later_requests_have_their_turn(training, rest):
    before = rest.list_checkpoints(training.model_id).result()
    with pytest.raises(tinker.RequestFailedError, match="age_encryption_recipients"):
        training.save_weights_external("refused", age_encryption_recipients=["age1x"]).result()
    assert rest.list_checkpoints(training.model_id).result() == before
    path = training.save_weights_external("after").result().path
    assert {*fetched(rest, path)} >= {*ADAPTER}


def _text_model(directory, name):
    model = with_seed(lambda: AutoModelForCausalLM.from_config(text_config(name)))
    model.save_pretrained(directory)
    shutil.copy(loaded_family("qwen3_vl").directory / "tokenizer.json", directory)
    return directory


def _cookbook(base, adapter, out):
    """The model as tinker-cookbook merges it."""
    with pytest.MonkeyPatch.context() as patch:
        if packages := os.environ.get("MMROLLOUTS_TRAINER_PACKAGES"):
            patch.setattr(sys, "path", [*sys.path, packages])
        weights = pytest.importorskip("tinker_cookbook.weights")
        weights.build_hf_model(base_model=str(base), adapter_path=str(adapter), output_path=str(out))


def _its_rules(base, adapter, out):
    """The same by the rules that the README of its weights gives, "Key Remapping"."""
    shutil.copytree(base, out)
    weights = load_file(out / "model.safetensors")
    changes, config = load_file(adapter / ADAPTER[1]), json.loads((adapter / ADAPTER[0]).read_text())
    output = "lm_head" if any(name.endswith("lm_head.weight") for name in weights) else "model.embed_tokens"
    inner = any(name.startswith("model.language_model.") for name in weights)
    for name in [name for name in changes if ".lora_A" in name]:
        target = name.removeprefix("base_model.model.").replace(".lora_A", "")
        target = target.replace("model.unembed_tokens", output)
        target = target.replace("model.", "model.language_model.") if inner else target
        scale = config["lora_alpha"] / config["r"]
        weights[target] = weights[target] + scale * changes[name.replace("lora_A", "lora_B")] @ changes[name]
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.slow
@pytest.mark.parametrize("merge", [_its_rules, _cookbook])
@pytest.mark.parametrize(
    ("name", "unembed"),
    [
        *[("qwen3_vl", True), ("qwen3", True)],  # with an output layer of its own
        *[("gemma3", False), ("llama", False)],  # tied: with unembed_tokens the embedding would change, too
    ],
)
def test_a_downloaded_adapter_merges_into_the_model_that_was_trained(tmp_path, name, unembed, merge):
    base = loaded_family(name).directory if "_" in name or "gemma" in name else _text_model(tmp_path / name, name)
    app = model_app(base, tmp_path / "runs", names=["tiny"], device="cpu")
    with ServedInThread(app) as server:
        client = tinker.ServiceClient(base_url=server.base_url, api_key=KEY)
        training = client.create_lora_training_client("tiny", rank=4, seed=1, train_unembed=unembed).result()
        targets = {"target_tokens": IDS[1:], "weights": [1.0] * (len(IDS) - 1)}
        data = [types.Datum(types.ModelInput.from_ints(IDS[:-1]), targets)]
        for _ in range(2):
            training.forward_backward(data, "cross_entropy")
            training.optim_step(types.AdamParams(learning_rate=5e-2)).result()
        expected = training.forward(data, "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
        adapter = tmp_path / "adapter"
        adapter.mkdir()
        uri = training.save_weights_external("final").result().path
        for file, content in fetched(tinker.RestClient(base_url=server.base_url, api_key=KEY), uri).items():
            (adapter / file).write_bytes(content)
        client.close("success").result()
    merge(base, adapter, tmp_path / "merged")
    datum = Datum(np.array(IDS[:-1]), np.array(IDS[1:]))
    found = []
    for directory in (base, tmp_path / "merged"):
        trainer = Trainer.from_pretrained(directory, device="cpu")
        trainer.create_model("all", lora=None)
        found.append(trainer.forward("all", [datum], "cross_entropy").logprobs[0])
    np.testing.assert_allclose(found[1], expected, atol=1e-4)
    assert np.abs(found[0] - expected).max() > 1e-2, "the detector"


@pytest.mark.slow
def test_a_tied_output_layer_is_downloaded_as_unembed_tokens_with_a_warning(tmp_path, caplog):
    trainer = Trainer.from_pretrained(_text_model(tmp_path / "model", "llama"), device="cpu")
    trainer.create_model("a", lora=LoraOptions(rank=4, train_attn=False, train_mlp=False))
    save_for_download(trainer, "a", tmp_path / "adapter")
    names = {f"base_model.model.model.unembed_tokens.lora_{part}.weight" for part in "AB"}
    assert load_file(tmp_path / "adapter" / ADAPTER[1]).keys() == names
    _its_rules(tmp_path / "model", tmp_path / "adapter", tmp_path / "merged")
    assert "train_unembed=False" in caplog.text
