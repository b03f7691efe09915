"""Weights that a trainer sends to a real server by vLLM's weight transfer, through files instead of NCCL."""

import asyncio
import os

import pytest
from gallery_runs import Gallery, mismatches, reference_model, samples_of
from safetensors.torch import load_file, save_file
from vllm_server import LONGEST_SECONDS

from renderers import load_renderer
from rollouts import GenerateRequest, SamplingParams
from rollouts.errors import CapabilityError, WeightUpdateError
from rollouts.runner import Asynchronous, EpisodeLimits, Runner, Task

EPISODES, TURNS, TOKENS = 4, 2, 500
OLD, NEW = "default", "new"


def buckets(tensors, max_bytes):
    """The tensors in their order, in parts of at most `max_bytes`; a larger tensor has a part of its own."""
    bucket = {}
    for name, tensor in tensors.items():
        if bucket and sum(each.nbytes for each in bucket.values()) + tensor.nbytes > max_bytes:
            yield bucket
            bucket = {}
        bucket[name] = tensor
    yield bucket


def sender(tensors, directory, *, fails_at=None):
    """What a trainer passes as weights: a file for each bucket of 100 kB. The file of bucket `fails_at` is cut off."""

    async def send(receive):
        for number, bucket in enumerate(buckets(tensors, 100_000)):
            path = directory / f"{number}.safetensors"
            save_file(bucket, path)
            if number == fails_at:
                os.truncate(path, 10)
            info = {
                "names": list(bucket),
                "dtype_names": [str(tensor.dtype).rpartition(".")[2] for tensor in bucket.values()],
                "shapes": [list(tensor.shape) for tensor in bucket.values()],
                "path": str(path),
            }
            await receive(info)

    return send


def tensors_of(checkpoint):
    return {name: tensor for path in checkpoint.glob("*.safetensors") for name, tensor in load_file(path).items()}


async def sampled(engine):
    request = GenerateRequest([5, 6, 7, 8, 9], SamplingParams(max_tokens=8, temperature=0.0))
    (completion,) = (await engine.generate(request)).completions
    return completion


@pytest.mark.parametrize("vllm_server", ["transfer"], indirect=True)
@pytest.mark.parametrize("in_flight", ["abort", "wait", "keep"])
@pytest.mark.usefixtures("restored")
async def test_episodes_continue_with_the_tensors_that_the_trainer_sends(
    vllm_server, engine, other, tmp_path, in_flight
):
    before = await vllm_server.metrics()
    runner = Runner(
        lambda task: Gallery(task, TURNS),
        engine,
        load_renderer(vllm_server.model_dir),
        sampling=SamplingParams(max_tokens=TOKENS, extra={"min_tokens": TOKENS}),
        limits=EpisodeLimits(max_turns=TURNS),
        mode=Asynchronous(1),
        tasks=[Task(f"{in_flight}-{number}", number) for number in range(EPISODES)],
    )
    async with runner:
        collecting = asyncio.ensure_future(runner.collect(EPISODES))
        await vllm_server.until_generating(collecting, before, EPISODES)
        await engine.control.init_weight_transfer({"rank_offset": 1, "world_size": 2})
        await engine.update_weights(sender(tensors_of(other), tmp_path), NEW, in_flight=in_flight)
        assert await engine.served_version() == NEW
        groups = await asyncio.wait_for(collecting, LONGEST_SECONDS)

    samples = samples_of(groups, vllm_server.model_dir, episodes=EPISODES, turns=TURNS)
    for version, checkpoint in ((OLD, vllm_server.model_dir), (NEW, other)):
        found = mismatches(reference_model(checkpoint), samples, version)
        assert found.size
        assert found.max() < 1e-4


@pytest.mark.parametrize("vllm_server", ["transfer"], indirect=True)
@pytest.mark.usefixtures("restored")
async def test_a_bucket_that_does_not_arrive_leaves_the_server_with_the_weights_of_before(engine, other, tmp_path):
    before = await sampled(engine)
    await engine.control.init_weight_transfer({"rank_offset": 1, "world_size": 2})
    tensors = tensors_of(other)
    with pytest.raises(WeightUpdateError, match="were loaded again; the server runs with them"):
        await engine.update_weights(sender(tensors, tmp_path, fails_at=2), NEW)
    after = await sampled(engine)
    assert after.token_ids.tolist() == before.token_ids.tolist()
    assert after.logprobs == pytest.approx(before.logprobs, abs=1e-5)
    assert await engine.served_version() == OLD

    await engine.update_weights(sender(tensors, tmp_path), NEW)
    assert (await sampled(engine)).logprobs != pytest.approx(before.logprobs, abs=1e-3)


@pytest.mark.parametrize("vllm_server", ["text"], indirect=True)
async def test_a_server_that_was_started_without_weight_transfer_is_an_error_with_its_flag(engine):
    with pytest.raises(CapabilityError, match="--weight-transfer-config"):
        await engine.control.init_weight_transfer({})
    assert not await engine.control.is_paused()
