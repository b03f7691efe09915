"""A `Runner` whose workers are actors of Ray, beside the same `Runner` without workers.

    python benchmarks/ray_cluster.py [--episodes 1000] [--turns 4] [--workers 2] [--latency 0.5]

A cluster of a head, where the runner is, and one node for each worker is started on the loopback address. Environments,
renderer and engine are the same in both; the engine samples nothing and takes about `--latency` seconds. Every task
has an image, which all episodes of its group see, and every episode has one more that only it sees.

Bytes are those that were ever written into the object stores of all nodes, by the counters of Ray. They are compared
with each image once on each node that needs it: an image of a task on all of them, one of an episode on the node of its
worker and on that of the runner. Turns per second and worker are compared with those of the runner without workers at
the same number of episodes at once. All processes share the cores of this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # the loopback address alone
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import numpy as np
import ray
from ray._private.internal_api import node_stats
from ray.cluster_utils import Cluster

from renderers import MediaSource, load_renderer
from renderers.media.raw import array_to_raw
from rollouts import Completion, FinishReason, GenerateRequest, GenerateResult, SamplingParams, StepResult, WeightSpan
from rollouts.ray import RayWorkers
from rollouts.runner import Group, Runner, Task
from rollouts.testing import tiny_qwen3_vl

GROUP_SIZE = 8
STORE_BYTES = 512 << 20
SIDE = 256


def image(number: int) -> MediaSource:
    """Noise of which no two numbers are alike."""
    return MediaSource.of(array_to_raw(np.random.default_rng(number).integers(0, 256, (SIDE, SIDE, 3), np.uint8)))


class SlowEngine:
    """Returns one completion for every request, after about `latency` seconds."""

    weight_version = "0"

    def __init__(self, latency: float, stop: int) -> None:
        self.ids = np.array([*range(100, 111), stop], np.int32)
        self.logprobs = np.full(len(self.ids), -0.5, np.float32)
        self.latency = latency

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        await asyncio.sleep(self.latency * random.uniform(0.5, 1.5))
        spans = (WeightSpan("0", 0, len(self.ids)),)
        completion = Completion(0, self.ids, self.logprobs, FinishReason.STOP, int(self.ids[-1]), spans)
        return GenerateResult(request.request_id, [completion])

    async def close(self) -> None: ...


class Maze:
    """Shows the image of its task, and after the first turn one of its own; then text."""

    def __init__(self, turns: int, task: Task) -> None:
        self.turns, self.task, self.turn = turns, task, 0

    def reset(self, seed: int) -> list[dict[str, Any]]:
        return [
            {"role": "user", "content": [{"type": "image", "image": self.task.data}, {"type": "text", "text": "?"}]}
        ]

    def step(self, assistant: Any) -> StepResult:
        self.turn += 1
        content: list[dict[str, Any]] = [{"type": "text", "text": f"step {self.turn}"}]
        if self.turn == 1:
            content.append({"type": "image", "image": image(int.from_bytes(os.urandom(6), "big"))})
        return StepResult([{"role": "user", "content": content}], reward=0.25, done=self.turn == self.turns)


class Measured(NamedTuple):
    turns_per_second: float
    cpu_per_turn: float  # seconds of the process of the runner
    image_bytes_of_tasks: int
    image_bytes_of_episodes: int


async def measure(runner: Runner, tasks: Sequence[Task]) -> Measured:
    """Run all tasks. Groups are not kept: their images may leave the object store."""
    turns, of_episodes, began, cpu = 0, 0, time.perf_counter(), time.process_time()
    async with runner:
        async for group in runner.stream(tasks):
            turns += sum(episode.num_turns for episode in group.episodes)
            of_episodes += _bytes_of_episodes(group)
    seconds = time.perf_counter() - began
    cpu = time.process_time() - cpu
    return Measured(turns / seconds, cpu / turns, sum(task.data.nbytes for task in tasks), of_episodes)


def _bytes_of_episodes(group: Group) -> int:
    assert all(episode.done for episode in group.episodes), [episode.error for episode in group.episodes]
    of_task = group.task.data.digest
    media = (one.source for episode in group.episodes for one in episode.all_media())
    return sum({source.digest: source.nbytes for source in media if source.digest != of_task}.values())


def make_engine(directory: str, latency: float) -> SlowEngine:
    return SlowEngine(latency, load_renderer(directory).get_stop_token_ids()[0])


async def local(directory: str, arguments: argparse.Namespace, latency: float, tasks: Sequence[Task]) -> Measured:
    runner = Runner(
        partial(Maze, arguments.turns),
        make_engine(directory, latency),
        load_renderer(directory),
        sampling=SamplingParams(max_tokens=32),
        group_size=GROUP_SIZE,
        concurrency=arguments.concurrency,
    )
    return await measure(runner, tasks)


async def on_ray(directory: str, arguments: argparse.Namespace, latency: float, tasks: Sequence[Task]) -> Measured:
    workers = RayWorkers(
        partial(Maze, arguments.turns),
        partial(make_engine, directory, latency),
        partial(load_renderer, directory),
        num_workers=arguments.workers,
        episodes_per_worker=arguments.concurrency,
    )
    async with workers:
        while len(workers.places) < arguments.workers:  # noqa: ASYNC110  a benchmark, before its clock starts
            await asyncio.sleep(0.1)
        runner = Runner(
            None, None, None, sampling=SamplingParams(max_tokens=32), group_size=GROUP_SIZE, workers=workers
        )
        return await measure(runner, tasks)


def bytes_written() -> int:
    nodes = (node for node in ray.nodes() if node["Alive"])
    stats = (node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], False) for node in nodes)
    return sum(each.store_stats.cumulative_created_bytes for each in stats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--concurrency", type=int, default=16, help="episodes at once, of a worker")
    parser.add_argument("--latency", type=float, default=0.5, help="seconds of a completion")
    arguments = parser.parse_args()
    tasks = [Task(f"t{number}", image(number)) for number in range(-(-arguments.episodes // GROUP_SIZE))]
    with tempfile.TemporaryDirectory() as directory:
        tiny_qwen3_vl(Path(directory), weights=False)
        options = {"node_ip_address": "127.0.0.1", "object_store_memory": STORE_BYTES}
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **options})
        for _ in range(arguments.workers):
            cluster.add_node(num_cpus=1, **options)
        ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
        try:
            _report(directory, arguments, tasks)
        finally:
            ray.shutdown()
            cluster.shutdown()


def _report(directory: str, arguments: argparse.Namespace, tasks: Sequence[Task]) -> None:
    beside = asyncio.run(local(directory, arguments, arguments.latency, tasks[: len(tasks) // arguments.workers]))
    before = bytes_written()
    measured = asyncio.run(on_ray(directory, arguments, arguments.latency, tasks))
    written = bytes_written() - before
    of_tasks, of_episodes = measured.image_bytes_of_tasks, measured.image_bytes_of_episodes
    least = of_tasks * (arguments.workers + 1) + of_episodes * 2
    per_worker = measured.turns_per_second / arguments.workers
    episodes = len(tasks) * GROUP_SIZE
    print(f"{episodes} episodes of {arguments.turns} turns, {arguments.workers} workers, {arguments.latency} s a turn")
    print(f"{'':34}{'one process':>14}{'Ray':>14}{'ratio':>8}")
    ratio = per_worker / beside.turns_per_second
    print(f"{'turns/s of a worker':34}{beside.turns_per_second:14.1f}{per_worker:14.1f}{ratio:8.2f}")
    own, with_ray = beside.cpu_per_turn * 1e3, measured.cpu_per_turn * 1e3
    print(f"{'CPU ms a turn, process of the runner':34}{own:12.2f}{with_ray:14.2f}")
    print(f"{'':34}{'each once':>14}{'written':>14}{'ratio':>8}")
    print(f"{'MB in the object stores':34}{least / 1e6:14.1f}{written / 1e6:14.1f}{written / least:8.2f}")


if __name__ == "__main__":
    main()
