"""Weights that a trainer sends: what must come, the calls at each server, and what follows a failure."""

from contextlib import AsyncExitStack

import numpy as np
import pytest
from engine_inputs import generate_one, request
from fake_http import error_response, json_response
from fake_server import FakeVLLM
from safetensors.numpy import load_file, save_file

from rollouts.engines.vllm.checkpoint_files import ExpectedTensors
from rollouts.errors import CapabilityError, EngineError, WeightUpdateError

TRANSFER = INIT, START, UPDATE, FINISH = (
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
)


class TransferVLLM(FakeVLLM):
    """Records what it is told."""

    def __init__(self, root):
        super().__init__(root=str(root))
        self.transfers = []

    async def respond(self, seen):
        if seen.path in TRANSFER:
            self.transfers.append((seen.path, seen.json if seen.body else None))
            if seen.path == FINISH and seen.body:
                self.weight_version = seen.json["weight_version"]
            return json_response({"message": "done"})
        return await super().respond(seen)

    @property
    def calls(self):
        return [path for path, _ in self.transfers]

    @property
    def received(self):
        return [content["update_info"] for path, content in self.transfers if path == UPDATE]


def told(tensors):
    """What the servers are told about the tensors of a bucket."""
    return {
        "names": list(tensors),
        "dtype_names": [str(tensor.dtype) for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
    }


def sender(tensors):
    """What a trainer passes as weights: a function that sends a bucket for each tensor."""

    async def send(receive):
        for name, tensor in tensors.items():
            await receive(told({name: tensor}))

    return send


@pytest.fixture
def checkpoint(tmp_path):
    """A checkpoint of three tensors, 24, 40 and 8 bytes."""
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    tensors = {"a": np.zeros((2, 3), np.float32), "b": np.ones(10, np.float32), "c": np.ones(4, np.float16)}
    save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.fixture
def tensors(checkpoint):
    return load_file(checkpoint / "model.safetensors")


@pytest.fixture
async def servers(checkpoint):
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(TransferVLLM(checkpoint)) for _ in range(2)]


@pytest.fixture
def server(servers):
    return servers[0]


WRONG = {
    "another name": (lambda t: {"x": t["a"]}, "has no tensor x"),
    "another shape": (lambda t: {**t, "a": t["a"].T}, r"a has shape \(3, 2\)"),
    "a missing one": (lambda t: {"a": t["a"]}, "2 tensors of .* were not sent, such as b"),
}


@pytest.mark.parametrize("name", WRONG)
async def test_tensors_that_are_not_those_of_the_checkpoint_leave_the_weights_of_before(
    server, engine, checkpoint, tensors, name
):
    change, reason = WRONG[name]
    with pytest.raises(WeightUpdateError, match=f"were loaded again.*{reason}"):
        await engine.update_weights(sender(change(tensors)), "v1")
    assert server.loaded == [server.root] * 2  # again
    assert engine.weight_version == "default"
    assert await generate_one(engine, request())


async def test_an_error_of_the_trainer_leaves_the_weights_of_before(server, engine):
    async def send(receive):
        raise RuntimeError("NCCL timed out")

    with pytest.raises(WeightUpdateError, match=r"were loaded again; the server runs.*RuntimeError: NCCL timed out"):
        await engine.update_weights(send, "v1")
    assert not server.paused


def test_a_tied_output_layer_must_come_too(checkpoint, tensors):
    save_file({**tensors, "model.embed_tokens.weight": tensors["a"]}, checkpoint / "model.safetensors")
    (checkpoint / "config.json").write_text('{"tie_word_embeddings": true}')
    expected = ExpectedTensors.of_checkpoint(str(checkpoint))
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        expected.check(name, tensor.shape)
    with pytest.raises(WeightUpdateError, match=r"lm_head\.weight also where the model ties it"):
        expected.check_complete()
    expected.check("lm_head.weight", tensors["a"].shape)
    expected.check_complete()


async def test_a_server_receives_every_bucket_and_serves_the_new_version(server, engine, tensors):
    await engine.control.init_weight_transfer({"rank_offset": 1, "world_size": 5})
    await engine.update_weights(sender(tensors), "v1")
    await engine.update_weights(sender(tensors), "v2")
    assert server.calls == [INIT, *[START, UPDATE, UPDATE, UPDATE, FINISH] * 2]
    assert [info["names"] for info in server.received] == [["a"], ["b"], ["c"]] * 2
    assert engine.weight_version == "v2"
    completion = await generate_one(engine, request())
    assert {span.version for span in completion.weight_spans} == {"v2"}


def states(fleet):
    return [str(member.state) for member in fleet.members]


async def test_the_members_of_a_fleet_receive_together_what_a_trainer_sends_once(servers, fleet, tensors):
    calls = []

    async def send(receive):
        calls.append("send")
        await sender(tensors)(receive)

    await fleet.update_weights(send, "v1")
    assert calls == ["send"]
    assert [[info["names"] for info in server.received] for server in servers] == [[["a"], ["b"], ["c"]]] * 2
    await fleet.check()
    assert (states(fleet), fleet.weight_version) == (["ready", "ready"], "v1")


@pytest.mark.parametrize("path", ["/pause", START, UPDATE])
async def test_a_member_that_fails_before_it_has_everything_ends_the_transfer_of_all(servers, fleet, tensors, path):
    servers[1].script[path] = [error_response()]
    with pytest.raises(WeightUpdateError, match="no member of the fleet has taken the weights 'v1'"):
        await fleet.update_weights(sender(tensors), "v1")
    assert (states(fleet), fleet.weight_version) == (["ready", "ready"], "default")
    assert not any(server.paused for server in servers)


async def test_a_member_that_fails_at_the_end_of_a_transfer_is_ejected(servers, fleet, tensors):
    servers[1].script[FINISH] = [error_response()]
    await fleet.update_weights(sender(tensors), "v2")
    assert (states(fleet), fleet.weight_version) == (["ready", "ejected"], "v2")


async def test_without_a_directory_of_the_weights_of_before_a_failure_leaves_the_server_paused_until_the_next_update(
    engine, tensors
):
    await engine.update_weights(sender(tensors), "v1")
    with pytest.raises(WeightUpdateError, match="left paused, with parameters that have no storage"):
        await engine.update_weights(sender({"x": tensors["a"]}), "v2")
    assert await engine.control.is_paused()
    with pytest.raises(EngineError, match="a transfer of weights was begun and not seen to end"):
        await engine.control.resume()
    await engine.update_weights(sender(tensors), "v3")
    assert not await engine.control.is_paused()
    assert await generate_one(engine, request())


async def test_a_server_without_the_flag_is_an_error_that_names_it(server, engine):
    text = "Weight transfer not configured. Please set weight_transfer_config"
    server.script[INIT] = [error_response(500, text)]
    with pytest.raises(CapabilityError, match="--weight-transfer-config"):
        await engine.control.init_weight_transfer({})
