"""A valid configuration with its files, changed forms of it, and what `rollouts run` writes for it."""

import json
from pathlib import Path
from typing import Any

from click.testing import Result
from typer.testing import CliRunner

from rollouts.cli.main import app
from rollouts.testing import tiny_qwen3_vl
from rollouts.trajectory.tree import Trajectory
from transport import read_records

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

FOURS = CONFIG.replace('["4", "7"]', '["4"]')  # task "four" is solved in one turn; "seven" is not solved in two

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


def changed(old: str, new: str) -> str:
    """The configuration with `new` in place of `old`."""
    assert CONFIG.count(old) == 1, old
    return CONFIG.replace(old, new)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["run", *map(str, arguments)])


def rows_of(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "out/metrics.jsonl").read_text().splitlines()]


def groups_of(directory: Path) -> list[list[Trajectory]]:
    return list(read_records(directory / "out/trajectories.mmr"))


def summary_of(directory: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((directory / "out/summary.json").read_text())
    return summary
