"""Weight deltas: an engine takes the values that changed, and what it has no base for is refused whole."""

import json
import os
import shutil
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rollouts.engines.weight_deltas import checkpoint_tensors, delta_chain, write_weight_delta
from rollouts.errors import ArgumentError, WeightUpdateError


def weights_of(engine_or_directory):
    directory = getattr(engine_or_directory, "_model", engine_or_directory)
    if directory is engine_or_directory:
        return load_file(directory / "model.safetensors")
    return {name: tensor.clone() for name, tensor in directory.state_dict().items()}


def changed(weights, share, seed=0):
    """Weights with other values at random places, as an optimizer of bfloat16 weights leaves them."""
    rng = np.random.default_rng(seed)
    new = {name: tensor.clone() for name, tensor in weights.items()}
    for tensor in new.values():
        places = torch.from_numpy(rng.random(tuple(tensor.shape)) < share)
        tensor[places] += 1e-3
    return new


def assert_has(engine, weights):
    own = weights_of(engine)
    for name, tensor in weights.items():
        assert torch.equal(own[name], tensor), name


def size(directory):
    return sum(path.stat().st_size for path in directory.iterdir())


async def test_two_percent_of_the_values_take_less_than_eight_percent_of_the_bytes(engine, tiny_model_dir, tmp_path):
    whole = weights_of(tiny_model_dir)
    new = changed(whole, 0.02)
    write_weight_delta(new, tmp_path / "1", base="0", base_directory=tiny_model_dir)
    assert 0.02 * size_of(whole) < size(tmp_path / "1") < 0.08 * size_of(whole)
    await engine.update_weights(tmp_path / "1", "1")
    assert_has(engine, new)
    assert engine.weight_version == "1"


def size_of(weights):
    return sum(tensor.nbytes for tensor in weights.values())


async def test_a_delta_may_change_another_delta(engine, tiny_model_dir, tmp_path):
    weights, origin = weights_of(tiny_model_dir), tiny_model_dir
    for version in ("1", "2", "3"):
        weights = changed(weights, 0.02, seed=int(version))
        base = str(int(version) - 1)
        write_weight_delta(weights, tmp_path / version, base=base, base_directory=origin)
        origin = tmp_path / version
        await engine.update_weights(origin, version)
        assert_has(engine, weights)


async def test_tensors_of_which_most_changed_are_written_whole_and_equal_ones_not_at_all(
    engine, tiny_model_dir, tmp_path
):
    weights = weights_of(tiny_model_dir)
    name = min(weights)
    weights[name] = weights[name] + 1
    write_weight_delta(weights, tmp_path / "1", base="0", base_directory=tiny_model_dir)
    assert load_file(tmp_path / "1" / "delta.tensors").keys() == {name}
    await engine.update_weights(tmp_path / "1", "1")
    assert_has(engine, weights)


async def test_an_engine_without_the_base_keeps_its_weights_and_asks_for_the_whole(engine, tiny_model_dir, tmp_path):
    before = weights_of(engine)
    new = changed(weights_of(tiny_model_dir), 0.02)
    write_weight_delta(new, tmp_path / "8", base="7", base_directory=tiny_model_dir)
    with pytest.raises(WeightUpdateError, match=r"changes the weights '7', and those in use are '0'.*Pass a whole"):
        await engine.update_weights(tmp_path / "8", "8")
    assert_has(engine, before)
    await engine.update_weights(new, "8")
    assert_has(engine, new)


@pytest.mark.parametrize("place", [0, 9, -1])
@pytest.mark.parametrize("damage", [lambda data, place: data[:place], lambda data, place: flipped(data, place)])
async def test_a_damaged_delta_changes_nothing(engine, tiny_model_dir, tmp_path, place, damage):
    before = weights_of(engine)
    write_weight_delta(
        changed(weights_of(tiny_model_dir), 0.02), tmp_path / "1", base="0", base_directory=tiny_model_dir
    )
    path = tmp_path / "1" / "delta.tensors"
    path.write_bytes(damage(path.read_bytes(), place))
    with pytest.raises(WeightUpdateError, match=r"another digest.*nothing was changed"):
        await engine.update_weights(tmp_path / "1", "1")
    assert_has(engine, before)
    assert engine.weight_version == "0"


