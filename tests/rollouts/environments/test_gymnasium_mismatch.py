"""A real model plays Gymnasium from its frames: the trainer computes the log-probabilities of the sampler."""

import asyncio

import gymnasium
import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from rollouts import LocalEngine, SamplingParams, run_episode
from rollouts.environments import GymnasiumEnvironment
from rollouts.training import TrainingBatch, mismatch_report, samples_from_trajectory, token_logprobs


@pytest.mark.slow
def test_the_trainer_computes_the_log_probabilities_of_an_episode_of_frames(tiny_model_dir, renderer):
    async def play():
        engine = LocalEngine.from_pretrained(tiny_model_dir)
        environment = GymnasiumEnvironment(
            lambda: gymnasium.make("FrozenLake-v1", render_mode="rgb_array"), parse_action=lambda text: len(text) % 4
        )
        sampling = SamplingParams(max_tokens=3, seed=0)
        episode = await run_episode(
            environment, engine=engine, renderer=renderer, sampling=sampling, max_turns=3, seed=1
        )
        await engine.close()
        return episode

    episode = asyncio.run(play())
    assert len(list(episode.all_media())) == episode.num_turns == 3
    samples = samples_from_trajectory(episode, advantage=1.0, processors=renderer.processors)
    batch = TrainingBatch.from_samples(samples, pad_id=0)
    model = AutoModelForImageTextToText.from_pretrained(tiny_model_dir, dtype=torch.float32)
    with torch.no_grad():
        report = mismatch_report(batch, token_logprobs(model, batch))
    assert report.tokens == sum(np.count_nonzero(node.sampled) for node in episode.nodes)
    assert report.max_abs < 1e-5
