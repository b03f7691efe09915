"""Weights that a trainer sends: buckets, what must come, the calls at each server, and what follows a failure."""

import itertools
from contextlib import AsyncExitStack

import numpy as np
import pytest
from controlled_server import Controlled
from engine_inputs import FAST_RETRIES, generate_one, request
from fake_http import json_response
from fake_responses import answer
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from rollouts.engines.fleet import EngineFleet, FleetLimits
from rollouts.engines.protocol import UpdatableEngine
from rollouts.engines.vllm import VLLMEngine
from rollouts.engines.vllm.transfer import ExpectedTensors, NCCLSender, TensorInfo, TransferEngine, buckets, update_info
from rollouts.errors import ArgumentError, CapabilityError, EngineError, WeightUpdateError

INIT, START, UPDATE, FINISH = (
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
)
TRANSFER = (INIT, START, UPDATE, FINISH, "/shutdown_weight_transfer_engine")


class TransferVLLM(Controlled):
    """Records what it is told; four workers, as `Controlled`."""

    def __init__(self, root, **options):
        super().__init__(root, **options)
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


class RecordingSender:
    def __init__(self):
        self.events = []
        self.failure = None

    def init_info(self, workers_before, num_workers):
        return {"rank_offset": 1 + workers_before, "world_size": 1 + num_workers}

    def open(self, num_workers):
        self.events.append(("open", num_workers))

    def update_info(self, bucket):
        return {"number": sum(event[0] == "send" for event in self.events)}

    def send(self, bucket):
        if self.failure is not None:
            raise self.failure
        self.events.append(("send", [name for name, _ in bucket]))

    def close(self):
        self.events.append(("close", None))


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
async def fleet(servers):
    limits = FleetLimits(check_seconds=0.02, eject_after=1)
    urls = [server.base_url for server in servers]
    async with EngineFleet.from_urls(urls, limits=limits, http_limits=FAST_RETRIES) as fleet:
        await fleet.check()
        yield fleet


@given(st.lists(st.integers(0, 50), max_size=20), st.integers(1, 60))
def test_buckets_keep_every_tensor_in_order_and_exceed_the_size_only_with_a_single_one(sizes, max_bytes):
    tensors = [(str(number), np.zeros(size, np.uint8)) for number, size in enumerate(sizes)]
    found = list(buckets(tensors, max_bytes))
    assert [name for bucket in found for name, _ in bucket] == [name for name, _ in tensors]
    for bucket in found:
        assert len(bucket) == 1 or sum(tensor.nbytes for _, tensor in bucket) <= max_bytes
    for first, second in itertools.pairwise(found):
        assert sum(tensor.nbytes for _, tensor in [*first, second[0]]) > max_bytes


def test_a_server_is_told_names_dtypes_and_shapes():
    torch = pytest.importorskip("torch")
    bucket = [("a", torch.zeros(2, 3, dtype=torch.bfloat16)), ("b", torch.zeros((), dtype=torch.float32))]
    assert update_info(bucket) == {"names": ["a", "b"], "dtype_names": ["bfloat16", "float32"], "shapes": [[2, 3], []]}
    assert TensorInfo.of("x", np.zeros((1, 2), np.int64)) == TensorInfo("x", "int64", (1, 2))


WRONG = {
    "another name": (lambda t: {"x": t["a"]}, "has no tensor x"),
    "another shape": (lambda t: {**t, "a": t["a"].T}, r"a has shape \(3, 2\)"),
    "a missing one": (lambda t: {"a": t["a"]}, "2 tensors of .* were not sent, such as b"),
    "one twice": (lambda t: [*t.items(), ("a", t["a"])], "a comes twice"),
}


@pytest.mark.parametrize("name", WRONG)
async def test_tensors_that_are_not_those_of_the_checkpoint_leave_the_weights_of_before(
    servers, fleet, checkpoint, tensors, name
):
    change, reason = WRONG[name]
    engine = TransferEngine(fleet, RecordingSender())
    with pytest.raises(WeightUpdateError, match=reason):
        await engine.update_weights(change(tensors), "v1")
    for server in servers:
        assert server.loaded == [server.root, str(checkpoint)]  # again
    assert (engine.weight_version, fleet.weight_version) == ("default", "default")
    assert await generate_one(engine, request())


def test_a_tied_output_layer_must_come_too(checkpoint, tensors):
    save_file({**tensors, "model.embed_tokens.weight": tensors["a"]}, checkpoint / "model.safetensors")
    (checkpoint / "config.json").write_text('{"tie_word_embeddings": true}')
    sent = list(load_file(checkpoint / "model.safetensors").items())
    with pytest.raises(WeightUpdateError, match=r"lm_head\.weight also where the model ties it"):
        list(ExpectedTensors.of_checkpoint(str(checkpoint)).checked(sent))
    complete = [*sent, ("lm_head.weight", tensors["a"])]
    assert list(ExpectedTensors.of_checkpoint(str(checkpoint)).checked(complete)) == complete