def test_a_delta_whose_base_is_itself_is_refused(tiny_model_dir, tmp_path):
    new = changed(weights_of(tiny_model_dir), 0.02)
    write_weight_delta(new, tmp_path / "1", base="0", base_directory=tiny_model_dir)
    about = json.loads((tmp_path / "1" / "delta.json").read_text())
    (tmp_path / "1" / "delta.json").write_text(json.dumps(about | {"base_directory": "."}))
    with pytest.raises(WeightUpdateError, match="is the base of its own base"):
        write_weight_delta(new, tmp_path / "2", base="1", base_directory=tmp_path / "1")


def rebuilt(directory):
    return dict(checkpoint_tensors(*delta_chain(directory), lambda name: True))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.uint16, torch.bool])
def test_tensors_of_every_dtype_are_put_together_from_their_base(tmp_path, dtype):
    (tmp_path / "0").mkdir()
    old = torch.zeros(8, 9, dtype=dtype)
    save_file({"w": old}, tmp_path / "0" / "model.safetensors")
    new = old.float().index_fill_(1, torch.tensor([4]), 1).to(dtype)
    write_weight_delta({"w": new}, tmp_path / "1", base="0", base_directory=tmp_path / "0")
    assert "w:gaps" in load_file(tmp_path / "1" / "delta.tensors") or dtype is torch.bool
    assert torch.equal(rebuilt(tmp_path / "1")["w"].float(), new.float())


def test_a_zero_that_changed_its_sign_is_written(tmp_path):
    (tmp_path / "0").mkdir()
    save_file({"w": torch.zeros(99)}, tmp_path / "0" / "model.safetensors")
    write_weight_delta(
        {"w": torch.zeros(99).index_fill_(0, torch.tensor([70]), -0.0)},
        tmp_path / "1",
        base="0",
        base_directory=tmp_path / "0",
    )
    assert rebuilt(tmp_path / "1")["w"].signbit().nonzero().tolist() == [[70]]


def test_places_may_be_far_from_each_other(tmp_path):
    (tmp_path / "0").mkdir()
    save_file({"w": torch.zeros(200_000)}, tmp_path / "0" / "model.safetensors")
    new = torch.zeros(200_000).index_fill_(0, torch.tensor([32_766, 199_999]), 1)
    write_weight_delta({"w": new}, tmp_path / "1", base="0", base_directory=tmp_path / "0")
    assert torch.equal(rebuilt(tmp_path / "1")["w"], new)


@pytest.mark.parametrize("other", ["0", "1"])
def test_a_base_that_was_written_again_is_not_mixed_with_a_delta(tiny_model_dir, tmp_path, other):
    weights = weights_of(tiny_model_dir)
    (tmp_path / "0").mkdir()
    save_file(weights, tmp_path / "0" / "model.safetensors")
    for version in ("1", "2"):
        weights = changed(weights, 0.02, seed=int(version))
        base = str(int(version) - 1)
        write_weight_delta(weights, tmp_path / version, base=base, base_directory=tmp_path / base)
    assert_equal(rebuilt(tmp_path / "2"), weights)
    again = changed(weights, 0.5)
    if other == "0":
        save_file(again, tmp_path / "0" / "model.safetensors")
    else:
        shutil.rmtree(tmp_path / "1")
        write_weight_delta(again, tmp_path / "1", base="0", base_directory=tmp_path / "0")
    with pytest.raises(WeightUpdateError, match=rf"of the base .*{other} has other values than when .*pass a whole"):
        rebuilt(tmp_path / "2")


def test_directories_may_be_named_by_links(tiny_model_dir, tmp_path):
    new = changed(weights_of(tiny_model_dir), 0.02)
    deep = tmp_path / "disk" / "deep"
    deep.mkdir(parents=True)
    (tmp_path / "runs").symlink_to(deep)
    (tmp_path / "model").symlink_to(tiny_model_dir)
    write_weight_delta(new, tmp_path / "runs" / "1", base="0", base_directory=tmp_path / "model")
    (tmp_path / "latest").symlink_to(deep / "1")
    for directory in (deep / "1", tmp_path / "runs" / "1", tmp_path / "latest"):
        assert_equal(rebuilt(directory), new)


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def flipped(data, place):
    changed = bytearray(data)
    changed[place] ^= 1
    return bytes(changed)


