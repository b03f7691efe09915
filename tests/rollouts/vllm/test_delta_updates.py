"""Weight deltas at a scripted server: what it reads of one, and what is loaded again after a failure."""

import shutil
from pathlib import Path

import pytest
import torch
from fake_server import FakeVLLM
from safetensors.torch import load_file

from rollouts.engines.weight_deltas import write_weight_delta
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
    await control.update_weights(directory, "v1")
    tensors = weights_of(Path(server.loaded[-1]))
    assert len(server.loaded) == 2
    assert tensors.keys() == {TIED, "lm_head.weight", *layer_of(new)}
    assert all(torch.equal(tensors[name], new[name]) for name in tensors)
    assert server.weight_version == "v1"


def layer_of(weights):
    return {name for name in weights if name.startswith("model.language_model.layers.1.")}


async def test_further_deltas_are_read_without_those_before_them(server, control, delta, tmp_path):
    directory, weights = delta
    await control.update_weights(directory, "v1")
    projection, norm = (name for name in sorted(layer_of(weights)) if "down_proj" in name or "k_norm" in name)
    for number, changed in ((2, [projection]), (3, [norm, projection, "model.language_model.norm.weight"])):
        new = {name: weights[name].clone() for name in changed}
        for tensor in new.values():
            tensor.view(-1)[::40] += number
        base = tmp_path / ("delta" if number == 2 else "2")
        write_weight_delta(new, tmp_path / str(number), base=f"v{number - 1}", base_directory=base)
        weights |= new
        (base / "delta.tensors").rename(base / "absent")
        await control.update_weights(tmp_path / str(number), f"v{number}")
        (base / "absent").rename(base / "delta.tensors")
        tensors = weights_of(Path(server.loaded[-1]))
        assert tensors.keys() == layer_of(weights) | (set(changed) - layer_of(weights))
        assert all(torch.equal(tensors[name], weights[name]) for name in tensors)


async def test_layers_that_were_deleted_are_put_together_again(server, control, delta, tmp_path):
    directory, weights = delta
    await control.update_weights(directory, "v1")
    (name,) = (each for each in layer_of(weights) if "down_proj" in each)
    new = weights[name].clone()
    new[0] += 1
    write_weight_delta({name: new}, tmp_path / "2", base="v1", base_directory=directory)
    shutil.rmtree(Path(server.loaded[-1]).parent)
    with pytest.raises(WeightUpdateError, match=r"could not be written.*nothing was changed\. Repeat the update"):
        await control.update_weights(tmp_path / "2", "v2")
    await control.update_weights(tmp_path / "2", "v2")
    tensors = weights_of(Path(server.loaded[-1]))
    assert tensors.keys() == layer_of(weights)
    assert all(torch.equal(tensors[each], (weights | {name: new})[each]) for each in tensors)


async def test_a_server_takes_the_deltas_that_it_has_missed(server, control, delta, tmp_path):
    directory, weights = delta
    name = "model.language_model.norm.weight"
    write_weight_delta({name: weights[name] + 1}, tmp_path / "2", base="v1", base_directory=directory)
    await control.update_weights(tmp_path / "2", "v2")
    tensors = weights_of(Path(server.loaded[-1]))
    assert tensors.keys() == {TIED, "lm_head.weight", *layer_of(weights), name}
    assert all(torch.equal(tensors[each], (weights | {name: weights[name] + 1})[each]) for each in tensors)


@pytest.mark.parametrize("reason", ["it dropped its weights", "a reload of .* failed"])
async def test_a_server_that_lacks_weights_takes_no_delta(server, control, delta, other, reason):
    """What the delta leaves as it is would be garbage, under the label of the new weights."""
    directory, _ = delta
    if reason == "it dropped its weights":
        await control.sleep(2)
        await control.wake_up(["weights"])
    else:
        server.bad |= {str(other), server.root}
        with pytest.raises(WeightUpdateError):
            await control.update_weights(other, "v1")
    loaded = list(server.loaded)
    with pytest.raises(WeightUpdateError, match=f"lacks the others: {reason}.*Pass a whole checkpoint"):
        await control.update_weights(directory, "v1")
    assert server.loaded == loaded


async def test_files_beside_a_delta_go_with_the_next_whole_update_and_a_server_without_its_base_is_not_paused(
    server, control, delta
):
    directory, _ = delta
    await control.update_weights(directory, "v1")
    events = len(server.events)
    with pytest.raises(WeightUpdateError, match=r"changes the weights 'default', and those in use are 'v1'"):
        await control.update_weights(directory, "v2")
    assert server.events[events:] == ["/weight_info"]
    assert [path for path in directory.parent.iterdir() if path.name.startswith(".")] == [
        Path(server.loaded[-1]).parent
    ]
    await control.update_weights(server.root, "v2")
    assert [path for path in directory.parent.iterdir() if path.name.startswith(".")] == []


async def test_after_a_failed_load_the_base_and_its_deltas_are_loaded_again(server, control, delta, other):
    directory, _ = delta
    await control.update_weights(directory, "v1")
    server.bad.add(str(other))
    with pytest.raises(WeightUpdateError, match=r"those of .*delta were loaded again; the server runs with them"):
        await control.update_weights(other, "v2")
    root, first, whole, again = server.loaded
    assert whole == root
    assert Path(first).parents[1] == Path(again).parents[1] == directory.parent


async def test_new_embeddings_without_the_output_layer_that_is_tied_to_them_are_refused(server, control, tmp_path):
    """vLLM would keep the output layer that it has."""
    weights = weights_of(Path(server.root))
    new = {TIED: weights[TIED] + 1}
    write_weight_delta(new, tmp_path / "delta", base="default", base_directory=server.root)
    with pytest.raises(WeightUpdateError, match=f"{TIED} changes without lm_head.weight, which is tied to it"):
        await control.update_weights(tmp_path / "delta", "v1")
    assert server.loaded == [server.root]
