"""Weight deltas at a scripted server: what it reads of one, and what is loaded again after a failure."""

from pathlib import Path
from unittest import mock

import pytest
import torch
from fake_server import FakeVLLM
from safetensors.torch import load_file

from rollouts.engines.weight_deltas import changed_layers, write_weight_delta
from rollouts.errors import WeightUpdateError

TIED = "model.language_model.embed_tokens.weight"


@pytest.fixture
async def server(reloadable_model_dir):
    async with FakeVLLM(root=str(reloadable_model_dir)) as server:
        yield server


def weights_of(directory):
    weights = {}
    for path in directory.glob("*.safetensors"):
        weights |= load_file(path)
    return weights


@pytest.fixture
def delta(server, tmp_path):
    """Other values in a projection of the second layer, and of the embeddings with the output layer that is tied."""
    weights = weights_of(Path(server.root))
    changed = ("model.language_model.layers.1.self_attn.k_proj.weight", TIED, "lm_head.weight")
    new = {name: weights[name].clone() for name in changed}
    for tensor in new.values():
        tensor[0] += 1
    write_weight_delta(new, tmp_path / "delta", base="default", base_directory=server.root)
    return tmp_path / "delta", weights | new


async def test_of_a_delta_the_server_reads_whole_the_layers_that_changed(server, control, delta):
    directory, new = delta
    found = []

    def noted(*arguments):
        layers = changed_layers(*arguments)
        found.append((layers.name, load_file(Path(layers.name, "model.safetensors"))))
        return layers

    with mock.patch("rollouts.engines.vllm.control.changed_layers", noted):
        await control.update_weights(directory, "v1")
    ((loaded, tensors),) = found
    assert server.loaded == [server.root, loaded]
    layer = {name for name in new if name.startswith("model.language_model.layers.1.")}
    assert tensors.keys() == {TIED, "lm_head.weight", *layer}
    assert all(torch.equal(tensors[name], new[name]) for name in tensors)
    assert server.weight_version == "v1"


async def test_nothing_is_left_beside_a_delta_and_a_server_without_its_base_is_not_paused(server, control, delta):
    directory, _ = delta
    await control.update_weights(directory, "v1")
    assert [path.name for path in directory.parent.iterdir() if path.name.startswith(".")] == []
    events = len(server.events)
    with pytest.raises(WeightUpdateError, match=r"changes the weights 'default', and those in use are 'v1'"):
        await control.update_weights(directory, "v2")
    assert server.events[events:] == ["/weight_info"]


async def test_after_a_failed_load_the_base_and_its_deltas_are_loaded_again(server, control, delta, other):
    directory, _ = delta
    await control.update_weights(directory, "v1")
    server.bad.add(str(other))
    with pytest.raises(WeightUpdateError, match=r"those of .*delta were loaded again; the server runs with them"):
        await control.update_weights(other, "v2")
    root, first, whole, again = server.loaded
    assert whole == root
    assert Path(first).parent == Path(again).parent == directory.parent


async def test_new_embeddings_without_the_output_layer_that_is_tied_to_them_are_refused(server, control, tmp_path):
    """vLLM would keep the output layer that it has."""
    weights = weights_of(Path(server.root))
    new = {TIED: weights[TIED] + 1}
    write_weight_delta(new, tmp_path / "delta", base="default", base_directory=server.root)
    with pytest.raises(WeightUpdateError, match=f"{TIED} changes without lm_head.weight, which is tied to it"):
        await control.update_weights(tmp_path / "delta", "v1")
    assert server.loaded == [server.root]
