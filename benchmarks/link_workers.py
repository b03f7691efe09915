"""A `Runner` whose workers are processes over the link (`LinkWorkers`), beside the same `Runner` without workers.

    python benchmarks/link_workers.py [--episodes 1000] [--turns 4] [--workers 2] [--latency 0.5]

Environments, renderer and engine are the same in both; the engine samples nothing and takes about `--latency` seconds.
Every task has an image, which all episodes of its group see, and every episode has one more that only it sees.

Images are compared with each image once over each connection and in each direction: one of a task to each worker and
back, in a trajectory; one of an episode to the runner. Bytes are those of all frames, of jobs and trajectories too.
Turns per second and worker are compared with those of the runner without workers at the same number of episodes at
once. All processes share the cores of this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path

from slow_episodes import (
    GROUP_SIZE,
    Maze,
    Measured,
    in_one_process,
    make_engine,
    on_workers,
    parsed_arguments,
    report_speed,
    tasks_of,
)

from renderers import load_renderer
from rollouts import Task
from rollouts.testing import tiny_qwen3_vl
from rollouts.workers import EpisodeWorker
from rollouts.workers.link import LinkWorkers, run_link_worker
from transport.link import LinkStats


def work(directory: str, turns: int, latency: float, slots: int, address: str) -> None:
    """What a worker process does."""

    async def run() -> None:
        engine = make_engine(directory, latency)
        worker = EpisodeWorker(partial(Maze, turns), engine, load_renderer(directory), slots=slots)
        await run_link_worker(worker, address)
        await worker.close()

    asyncio.run(run())


@contextmanager
def worker_processes(directory: str, arguments: argparse.Namespace, address: str) -> Iterator[None]:
    context = multiprocessing.get_context("spawn")
    options = (directory, arguments.turns, arguments.latency, arguments.concurrency, address)
    processes: list[BaseProcess] = [context.Process(target=work, args=options) for _ in range(arguments.workers)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.join(20)
            process.kill()


async def linked(directory: str, arguments: argparse.Namespace, tasks: Sequence[Task]) -> tuple[Measured, LinkStats]:
    workers = LinkWorkers()
    with worker_processes(directory, arguments, workers.address):
        async with workers:
            measured = await on_workers(workers, lambda: len(workers.names), arguments, tasks)
            return measured, workers._server.stats()


def main() -> None:
    arguments = parsed_arguments(__doc__)
    tasks = tasks_of(arguments)
    with tempfile.TemporaryDirectory() as directory:
        tiny_qwen3_vl(Path(directory), weights=False)
        beside = in_one_process(directory, arguments, tasks)
        measured, stats = asyncio.run(linked(directory, arguments, tasks))
    report_speed(arguments, "link", beside, measured)
    of_tasks = len(tasks) * arguments.workers
    bytes_of_tasks = measured.image_bytes_of_tasks * arguments.workers
    bytes_of_all = bytes_of_tasks + measured.image_bytes_of_episodes
    print(f"{'':36}{'each once':>14}{'sent':>14}{'ratio':>8}")
    for name, least, sent in (
        ("images to the workers", of_tasks, stats.media_sent),
        ("images to the runner", of_tasks + len(tasks) * GROUP_SIZE, stats.media_received),
        ("MB to the workers", bytes_of_tasks / 1e6, stats.bytes_sent / 1e6),
        ("MB to the runner", bytes_of_all / 1e6, stats.bytes_received / 1e6),
    ):
        print(f"{name:36}{least:14,.1f}{sent:14,.1f}{sent / least:8.2f}")


if __name__ == "__main__":
    main()
