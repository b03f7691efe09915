"""A project whose model learns to write vowels below a coloured square, and the command that trains it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from click.testing import Result
from typer.testing import CliRunner

from rollouts.cli.main import app

ENVIRONMENT = """
import numpy as np
from rollouts import StepResult


class ManyVowels:
    def __init__(self, task):
        self.square = np.full((32, 32, 3), task.data["rgb"], np.uint8)

    def reset(self, seed):
        parts = [{"type": "image", "image": self.square}, {"type": "text", "text": "Sing."}]
        return [{"role": "user", "content": parts}]

    def step(self, assistant):
        text = assistant["content"]
        return StepResult(reward=sum(letter in "aeiou" for letter in text) / (1 + len(text)), done=True)
"""

CONFIG = """
seed = 3
group_size = 4
tasks = { kind = "jsonl", path = "tasks.jsonl" }
environment = { kind = "import", factory = "vowels_env:ManyVowels" }
engine = { kind = "local", directory = "MODEL" }
renderer = { model = "MODEL" }
sampling = { max_tokens = 8 }
limits = { max_turns = 1 }
output = { directory = "out", report = false }

[train]
steps = 3
groups = 3
lora_rank = 0
learning_rate = 1e-3
threads = 1
"""

HELD_OUT = """
[evaluation]
tasks = { kind = "jsonl", path = "tasks.jsonl" }
every = 1
samples = 2
"""


def project(directory: Path, model: Path, config: str = CONFIG, **values: str) -> Path:
    """Write it; returns the configuration, in which `values` replace lines by their keys."""
    for key, value in values.items():
        lines = [f"{key} = {value}" if line.startswith(f"{key} = ") else line for line in config.splitlines()]
        config = "\n".join(lines)
    directory.mkdir(exist_ok=True)
    colours = [[220, 40, 40], [40, 180, 60], [40, 80, 220], [120, 120, 120], [10, 10, 10]]
    (directory / "tasks.jsonl").write_text("".join(json.dumps({"rgb": rgb}) + "\n" for rgb in colours))
    (directory / "vowels_env.py").write_text(ENVIRONMENT)
    path = directory / "train.toml"
    path.write_text(config.replace("MODEL", str(model)))
    return path


def train(*arguments: object) -> Result:
    """`rollouts train` in this process."""
    return CliRunner().invoke(app, ["train", *map(str, arguments)])


def started(*arguments: object, before: str = "") -> subprocess.Popen[str]:
    """`rollouts train` in a process of its own, after the statement `before`."""
    code = f"{before}\nfrom rollouts.cli.main import main\nmain()"
    command = [sys.executable, "-u", "-c", code, "train", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True, env=environment)


def figures(directory: Path) -> list[tuple[int, dict[str, Any]]]:
    """The figures of each step in out/training.jsonl, without those of time."""
    rows = [json.loads(line) for line in (directory / "out" / "training.jsonl").read_text().splitlines()]
    return [
        (row["step"], {name: value for name, value in row["metrics"].items() if "seconds" not in name}) for row in rows
    ]


def outcome(directory: Path) -> dict[str, Any]:
    """Everything of a run that must not depend on where it was interrupted: bytes, and figures without times."""
    out = directory / "out"
    bits = {
        str(path.relative_to(out)): path.read_bytes()
        for path in sorted(out.rglob("*"))
        if path.suffix in (".safetensors", ".mmr") and "weights" not in path.parts and path.name != "trajectories.mmr"
    }
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {**bits, "figures": figures(directory), "rewards": [(row["task_id"], row["total_rewards"]) for row in rows]}