def test_a_writer_that_is_killed_leaves_no_delta(tiny_model_dir, tmp_path):
    new = changed(weights_of(tiny_model_dir), 0.02)
    found = []

    def killed(source, target):
        found.append((sorted(os.listdir(source)), target, os.path.exists(target)))
        raise KeyboardInterrupt

    with mock.patch("os.replace", killed), pytest.raises(KeyboardInterrupt):
        write_weight_delta(new, tmp_path / "1", base="0", base_directory=tiny_model_dir)
    # Until the rename, which comes last, nothing is at the path that an engine is given.
    assert found == [(["delta.json", "delta.tensors"], tmp_path / "1", False)]
    assert not os.path.lexists(tmp_path / "1")


async def test_a_delta_of_another_model_is_refused_by_the_name_of_a_tensor(engine, tiny_model_dir, tmp_path):
    weights = weights_of(tiny_model_dir)
    name = min(weights)
    with pytest.raises(WeightUpdateError, match=r"has no tensor wrong; write a whole checkpoint"):
        write_weight_delta(
            weights | {"wrong": weights[name] + 1}, tmp_path / "1", base="0", base_directory=tiny_model_dir
        )
    with pytest.raises(ArgumentError, match="base is 7; pass a name for the weights"):
        write_weight_delta(weights, tmp_path / "1", base=7, base_directory=tiny_model_dir)
    with pytest.raises(WeightUpdateError, match=f"{name} has shape"):
        write_weight_delta({name: weights[name][:1]}, tmp_path / "1", base="0", base_directory=tiny_model_dir)
    write_weight_delta({name: weights[name] + 1}, tmp_path / "1", base="0", base_directory=tiny_model_dir)
    before = weights_of(engine)
    with (
        mock.patch.object(type(engine._model), "state_dict", return_value={}),
        pytest.raises(WeightUpdateError, match=f"changes {name} .*, the model has none such; pass a whole checkpoint"),
    ):
        await engine.update_weights(tmp_path / "1", "1")
    write_weight_delta({name: weights[name] * np.nan}, tmp_path / "2", base="0", base_directory=tiny_model_dir)
    with pytest.raises(WeightUpdateError, match="NaN or infinite"):
        await engine.update_weights(tmp_path / "2", "2")
    assert_has(engine, before)


async def test_tied_weights_are_written_under_the_names_that_files_have(engine, tiny_model_dir, tmp_path):
    weights = engine._model.state_dict()
    new = {name: tensor.clone() for name, tensor in weights.items()}
    (tied,) = [name for name in new if name.endswith("embed_tokens.weight")]
    new["lm_head.weight"] = new[tied].add_(1).clone()  # as of weights that are gathered one by one
    write_weight_delta(new, tmp_path / "1", base="0", base_directory=tiny_model_dir)
    await engine.update_weights(tmp_path / "1", "1")
    assert_has(engine, new)


async def test_a_delta_of_tied_weights_is_refused_by_a_model_whose_output_layer_is_its_own(
    engine, tiny_model_dir, tmp_path
):
    write_weight_delta(
        changed(weights_of(tiny_model_dir), 0.02), tmp_path / "1", base="0", base_directory=tiny_model_dir
    )
    head = engine._model.lm_head
    head.weight = torch.nn.Parameter(head.weight.detach().clone())
    before = weights_of(engine)
    with pytest.raises(WeightUpdateError, match=r"ties lm_head\.weight to its embeddings, the model does not"):
        await engine.update_weights(tmp_path / "1", "1")
    assert_has(engine, before)


async def test_a_parameter_in_another_order_is_named_with_its_strides(engine, tiny_model_dir, tmp_path):
    weights = weights_of(tiny_model_dir)
    name = "model.language_model.layers.0.mlp.down_proj.weight"
    write_weight_delta({name: weights[name] + 1}, tmp_path / "1", base="0", base_directory=tiny_model_dir)
    parameter = engine._model.get_parameter(name)
    parameter.data = parameter.data.T.contiguous().T
    rows, _ = parameter.shape
    with pytest.raises(WeightUpdateError, match=rf"the model has .*, strides \(1, {rows}\); pass a whole"):
        await engine.update_weights(tmp_path / "1", "1")
