"""The cost of an evaluation: beside the runner alone, and of the statistics of a million episodes.

    python benchmarks/evaluation.py [--tasks 1000] [--samples 4] [--summarised 250000]

"runner" iterates over the groups and keeps nothing; "evaluate" is `rollouts.evaluation.evaluate`; "runner, stored" and
"rollouts eval" have a journal, trajectories and metrics on the disk, as `rollouts run` and `rollouts eval` write them,
without the report. All have a `ScriptedEngine` without latency, and run in turns. The last part writes the lines of
`--summarised` groups and reads them back in a process of its own, whose highest memory is printed.
"""

import argparse
import asyncio
import contextlib
import io
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from renderers import load_renderer
from rollouts.engines.protocol import SamplingParams
from rollouts.environments import ScoredPrompt
from rollouts.evaluation import Tally, evaluate
from rollouts.run_config.group_files import read_group_rows
from rollouts.runner import Runner
from rollouts.task import Task
from rollouts.testing import ScriptedEngine
from rollouts.testing.tiny_model import tiny_qwen3_vl

COMPLETIONS = ("four", "five", "4", "it is 4")
ROUNDS = 3


def messages(task: Task) -> list[Any]:
    return [{"role": "user", "content": task.data["question"]}]


def score(completion: Any, task: Task) -> float:
    return float(task.data["answer"] in completion["content"])


def tasks_of(count: int) -> list[Task]:
    return [Task(str(number), {"question": f"{number}: 2 + 2?", "answer": "4"}) for number in range(count)]


def seconds(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def in_process(renderer: Any, tasks: list[Task], samples: int, *, counted: bool) -> None:
    async def run() -> None:
        engine = ScriptedEngine(cycle(COMPLETIONS), renderer=renderer)
        sampling = SamplingParams(max_tokens=16)
        async with Runner(
            lambda task: ScoredPrompt(task, messages, score), engine, renderer, sampling=sampling, group_size=samples
        ) as runner:
            if counted:
                await evaluate(runner, tasks)
            else:
                async for _ in runner.stream(tasks):
                    pass

    asyncio.run(run())


CONFIG = """
group_size = {samples}
concurrency = 1024
[tasks]
kind = "jsonl"
path = "tasks.jsonl"
[environment]
kind = "scored_prompt"
[[environment.rewards]]
name = "score"
function = "scoring.py:score"
[engine]
kind = "scripted"
completions = {completions}
[renderer]
model = "model"
[sampling]
max_tokens = 16
[output]
directory = "{out}"
report = false
"""


def stored(directory: Path, command: str, samples: int, number: int) -> None:
    """A command of this program, in this process: importing is not part of the figure."""
    from rollouts.cli.main import app

    config = directory / f"{command}-{number}.toml"
    config.write_text(
        CONFIG.format(samples=samples, completions=json.dumps(list(COMPLETIONS)), out=f"{command}-{number}")
    )
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        app([command, str(config)], standalone_mode=False)


def compare_rates(num_tasks: int, samples: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        tiny_qwen3_vl(directory / "model", weights=False)
        (directory / "scoring.py").write_text(
            "def score(c, task):\n    return float(task.data['answer'] in c['content'])\n"
        )
        tasks = tasks_of(num_tasks)
        (directory / "tasks.jsonl").write_text("".join(json.dumps(task.data) + "\n" for task in tasks))
        renderer = load_renderer(directory / "model")
        calls: dict[str, Callable[[int], Any]] = {
            "runner": lambda _: in_process(renderer, tasks, samples, counted=False),
            "evaluate": lambda _: in_process(renderer, tasks, samples, counted=True),
            "runner, stored": lambda number: stored(directory, "run", samples, number),
            "rollouts eval": lambda number: stored(directory, "eval", samples, number),
        }
        in_process(renderer, tasks[:50], samples, counted=True)
        found: dict[str, list[float]] = {label: [] for label in calls}
        for number in range(ROUNDS):
            for label, call in calls.items():
                found[label].append(num_tasks * samples / seconds(lambda call=call, number=number: call(number)))
        rates = {label: float(np.median(values)) for label, values in found.items()}
        print(f"{num_tasks:,} tasks x {samples} samples, ScriptedEngine without latency, median of {ROUNDS} rounds")
        for label, rate in rates.items():
            print(f"  {label:16s} {rate:8,.0f} episodes/s  {rate / rates['runner']:.2f}x of the runner")
        print(f"  rollouts eval    {rates['rollouts eval'] / rates['runner, stored']:.2f}x of rollouts run")


def write_metrics(path: Path, groups: int, samples: int) -> None:
    rng = np.random.default_rng(0)
    with open(path, "w") as file:
        for number in range(groups):
            rewards = rng.integers(0, 2, samples).astype(float).tolist()
            line = {
                "task_id": f"task-{number:08d}",
                "task_data": {"question": f"{number}: what is on the picture?", "answer": "a horse"},
                "time": 1.8e9,
                "group_seconds": 1.0,
                "total_rewards": rewards,
                "environment_rewards": rewards,
                "group_rewards": [0.0] * samples,
                "reward_parts": {"exact": rewards, "format": [1.0] * samples},
                "attempts": [1] * samples,
                "done": samples,
                "truncated": 0,
                "failed": 0,
                "failed_episodes": [],
                "errors": [],
                "turns": samples,
                "length_stops": 0,
                "tokens": 900,
                "sampled_tokens": 90,
                "images": samples,
                "oldest_version": "",
            }
            file.write(json.dumps(line) + "\n")


def summarise(path: Path, samples: int) -> None:
    started = time.perf_counter()
    tally = Tally(samples=samples)
    for row in read_group_rows(path):
        tally.add(row.values)
    results = tally.results(complete=True)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    took = time.perf_counter() - started
    print(
        f"{results.episodes:,} episodes of {results.tasks:,} tasks summarised in {took:.1f} s, "
        f"at most {used:.0f} MB in the process (pass@1 {results.pass_at_k[1].value:.4f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--summarised", type=int, default=250_000, metavar="GROUPS")
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)  # of the process that summarises
    chosen = parser.parse_args()
    if chosen.file is not None:
        summarise(chosen.file, chosen.samples)
        return
    compare_rates(chosen.tasks, chosen.samples)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "metrics.jsonl"
        for groups in (chosen.summarised // 10, chosen.summarised):
            write_metrics(path, groups, chosen.samples)
            options = ["--samples", str(chosen.samples), "--file", str(path)]
            subprocess.run([sys.executable, __file__, *options], check=True)


if __name__ == "__main__":
    main()
