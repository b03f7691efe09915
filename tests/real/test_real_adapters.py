"""LoRA adapters on a real server: several beside each other, replaced while episodes with images run, refused.

The log-probabilities of every adapter are those of transformers with the adapter merged into the weights.
"""

import asyncio

import numpy as np
import pytest
from gallery_runs import Gallery, mismatches, reference_model, samples_of
from make_adapter import make_adapter, merged_checkpoint
from vllm_server import LONGEST_SECONDS

from renderers import load_renderer
from rollouts import GenerateRequest, SamplingParams
from rollouts.engines.lora import LoRAEngine
from rollouts.errors import CapabilityError, UnknownAdapterError, WeightUpdateError
from rollouts.runner import Asynchronous, EpisodeLimits, Runner, Task

EPISODES, TURNS, TOKENS = 4, 2, 500
ADAPTERS = ("policy@1", "policy@2")


@pytest.fixture(scope="module")
def adapters(checkpoints, tmp_path_factory):
    """Two directories with adapters."""
    root = tmp_path_factory.mktemp("adapters")
    return {
        name: make_adapter(root / str(seed), checkpoints["float32"], seed=seed) for seed, name in enumerate(ADAPTERS)
    }


@pytest.fixture
async def engine(engine):
    yield engine
    for name in await engine.adapters():
        await engine.unload_adapter(name)


def prompt(**options):
    return GenerateRequest([5, 6, 7, 8, 9], SamplingParams(max_tokens=8, temperature=0.0), **options)


async def sampled(engine, **options):
    (completion,) = (await engine.generate(prompt(**options))).completions
    return completion


@pytest.mark.parametrize("vllm_server", ["lora"], indirect=True)
async def test_episodes_continue_with_the_new_adapter_and_every_span_has_the_log_probabilities_of_its_own(
    vllm_server, engine, adapters, tmp_path
):
    policy = LoRAEngine(engine, "policy")
    await policy.update_weights(adapters["policy@1"], "policy@1")
    before = await vllm_server.metrics()
    runner = Runner(
        lambda task: Gallery(task, TURNS),
        policy,
        load_renderer(vllm_server.model_dir),
        sampling=SamplingParams(max_tokens=TOKENS, extra={"min_tokens": TOKENS}),
        limits=EpisodeLimits(max_turns=TURNS),
        mode=Asynchronous(1),
        tasks=[Task(str(number), number) for number in range(EPISODES)],
    )
    async with runner:
        collecting = asyncio.ensure_future(runner.collect(EPISODES))
        await vllm_server.until_generating(collecting, before, EPISODES)
        await runner.update_weights(adapters["policy@2"], "policy@2", "abort")
        groups = await asyncio.wait_for(collecting, LONGEST_SECONDS)
    assert list(await engine.adapters()) == ["policy@2"]

    samples = samples_of(groups, vllm_server.model_dir, episodes=EPISODES, turns=TURNS)
    total = 0
    for name, adapter in adapters.items():
        checkpoint = merged_checkpoint(tmp_path / name, vllm_server.model_dir, adapter)
        found = mismatches(reference_model(checkpoint), samples, name)
        assert found.size
        assert found.max() < 1e-4
        total += found.size
    assert total == EPISODES * TURNS * TOKENS
    # The detector: the weights of the model alone are not those that sampled.
    assert mismatches(reference_model(vllm_server.model_dir), samples, "policy@2").max() > 1e-2


@pytest.mark.parametrize("vllm_server", ["lora"], indirect=True)
async def test_adapters_beside_each_other_sample_different_tokens_and_come_back_with_equal_ones(engine, adapters):
    for name, directory in adapters.items():
        await engine.load_adapter(name, directory)
    completions = await asyncio.gather(*(sampled(engine, adapter=name) for name in ADAPTERS))
    # Not in one batch with them: torch_ops of vLLM 0.32, for CPUs, gives a request without an adapter the adapter of
    # the last slot, because its index is -1.
    completions.append(await sampled(engine))
    assert len({tuple(each.logprobs.tolist()) for each in completions}) == 3
    assert [each.weight_spans[0].version for each in completions] == [*ADAPTERS, "default"]
    again = [await sampled(engine, adapter=name) for name in (*ADAPTERS, None)]
    for first, second in zip(completions, again, strict=True):
        assert first.token_ids.tolist() == second.token_ids.tolist()
        np.testing.assert_allclose(first.logprobs, second.logprobs, atol=1e-4)


@pytest.mark.parametrize("vllm_server", ["lora"], indirect=True)
async def test_an_adapter_that_the_server_cannot_use_is_refused_and_the_others_go_on(
    vllm_server, engine, adapters, tmp_path
):
    await engine.load_adapter("good", adapters["policy@1"])
    before = await sampled(engine, adapter="good")
    wide = make_adapter(tmp_path / "wide", vllm_server.model_dir, seed=3, rank=16)  # --max-lora-rank is 8
    with pytest.raises(WeightUpdateError, match="rank 16"):
        await engine.load_adapter("wide", wide)
    broken = make_adapter(tmp_path / "broken", vllm_server.model_dir, seed=3)
    (broken / "adapter_model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(WeightUpdateError, match="has not loaded"):
        await engine.load_adapter("broken", broken)
    assert list(await engine.adapters()) == ["good"]
    assert (await sampled(engine, adapter="good")).token_ids.tolist() == before.token_ids.tolist()
    with pytest.raises(UnknownAdapterError, match="loaded: 'good'"):
        await sampled(engine, adapter="wide")


@pytest.mark.parametrize("vllm_server", ["text"], indirect=True)
async def test_a_server_that_was_started_without_adapters_is_an_error_with_its_flags(engine, adapters):
    with pytest.raises(CapabilityError, match="--enable-lora"):
        await engine.load_adapter("policy@1", adapters["policy@1"])
