"""Weights leave a server: the command of `tinker` downloads what was trained, as an adapter that PEFT reads."""

import json
import os
import signal
import subprocess
import sys
import urllib.request

import pytest
import tinker
from safetensors.numpy import load, load_file
from served_in_thread import ServedInThread
from tinker import types

from rollouts.tinker.model_app import model_app

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
