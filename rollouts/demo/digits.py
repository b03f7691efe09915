"""Handwritten digits of 8 x 8 pixels: the model names one, and after a wrong answer it sees it with more contrast."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np

from rollouts import StepResult, Task


@cache
def digits(held_out: bool, sharp: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Images uint8 (n, 32, 32), black on white, and the digits int64 (n,): 1,437 of them, or 360 held out."""
    from sklearn.datasets import load_digits

    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    chosen = order[:360] if held_out else order[360:]
    ink = np.clip((data.images[chosen] / 16 - 0.3) / 0.4, 0, 1) if sharp else data.images[chosen] / 16
    return (255 - np.round(ink * 255)).astype(np.uint8).repeat(4, axis=1).repeat(4, axis=2), data.target[chosen]


def tasks(held_out: bool = False) -> list[Task]:
    return [Task(f"digit {index}", (index, held_out)) for index in range(len(digits(held_out)[1]))]


class ReadDigit:
    """A right first answer earns 1, a right second one 0.5. With `blank`, all images are white."""

    def __init__(self, task: Task, blank: bool = False) -> None:
        self.index, self.held_out = task.data
        self.blank, self.tries = blank, 0

    def reset(self, seed: int) -> list[Any]:
        return [self.question("Which digit?", sharp=False)]

    def step(self, assistant: Any) -> StepResult:
        self.tries += 1
        if assistant["content"] == str(digits(self.held_out)[1][self.index]):
            return StepResult(reward=1.0 if self.tries == 1 else 0.5, done=True)
        return StepResult([self.question("No. Again?", sharp=True)], done=self.tries == 2)

    def question(self, text: str, sharp: bool) -> Any:
        image = digits(self.held_out, sharp)[0][self.index]
        shown = np.full_like(image, 255) if self.blank else image
        return {"role": "user", "content": [{"type": "image", "image": shown}, {"type": "text", "text": text}]}


def conversations(count: int) -> Iterator[Task]:
    """Right answers to `count` digits: at once, and after a wrong answer."""
    random = np.random.default_rng(0)
    for task in tasks()[:count]:
        environment, digit = ReadDigit(task), int(digits(False)[1][task.data[0]])
        right = {"role": "assistant", "content": str(digit)}
        wrong = {"role": "assistant", "content": str((digit + random.integers(1, 10)) % 10)}
        asked = environment.reset(0)
        yield Task(f"{task.task_id} at once", {"messages": [*asked, right]})
        yield Task(f"{task.task_id} again", {"messages": [*asked, wrong, *environment.step(wrong).messages, right]})
