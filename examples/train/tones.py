"""Low, middle and high tones: the model hears one and names it; after a wrong answer it hears another of the kind."""

import numpy as np

from rollouts import StepResult, Task

RATE, PITCHES = 16_000, {"low": 220, "mid": 660, "high": 1980}


def tasks(first=0):
    return [Task(f"tone {seed}", seed=seed) for seed in range(first, first + 300)]


class TellTones:
    def __init__(self, task):
        self.tries = 0

    def reset(self, seed):
        self.random, self.name = np.random.default_rng(seed), list(PITCHES)[seed % 3]
        return [self.question("Which tone?")]

    def step(self, assistant):
        self.tries += 1
        if assistant["content"] == self.name:
            return StepResult(reward=1.0 if self.tries == 1 else 0.5, done=True)
        return StepResult([self.question("No. Again:")], done=self.tries == 2)

    def question(self, text):
        seconds, pitch = np.arange(RATE // 2) / RATE, PITCHES[self.name] * self.random.uniform(0.9, 1.1)
        wave = self.random.uniform(0.1, 0.5) * np.sin(2 * np.pi * (pitch * seconds + self.random.random()))
        noisy = (wave + self.random.normal(0, 0.02, len(wave))).astype(np.float32)
        sound = {"type": "audio", "audio": noisy, "sampling_rate": RATE}
        return {"role": "user", "content": [{"type": "text", "text": text}, sound]}


def conversations():
    for seed in range(1000, 1024):
        environment = TellTones(None)
        asked = environment.reset(seed)
        yield Task(f"tone {seed}", {"messages": [*asked, {"role": "assistant", "content": environment.name}]})
