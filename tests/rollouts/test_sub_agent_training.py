"""Log-probabilities of all agents of an episode, sampled and recomputed by the tiny model."""

import asyncio

import numpy as np
import pytest
import torch
from sub_agents import Delegating, Echo, play, user
from transformers import AutoModelForImageTextToText

from rollouts import LocalEngine, SamplingParams
from rollouts.training import TrainingBatch, mismatch_report, samples_from_trajectory, token_logprobs

IMAGE = np.arange(32 * 32 * 3, dtype=np.uint8).reshape(32, 32, 3)


@pytest.fixture(scope="module")
def model(tiny_model_dir):
    return AutoModelForImageTextToText.from_pretrained(tiny_model_dir, dtype=torch.float32)


def test_the_trainer_computes_the_log_probabilities_of_every_agent(tiny_model_dir, renderer, model):
    """Children with images run at the same time, with a critic that continues its own turn."""

    async def work(context, assistant):
        async def criticise():
            first = await context.generate_turn([user("look", IMAGE[::-1].copy())], agent="critic")
            await context.generate_turn([user("and now?", IMAGE)], agent="critic", after=first)

        await asyncio.gather(
            criticise(),
            context.run_child(Echo("one", turns=3, images=[IMAGE]), agent="solver-1", max_turns=3),
            context.run_child(Echo("two", turns=2), agent="solver-2", max_turns=3),
        )

    engine = LocalEngine.from_pretrained(tiny_model_dir)
    trajectory = play(Delegating(work), engine, renderer, sampling=SamplingParams(max_tokens=12, seed=1))
    assert sorted(turn.agent for turn in trajectory.turns) == [
        "",
        *["critic"] * 2,
        *["solver-1"] * 3,
        *["solver-2"] * 2,
    ]

    for agents in ({""}, {"critic"}, {"solver-1"}, {"solver-2"}, None):
        samples = samples_from_trajectory(trajectory, advantage=1.0, processors=renderer.processors, agents=agents)
        batch = TrainingBatch.from_samples(samples, pad_id=0)
        with torch.no_grad():
            report = mismatch_report(batch, token_logprobs(model, batch))
        sampled = [turn for turn in trajectory.turns if agents is None or turn.agent in agents]
        assert report.tokens == sum(len(trajectory.nodes[turn.node].logprobs) for turn in sampled)
        assert report.max_abs < 1e-5
