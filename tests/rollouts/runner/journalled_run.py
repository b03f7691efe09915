"""A run with a journal for tests that kill it: `python journalled_run.py MODEL_DIRECTORY` starts one process per line.

A line on standard input is a directory; the run of that directory is begun or continued in a forked process, whose id
is printed. When it has ended, its exit status is printed: the signal that killed it, negative, or 0. The process keeps
two records of its own, a line each, written in one call of the system: `consumed` (task, digest of the group) when the
consumer has a group, and `ended` (episode) when an environment has seen the last turn of an episode.
"""

import asyncio
import dataclasses
import hashlib
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
from simulated_engine import SimulatedEngine

from renderers import load_renderer
from rollouts import SamplingParams, StepResult
from rollouts.runner import Group, Journal, RetryPolicy, Runner, Task, journal_file
from rollouts.workers import WorkerPool
from transport import encode

NUM_TASKS = 60
GROUP_SIZE = 3


def picture(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, (32, 32, 3), dtype=np.uint8)


def question(number: int, text: str) -> list[dict[str, Any]]:
    parts = [{"type": "image", "image": picture(number)}, {"type": "text", "text": text}]
    return [{"role": "user", "content": parts}]


class Gallery:
    """Shows the image of its task, then another in each of up to three turns; some attempts fail."""

    def __init__(self, task: Task, record: int) -> None:
        self.number = int(task.data)
        self.turns = 1 + self.number % 3
        self.taken = 0
        self.record = record
        self.context: Any = None

    def attach(self, context: Any) -> None:
        self.context = context

    def reset(self, seed: int) -> list[dict[str, Any]]:
        return question(self.number, "What is this?")

    def step(self, assistant: Any) -> StepResult:
        self.taken += 1
        episode_id = self.context.episode_id
        if self.taken < self.turns:
            return StepResult(question(self.number + self.taken, "And this?"), reward=0.5)
        os.write(self.record, f"{episode_id}\n".encode())
        if self.number % 5 == 0 and episode_id.endswith("/1.0"):
            raise OSError("the first attempt at episode 1 of every fifth task fails")
        return StepResult(reward=1.0 + self.number, done=True)


def skipped(group: Group) -> bool:
    return group.task.data % 7 == 3


def digest_of(group: Group) -> str:
    """A digest of the values of a group.

    Each part is encoded alone. Episodes that ran in one process may share objects, such as the place of an image, which
    a message has once; those that were read from a journal share none.
    """
    values = [getattr(group, field.name) for field in dataclasses.fields(group) if field.name != "episodes"]
    return hashlib.sha256(b"".join(encode(part) for part in (*values, *group.episodes))).hexdigest()


def record(directory: Path, name: str) -> int:
    return os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)


async def run(directory: Path, renderer: Any, num_tasks: int = NUM_TASKS) -> None:
    ended = record(directory, "ended")
    engine = SimulatedEngine(seed=3, tokens=(2, 6), error_rate=0.02)
    # So that a run of this size has many of the moments at which the journal writes its file anew.
    journal_file._SLACK_BYTES = 1 << 14  # type: ignore[misc]
    await consume(directory, lambda task: Gallery(task, ended), engine, renderer, num_tasks=num_tasks)


async def consume(directory: Path, *parts: Any, num_tasks: int = NUM_TASKS, workers: WorkerPool | None = None) -> None:
    """Run the tasks on an environment, an engine and a renderer, or on workers, and note each group."""
    consumed = record(directory, "consumed")
    runner = Runner(
        *parts,
        sampling=SamplingParams(max_tokens=6),
        group_size=GROUP_SIZE,
        concurrency=12,
        retry=RetryPolicy(kinds=("engine", "environment"), first_delay=0.001),
        skip_group=skipped,
        journal=Journal.open(directory / "journal"),
        workers=workers,
    )
    async with runner:
        async for group in runner.stream(Task(f"t{number}", number) for number in range(num_tasks)):
            os.write(consumed, f"{group.task.task_id} {digest_of(group)}\n".encode())


def serve(run: Callable[[Path, Any], Awaitable[None]]) -> None:
    """Start a process of the run for each line of standard input."""
    renderer = load_renderer(sys.argv[1])
    print("ready", flush=True)
    for line in sys.stdin:
        process = os.fork()
        if process == 0:
            status = 1
            try:
                asyncio.run(run(Path(line.strip()), renderer))
                status = 0
            finally:
                os._exit(status)
        print(process, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)


if __name__ == "__main__":
    serve(run)
