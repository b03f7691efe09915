"""An environment of handwritten digits: the 1,797 images (8x8) of scikit-learn, two tries each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from renderers import Message
from rollouts.episodes.environment import StepResult
from rollouts.errors import MissingExtraError

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


def load_digit_sets(held_out: float = 0.2) -> tuple[DigitSet, DigitSet]:
    """Return (training set, held-out set). The split is deterministic and stratified by digit."""
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
        in_held_out[of_this_digit[: round(len(of_this_digit) * held_out)]] = True
    return everything.take(shuffled[~in_held_out[shuffled]]), everything.take(shuffled[in_held_out[shuffled]])


class DigitsEnvironment:
    """Show a digit and request its name; after a wrong answer show a sharpened image and request it again.

    Reward: 1.0 for a correct first answer, 0.5 for a correct second answer, otherwise 0. An answer is correct if it is
    the digit alone. `reset(seed)` shows digit `seed` modulo the size of the set. `blank` shows white images instead: a
    policy that scores above chance then does not use the image.
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
