"""Episodes with an image in every turn, and the mismatch of their samples for each version of the weights."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForImageTextToText

from renderers import load_renderer
from rollouts import StepResult, Trajectory
from rollouts.runner import Group, Task
from rollouts.training import TrainingBatch, TrainingSample, samples_from_trajectory, token_logprobs


class Gallery:
    """Shows a new image in each of `turns` turns."""

    def __init__(self, task: Task, turns: int) -> None:
        self._number = task.data
        self._turns = turns

    def reset(self, seed: int) -> list[dict[str, Any]]:
        self._random = np.random.default_rng([seed, self._number])
        self._turn = 0
        return [self._image("What is it?")]

    def step(self, assistant: Any) -> StepResult:
        self._turn += 1
        return StepResult([self._image("And this?")], reward=1.0, done=self._turn == self._turns)

    def _image(self, text: str) -> dict[str, Any]:
        pixels = self._random.integers(0, 256, (64, 48, 3), dtype=np.uint8)
        return {"role": "user", "content": [{"type": "image", "image": pixels}, {"type": "text", "text": text}]}


def reference_model(directory: Path) -> Any:
    """transformers' model of a checkpoint, float32."""
    return AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).eval()


def samples_of(groups: Iterable[Group], model_dir: Path, *, episodes: int, turns: int) -> list[TrainingSample]:
    """The samples of all episodes, after a check that there are `episodes` of `turns` turns and that none failed."""
    found = [episode for group in groups for episode in group.episodes]
    return samples_of_episodes(found, model_dir, episodes=episodes, turns=turns)


def samples_of_episodes(
    found: Iterable[Trajectory], model_dir: Path, *, episodes: int, turns: int
) -> list[TrainingSample]:
    """As `samples_of`."""
    found = list(found)
    assert [episode.error for episode in found] == [""] * episodes
    assert {episode.num_turns for episode in found} == {turns}
    # With `min_tokens` stop tokens are left out; the server's log-probabilities are those before it.
    options: dict[str, Any] = {"processors": load_renderer(model_dir).processors, "unknown_kept": "keep"}
    return [sample for episode in found for sample in samples_from_trajectory(episode, advantage=1.0, **options)]


def mismatches(model: Any, samples: list[TrainingSample], version: str) -> np.ndarray:
    """|log p(sampler) - log p(model)| of every token that `version` sampled."""
    batch = TrainingBatch.from_samples(samples, pad_id=0)
    with torch.inference_mode():
        recomputed = token_logprobs(model, batch).numpy()
    differences = []
    for row, sample in enumerate(samples):
        length = len(sample.token_ids)
        found = np.abs(recomputed[row, :length] - sample.logprobs)[sample.loss_mask]
        differences += [found[span.start : span.end] for span in sample.weight_spans if span.version == version]
    return np.concatenate(differences) if differences else np.empty(0)
