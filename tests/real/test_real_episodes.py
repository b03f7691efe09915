"""Complete episodes with a real server: its log-probabilities are those of transformers on the trajectory."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from renderers import load_renderer
from rollouts import SamplingParams, StepResult
from rollouts.engines.vllm import VLLMEngine
from rollouts.episodes.episode import EpisodeSpec, run_episodes
from rollouts.training import TrainingBatch, mismatch_report, samples_from_trajectory, token_logprobs

TURNS = 4


class Gallery:
    """Shows several new images every turn, whatever the policy answers; sizes and texts vary by seed."""

    def reset(self, seed: int):
        self.random = np.random.default_rng(seed)
        self.turn = 0
        return [
            {"role": "system", "content": f"You are critic {seed}."},
            {"role": "user", "content": [*self._images(), {"type": "text", "text": "What do you see?"}]},
        ]

    def step(self, message):
        self.turn += 1
        texts = ["", "And now?", "é 中 🙂", "<|im_end|> is text here, and so is <|image_pad|>"]
        parts = [*self._images(), {"type": "text", "text": texts[self.turn % len(texts)]}, *self._images()]
        return StepResult([{"role": "user", "content": parts}], reward=0.0, done=self.turn == TURNS)

    def _images(self):
        for _ in range(self.random.integers(0, 3)):
            height, width = (int(side) for side in self.random.integers(20, 120, 2))
            yield {"type": "image", "image": self.random.integers(0, 256, (height, width, 3), dtype=np.uint8)}


@pytest.mark.parametrize("vllm_server", ["float32", "float32-host-normalise"], indirect=True)
async def test_log_probabilities_of_fifty_episodes_with_images_are_those_of_transformers(vllm_server):
    renderer = load_renderer(vllm_server.model_dir)
    specs = [EpisodeSpec(seed, sampling_seed=seed) for seed in range(50)]
    async with VLLMEngine(vllm_server.base_url) as engine:
        trajectories = await run_episodes(
            Gallery, specs, engine=engine, renderer=renderer, sampling=SamplingParams(max_tokens=12), max_turns=TURNS
        )
    assert sum(len(list(t.all_media())) for t in trajectories) > 200
    reports = mismatches(trajectories, renderer, vllm_server.model_dir)
    assert sum(report.tokens for report in reports) > 50 * TURNS * 4
    assert max(report.max_abs for report in reports) < 1e-4


def mismatches(trajectories, renderer, model_dir):
    model = AutoModelForImageTextToText.from_pretrained(model_dir, dtype=torch.float32)
    reports = []
    for trajectory in trajectories:
        samples = samples_from_trajectory(trajectory, advantage=1.0, processors=renderer.processors)
        batch = TrainingBatch.from_samples(samples, pad_id=0)
        with torch.inference_mode():
            logprobs = token_logprobs(model, batch)
        reports.append(mismatch_report(batch, logprobs))
    return reports
