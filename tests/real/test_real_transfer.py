"""Weights that a trainer sends to a real server by vLLM's weight transfer, through files instead of NCCL."""

from __future__ import annotations

import asyncio
import os

import pytest
from gallery_runs import Gallery, mismatches, reference_model, samples_of
from make_checkpoint import make_checkpoint
from safetensors.torch import load_file, save_file
from vllm_server import LONGEST_SECONDS

from renderers import load_renderer
from rollouts import GenerateRequest, SamplingParams
from rollouts.engines.vllm import VLLMEngine
from rollouts.engines.vllm.transfer import TransferEngine
from rollouts.errors import CapabilityError, WeightUpdateError
from rollouts.runner import Asynchronous, EpisodeLimits, Runner, Task

EPISODES, TURNS, TOKENS = 4, 2, 500
OLD, NEW = "default", "new"


class CountingSender:
    """A `WeightSender` that writes each bucket to a file, and counts what it does.

    `fails_at` is the number of a bucket whose file is cut off.
    """

    def __init__(self, directory, fails_at: int | None = None) -> None:
        self.path = str(directory / "bucket.safetensors")
        self.fails_at = fails_at
        self.opened = self.sent = 0

    def init_info(self, workers_before, num_workers):
        return {"rank_offset": 1 + workers_before, "world_size": 1 + num_workers}

    def open(self, num_workers):
        self.opened += 1

    def update_info(self, bucket):
        save_file({name: tensor.clone() for name, tensor in bucket}, self.path)
        if self.sent == self.fails_at:
            os.truncate(self.path, 10)
        self.sent += 1
        return {"path": self.path}

    def send(self, bucket):
        pass  # the servers read the file themselves

    def close(self):
        pass


def tensors_of(checkpoint):
    return {name: tensor for path in checkpoint.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.fixture
def new_directory(tmp_path):
    return make_checkpoint(tmp_path / "new", "float32", seed=21)


@pytest.fixture
async def engine(vllm_server):
    async with VLLMEngine(vllm_server.base_url) as engine:
        await engine.capabilities()
        yield engine
        await engine.control.update_weights_from_directory(vllm_server.model_dir, OLD)


async def sampled(engine):
    request = GenerateRequest([5, 6, 7, 8, 9], SamplingParams(max_tokens=8, temperature=0.0))
    (completion,) = (await engine.generate(request)).completions
    return completion


@pytest.mark.parametrize("vllm_server", ["transfer"], indirect=True)
@pytest.mark.parametrize("in_flight", ["abort", "wait", "keep"])
async def test_episodes_continue_with_the_tensors_that_the_trainer_sends(
    vllm_server, engine, new_directory, in_flight, tmp_path
):
    sender = CountingSender(tmp_path)
    transfer = TransferEngine(engine, sender, bucket_bytes=100_000)
    before = await vllm_server.metrics()
    runner = Runner(
        lambda task: Gallery(task, TURNS),
        transfer,
        load_renderer(vllm_server.model_dir),
        sampling=SamplingParams(max_tokens=TOKENS, extra={"min_tokens": TOKENS}),
        limits=EpisodeLimits(max_turns=TURNS),
        mode=Asynchronous(1),
        tasks=[Task(f"{in_flight}-{number}", number) for number in range(EPISODES)],
    )
    async with runner:
        collecting = asyncio.ensure_future(runner.collect(EPISODES))
        await vllm_server.until_generating(collecting, before, EPISODES)
        await runner.update_weights(tensors_of(new_directory), NEW, in_flight)
        assert await engine.control.weight_version() == NEW
        groups = await asyncio.wait_for(collecting, LONGEST_SECONDS)
    assert sender.opened == 1
    assert sender.sent > 5

    samples = samples_of(groups, vllm_server.model_dir, episodes=EPISODES, turns=TURNS)
    for version, checkpoint in ((OLD, vllm_server.model_dir), (NEW, new_directory)):
        found = mismatches(reference_model(checkpoint), samples, version)
        assert found.size
        assert found.max() < 1e-4


@pytest.mark.parametrize("vllm_server", ["transfer"], indirect=True)
async def test_a_bucket_that_does_not_arrive_leaves_the_server_with_the_weights_of_before(
    vllm_server, engine, new_directory, tmp_path
):
    before = await sampled(engine)
    sender = CountingSender(tmp_path, fails_at=2)
    transfer = TransferEngine(engine, sender, bucket_bytes=100_000)
    with pytest.raises(WeightUpdateError, match="were loaded again; the server runs with them"):
        await transfer.update_weights(tensors_of(new_directory), NEW)
    after = await sampled(engine)
    assert after.token_ids.tolist() == before.token_ids.tolist()
    assert after.logprobs == pytest.approx(before.logprobs, abs=1e-5)
    assert await engine.control.weight_version() == OLD

    sender.fails_at = None
    await transfer.update_weights(tensors_of(new_directory), NEW)
    assert sender.opened == 2
    assert (await sampled(engine)).logprobs != pytest.approx(before.logprobs, abs=1e-3)


@pytest.mark.parametrize("vllm_server", ["text"], indirect=True)
async def test_a_server_that_was_started_without_weight_transfer_is_an_error_with_its_flag(
    engine, new_directory, tmp_path
):
    with pytest.raises(CapabilityError, match="--weight-transfer-config"):
        await TransferEngine(engine, CountingSender(tmp_path)).update_weights(tensors_of(new_directory), NEW)
    assert not await engine.control.is_paused()
