"""Episodes on a real server for several architectures: its log-probabilities are those of the training side.

Episodes become samples, batches and log-probabilities as in a training run: `samples_from_trajectory`, `TrainingBatch`,
`token_logprobs`. Qwen3-VL: `test_real_episodes.py`.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rollouts import EpisodeSpec, SamplingParams, StepResult, run_episodes
from rollouts.engines.vllm import VLLMEngine
from rollouts.models.loading import load_model
from rollouts.training import TrainingBatch, samples_from_trajectory, token_logprobs

TURNS = 2
TEXTS = ["What do you see?", "And now, in a few words?", "é 中"]


class Gallery:
    """One or two new images every turn, or none for `images=False`; sizes and texts vary by seed."""

    def __init__(self, images: bool) -> None:
        self.images = images

    def reset(self, seed: int):
        self.random = np.random.default_rng(70_000 + seed)
        self.turn = 0
        return [self._message()]

    def step(self, message):
        self.turn += 1
        return StepResult([self._message()], reward=0.0, done=self.turn == TURNS)

    def _message(self):
        parts = [{"type": "text", "text": TEXTS[int(self.random.integers(len(TEXTS)))]}]
        for _ in range(int(self.random.integers(1, 3)) * self.images):
            height, width = (int(side) for side in self.random.integers(30, 110, 2))
            pixels = self.random.integers(0, 256, (height, width, 3), dtype=np.uint8)
            parts.insert(0, {"type": "image", "image": pixels})
        return {"role": "user", "content": parts}


async def sampled_episodes(server, renderer, *, images: bool):
    specs = [EpisodeSpec(seed, sampling_seed=seed) for seed in range(8)]
    # Random weights rarely sample a stop token; without it the end of each turn is the limit.
    sampling = SamplingParams(max_tokens=12)
    async with VLLMEngine(server.base_url) as engine:
        return await run_episodes(
            lambda: Gallery(images), specs, engine=engine, renderer=renderer, sampling=sampling, max_turns=TURNS
        )


def largest_difference(model, samples) -> dict[str, float]:
    """By layout, over all trained tokens: |log p of the server - log p of the trainer|."""
    found = {}
    for layout in ("padded", "packed"):
        batch = TrainingBatch.from_samples(samples, pad_id=0, layout=layout)
        with torch.no_grad():
            logprobs = token_logprobs(model, batch)
        found[layout] = float((logprobs - batch.logprobs)[batch.loss_mask].abs().max())
    return found


@pytest.mark.parametrize("vllm_server", ["qwen2.5-vl", "internvl3", "idefics3", "qwen3"], indirect=True)
async def test_log_probabilities_of_episodes_are_those_of_the_trainer(vllm_server, renderer):
    images = bool(renderer.processors)
    episodes = await sampled_episodes(vllm_server, renderer, images=images)
    # Random weights sample a placeholder token now and then, which content_parts (InternVL, Idefics3) cannot express.
    errors = [trajectory.error for trajectory in episodes if trajectory.error]
    assert all("would put the image in its place" in error for error in errors), errors
    trajectories = [trajectory for trajectory in episodes if not trajectory.error]
    assert len(trajectories) > len(episodes) / 2
    samples = [
        sample
        for trajectory in trajectories
        for sample in samples_from_trajectory(trajectory, advantage=1.0, processors=renderer.processors)
    ]
    assert sum(len(sample.media) for sample in samples) >= 2 * len(trajectories) * images
    assert sum(int(sample.loss_mask.sum()) for sample in samples) > 50
    model = load_model(vllm_server.model_dir).eval()
    assert max(largest_difference(model, samples).values()) < 1e-4

    # The planted fault: the images of another episode, in the same places.
    if images:
        (item, placeholder), *others = samples[0].media
        pool = [each for sample in samples[1:] for each, _ in sample.media]
        same_size = [each for each in pool if each.num_tokens == item.num_tokens and each.expansion == item.expansion]
        for another in same_size[:1]:
            wrong = replace(samples[0], media=((another, placeholder), *others))
            assert max(largest_difference(model, [wrong]).values()) > 1e-3
