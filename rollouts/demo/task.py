"""The task of the demonstration: images of digits, their messages, the curriculum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from renderers import Message
from renderers.errors import MissingExtraError
from rollouts.episodes.environment import StepResult
from rollouts.training.mismatch import MismatchReport
from rollouts.trajectory.tree import Trajectory
from transport import wire_type

# An environment of handwritten digits: the 1,797 images (8x8) of scikit-learn, two tries each.


QUESTION = "Which digit?"
SECOND_QUESTION = "No. Again?"


@dataclass(frozen=True, eq=False)
class DigitSet:
    """Images uint8 (n, 8, 8), black on white, and labels int64 (n,)."""

    images: np.ndarray
    labels: np.ndarray

    @cached_property
    def plain(self) -> np.ndarray:
        """uint8 (n, 32, 32): the images enlarged 4 times."""
        return _enlarged(self.images)

    @cached_property
    def sharp(self) -> np.ndarray:
        """uint8 (n, 32, 32): as `plain`, with the contrast increased until strokes are black."""
        ink = np.clip((1 - self.images / 255 - 0.3) / 0.4, 0, 1)
        return _enlarged((255 - np.round(ink * 255)).astype(np.uint8))

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: Sequence[int] | np.ndarray) -> DigitSet:
        return DigitSet(self.images[indices], self.labels[indices])


def load_digit_sets() -> tuple[DigitSet, DigitSet]:
    """Return (training set, held-out set), of which the second has a fifth of the images of each digit."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MissingExtraError("DigitsEnvironment", "demo", "scikit-learn") from error
    data = load_digits()
    ink = data.images / data.images.max()
    everything = DigitSet((255 - np.round(ink * 255)).astype(np.uint8), data.target.astype(np.int64))
    shuffled = np.random.default_rng(0).permutation(len(everything))
    in_held_out = np.zeros(len(everything), dtype=bool)
    for digit in range(10):
        of_this_digit = shuffled[everything.labels[shuffled] == digit]
        in_held_out[of_this_digit[: round(len(of_this_digit) * 0.2)]] = True
    return everything.take(shuffled[~in_held_out[shuffled]]), everything.take(shuffled[in_held_out[shuffled]])


class DigitsEnvironment:
    """Show a digit and request its name; after a wrong answer show a sharpened image and request it again.

    Reward: 1.0 for a correct first answer, 0.5 for a correct second answer, otherwise 0. An answer is correct
    if it is the digit alone. `reset(seed)` shows digit `seed` modulo the size of the set. `blank` shows white
    images instead: a policy that scores above chance then does not use the image.
    """

    def __init__(self, digits: DigitSet, *, blank: bool = False) -> None:
        self._digits = digits
        self._blank = blank
        self._index = 0
        self._tries = 0

    def reset(self, seed: int) -> list[Message]:
        self._index = seed % len(self._digits)
        self._tries = 0
        return [self._ask(self._digits.plain, QUESTION)]

    def step(self, assistant: Message) -> StepResult:
        self._tries += 1
        right = assistant["content"] == str(self._digits.labels[self._index])
        info: dict[str, Any] = {"right": right}
        if right:
            return StepResult(reward=1.0 if self._tries == 1 else 0.5, done=True, info=info)
        if self._tries == 2:
            return StepResult(done=True, info=info)
        return StepResult(messages=[self._ask(self._digits.sharp, SECOND_QUESTION)], info=info)

    def _ask(self, view: np.ndarray, text: str) -> Message:
        pixels = np.full_like(view[0], 255) if self._blank else view[self._index]
        return {"role": "user", "content": [{"type": "image", "image": pixels}, {"type": "text", "text": text}]}

    def answer(self) -> str:
        """Return the correct answer to the last question."""
        return str(self._digits.labels[self._index])


def _enlarged(images: np.ndarray) -> np.ndarray:
    return images.repeat(4, axis=1).repeat(4, axis=2)


@wire_type("rollouts.demo.WarmStart")
@dataclass(frozen=True, slots=True)
class WarmStart:
    """Request `steps` supervised optimizer steps."""

    steps: int


@wire_type("rollouts.demo.Learn")
@dataclass(frozen=True, slots=True)
class Learn:
    """Request one policy-gradient step on these episodes. `progress` in [0, 1): completed share of the run.

    `measure_after`: also measure the mismatch between the sampler and the weights after the step.
    """

    trajectories: list[Trajectory]
    progress: float
    measure_after: bool = False


@wire_type("rollouts.demo.Learned")
@dataclass(frozen=True, slots=True)
class Learned:
    """The weights after the step, by parameter name, and the measurements of the step.

    `mismatch`: between the sampler and the weights before the step, which sampled the episodes.
    `mismatch_after`, if requested: between the sampler and the weights after the step, on some of the
    episodes.
    """

    weights: dict[str, np.ndarray]
    loss: float
    mismatch: MismatchReport = field(default_factory=MismatchReport)
    mismatch_after: MismatchReport = field(default_factory=MismatchReport)


class Curriculum:
    """Shuffled passes over all digits. A pass leaves out most of the digits that were solved when last used.

    A digit is solved if every episode of its group answered correctly at the first try: such a group has no
    gradient.
    """

    def __init__(self, count: int, *, kept_solved: float, seed: int) -> None:
        self._kept_solved = kept_solved
        self._solved = np.zeros(count, dtype=bool)
        self._random = np.random.default_rng(seed)
        self._waiting = np.empty(0, dtype=np.int64)

    def next(self, number: int) -> np.ndarray:
        """Return the next `number` distinct digits, int64 (number,)."""
        while len(self._waiting) < number:
            next_pass = self._pass()
            self._waiting = np.concatenate([self._waiting, next_pass[~np.isin(next_pass, self._waiting)]])
        chosen, self._waiting = np.split(self._waiting, [number])
        return chosen

    def record_results(self, digits: np.ndarray, solved: np.ndarray) -> None:
        """Record which digits (int64) were solved (bool, same shape)."""
        self._solved[digits] = solved

    def _pass(self) -> np.ndarray:
        order = self._random.permutation(len(self._solved))
        solved = order[self._solved[order]]
        kept = solved[: round(self._kept_solved * len(solved))]
        chosen = order[~self._solved[order] | np.isin(order, kept)]
        # If nearly all digits are solved, a pass must not become empty.
        return chosen if len(chosen) > len(order) // 10 else order
