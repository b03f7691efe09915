"""The environment of colours.toml: name the colour of a square. A wrong answer gets a larger square and another turn.

python examples/run_config/colours.py          # writes the tiny model that colours.toml names
rollouts run examples/run_config/colours.toml
"""

from pathlib import Path

import numpy as np

from rollouts import StepResult
from rollouts.testing import tiny_qwen3_vl


class GuessTheColour:
    def __init__(self, task, side):
        self.name, self.rgb, self.side = task.data["name"], task.data["rgb"], side

    def reset(self, seed):
        return [self.question("Which colour is this?")]

    def step(self, assistant):
        if assistant["content"].strip() == self.name:
            return StepResult(reward=1.0, done=True)
        self.side += 16
        return StepResult([self.question("No. Look again.")])

    def question(self, text):
        square = np.full((self.side, self.side, 3), self.rgb, dtype=np.uint8)
        return {"role": "user", "content": [{"type": "image", "image": square}, {"type": "text", "text": text}]}


def shorter_is_better(episodes):
    """1 for the episodes of a group with the fewest turns, 0 for the others and for those that failed."""
    fewest = min((episode.num_turns for episode in episodes if not episode.error), default=0)
    return [float(not episode.error and episode.num_turns == fewest) for episode in episodes]


if __name__ == "__main__":
    print(tiny_qwen3_vl(Path(__file__).parent / "model"))
