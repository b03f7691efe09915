"""The experts that a real server chose compute the log-probabilities that it sampled with; see `expert_records.py`."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rollouts import GenerateRequest, SamplingParams, Trajectory
from rollouts.models.loading import load_model
from rollouts.training import TrainingBatch, samples_from_trajectory, token_logprobs

pytestmark = pytest.mark.parametrize("vllm_server", ["olmoe", "qwen3-omni-experts"], indirect=True)


def rpc(server, method, **arguments):
    response = server.http.post("/collective_rpc", json={"method": method, "kwargs": arguments})
    (result,) = response.raise_for_status().json()["results"]
    return result


def message(images, seed):
    parts = [{"type": "text", "text": f"What do you see? {seed}"}]
    if images:
        pixels = np.random.default_rng(seed).integers(0, 256, (64, 96, 3), dtype=np.uint8)
        parts.insert(0, {"type": "image", "image": pixels})
    return {"role": "user", "content": parts}


async def sampled(server, engine, renderer, *, rounded):
    """Samples of eight completions with the server's experts."""
    images = bool(renderer.processors)
    rpc(server, "record_experts", rounded=rounded)
    samples = []
    for seed in range(8):
        rendered = renderer.render([message(images, seed)], add_generation_prompt=True)
        request = GenerateRequest(
            rendered.token_ids,
            SamplingParams(max_tokens=32, seed=seed, extra={"ignore_eos": True}),
            rendered.multi_modal_data,
            placeholder_token_ids=rendered.placeholder_token_ids,
        )
        (completion,) = (await engine.generate(request)).completions
        experts = np.array(rpc(server, "recorded_experts"), np.uint8)
        trajectory = Trajectory(str(seed))
        said = {"role": "assistant", "content": ""}
        trajectory.add_turn(rendered, replace(completion, routed_experts=experts), said)
        samples += samples_from_trajectory(trajectory, advantage=1.0, processors=renderer.processors)
    assert sum(len(sample.media) for sample in samples) == 8 * images
    return samples


def differences(model, samples, **options):
    batch = TrainingBatch.from_samples(samples, pad_id=0)
    with torch.no_grad():
        logprobs = token_logprobs(model, batch, **options)
    return (logprobs - batch.logprobs)[batch.loss_mask].abs()


async def test_the_server_s_experts_are_those_of_the_tokens_that_they_computed(vllm_server, engine, renderer):
    samples = await sampled(vllm_server, engine, renderer, rounded=False)
    model = load_model(vllm_server.model_dir).eval()
    assert differences(model, samples).max() < 1e-4, "float32 on both sides: the model chooses the same"
    assert differences(model, samples, routed_experts=True).max() < 1e-4
    late = [replace(each, routed_experts=np.roll(each.routed_experts, 1, axis=0)) for each in samples]
    assert differences(model, late, routed_experts=True).max() > 1e-2, "the planted fault: those of the token before"


async def test_a_mismatch_by_other_experts_of_the_server_is_gone_where_they_are_replayed(vllm_server, engine, renderer):
    samples = await sampled(vllm_server, engine, renderer, rounded=True)
    model = load_model(vllm_server.model_dir).eval()
    before, after = differences(model, samples), differences(model, samples, routed_experts=True)
    assert after.max() < 1e-4 < 1e-1 < before.max()
