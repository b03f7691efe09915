"""A valid configuration with its files, and changed forms of it."""

from __future__ import annotations

from pathlib import Path

from rollouts.testing import tiny_qwen3_vl

CONFIG = """\
# A valid configuration.
seed = 3
group_size = 2
concurrency = 4

[tasks]
kind = "jsonl"
path = "tasks.jsonl"
id_key = "name"

[environment]
kind = "import"
factory = "guess_env:Guess"
arguments = { tries = 2 }

[engine]
kind = "scripted"
completions = ["4", "7"]

[renderer]
model = "model"

[sampling]
max_tokens = 16
temperature = 0.5

[limits]
max_turns = 4

[output]
directory = "out"
"""

ENVIRONMENT = '''\
"""Guess a number."""

from rollouts import StepResult

NUMBER = 5


class Guess:
    def __init__(self, task, tries=3):
        self.number, self.tries = task.data["number"], tries

    def reset(self, seed):
        return [{"role": "user", "content": "Which number from 0 to 9?"}]

    def step(self, assistant):
        self.tries -= 1
        right = assistant["content"].strip() == str(self.number)
        if right or not self.tries:
            return StepResult(reward=float(right), done=True)
        return StepResult([{"role": "user", "content": "No. Again?"}])
'''

TASKS = '{"name": "four", "number": 4}\n{"name": "seven", "number": 7}\n'


def write_run(directory: Path, config: str = CONFIG, *, model: bool = True) -> Path:
    """Write a configuration with its tasks, its environment and a model without weights; returns its path."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tasks.jsonl").write_text(TASKS)
    (directory / "guess_env.py").write_text(ENVIRONMENT)
    if model:
        tiny_qwen3_vl(directory / "model", weights=False)
    path = directory / "run.toml"
    path.write_text(config)
    return path


def changed(old: str, new: str) -> tuple[str, int]:
    """The configuration with `new` in place of `old`, and the number of the last line of `new`, from 1."""
    assert CONFIG.count(old) == 1, old
    before, _, after = CONFIG.partition(old)
    return before + new + after, (before + new).count("\n") + 1