async def test_all_servers_receive_every_bucket_and_serve_the_new_version(servers, fleet, tensors):
    sender = RecordingSender()
    engine: UpdatableEngine = TransferEngine(fleet, sender, bucket_bytes=64)
    await engine.update_weights(tensors, "v1")
    await engine.update_weights(iter(tensors.items()), "v2")
    assert [content["init_info"]["rank_offset"] for server in servers for _, content in server.transfers[:1]] == [1, 5]
    update = [("send", ["a", "b"]), ("send", ["c"])]
    assert sender.events == [("open", 8), *update, *update]
    for server in servers:
        assert server.calls == [INIT, *[START, UPDATE, UPDATE, FINISH] * 2]
        assert [info["names"] for info in server.received] == [["a", "b"], ["c"]] * 2
        assert [info["number"] for info in server.received] == [0, 1, 2, 3]
    assert engine.weight_version == "v2"
    completion = await generate_one(engine, request())
    assert {span.version for span in completion.weight_spans} == {"v2"}
    assert [str(member.state) for member in fleet.members] == ["ready", "ready"]


async def test_a_sender_that_fails_leaves_the_weights_of_before_and_joins_again(servers, fleet, checkpoint, tensors):
    sender = RecordingSender()
    engine = TransferEngine(fleet, sender)
    sender.failure = ConnectionError("the network is down")
    with pytest.raises(WeightUpdateError, match=r"the network is down.*the server runs with them"):
        await engine.update_weights(tensors, "v1")
    assert [server.loaded for server in servers] == [[server.root, str(checkpoint)] for server in servers]
    sender.failure = None
    await engine.update_weights(tensors, "v1")
    assert [name for name, _ in sender.events] == ["open", "close", "open", "send"]
    assert fleet.weight_version == "v1"


async def test_a_server_that_fails_to_begin_keeps_all_from_receiving(servers, fleet, checkpoint, tensors):
    servers[1].script[START] = [answer({"error": {"message": "it broke"}}, status=500)]
    with pytest.raises(WeightUpdateError, match="no weights were sent"):
        await TransferEngine(fleet, RecordingSender()).update_weights(tensors, "v1")
    assert UPDATE not in servers[0].calls
    assert [server.loaded for server in servers] == [[server.root, str(checkpoint)] for server in servers]


async def test_without_a_directory_of_the_weights_of_before_a_failure_leaves_the_server_paused_until_the_next_update(
    servers, tensors
):
    sender = RecordingSender()
    async with VLLMEngine(servers[0].base_url, limits=FAST_RETRIES) as engine:
        transfer = TransferEngine(engine, sender)
        await transfer.update_weights(tensors, "v1")
        sender.failure = ConnectionError("the network is down")
        with pytest.raises(WeightUpdateError, match="left paused, with parameters that have no storage"):
            await transfer.update_weights(tensors, "v2")
        assert await engine.control.is_paused()
        with pytest.raises(EngineError, match="a transfer of weights was begun and not seen to end"):
            await engine.control.resume()
        sender.failure = None
        await transfer.update_weights(tensors, "v3")
        assert not await engine.control.is_paused()
        assert await generate_one(engine, request())


async def test_a_server_without_the_flag_is_an_error_that_names_it(servers, fleet, tensors):
    text = "Weight transfer not configured. Please set weight_transfer_config"
    servers[0].script[INIT] = [answer({"error": {"message": text, "code": 500}}, status=500)]
    with pytest.raises(CapabilityError, match="--weight-transfer-config"):
        await TransferEngine(fleet, RecordingSender()).update_weights(tensors, "v1")
    assert START not in [*servers[0].calls, *servers[1].calls]


async def test_closing_leaves_the_transport(servers, fleet, tensors):
    sender = RecordingSender()
    engine = TransferEngine(fleet, sender)
    await engine.update_weights(tensors, "v1")
    await engine.close()
    assert sender.events[-1] == ("close", None)
    assert [server.calls[-1] for server in servers] == ["/shutdown_weight_transfer_engine"] * 2


def test_wrong_arguments_are_refused():
    with pytest.raises(ArgumentError, match="bucket_bytes"):
        TransferEngine(object(), RecordingSender(), bucket_bytes=0)
    with pytest.raises(ArgumentError, match="port"):
        NCCLSender("10.0.0.1", 0)


def test_nccl_gives_every_worker_of_every_server_a_rank_after_that_of_the_trainer():
    sender = NCCLSender("10.0.0.1", 29500)
    infos = [sender.init_info(before, 8) for before in (0, 4)]
    assert [info["rank_offset"] for info in infos] == [1, 5]
    assert {info["world_size"] for info in infos} == {9}
    assert {(info["master_address"], info["master_port"]) for info in infos} == {("10.0.0.1", 29500)}
