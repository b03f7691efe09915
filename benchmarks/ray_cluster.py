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

import argparse
import asyncio
import os
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # the loopback address alone
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import ray
from ray._private.internal_api import node_stats
from ray.cluster_utils import Cluster
from slow_episodes import (
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
from rollouts.ray import RayWorkers
from rollouts.testing import tiny_qwen3_vl

STORE_BYTES = 512 << 20


async def on_ray(directory: str, arguments: argparse.Namespace, tasks: Sequence[Task]) -> Measured:
    workers = RayWorkers(
        partial(Maze, arguments.turns),
        partial(make_engine, directory, arguments.latency),
        partial(load_renderer, directory),
        num_workers=arguments.workers,
        episodes_per_worker=arguments.concurrency,
    )
    async with workers:
        return await on_workers(workers, lambda: len(workers.places), arguments, tasks)


def bytes_written() -> int:
    nodes = (node for node in ray.nodes() if node["Alive"])
    stats = (node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], False) for node in nodes)
    return sum(each.store_stats.cumulative_created_bytes for each in stats)


def main() -> None:
    arguments = parsed_arguments(__doc__)
    tasks = tasks_of(arguments)
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
    beside = in_one_process(directory, arguments, tasks)
    before = bytes_written()
    measured = asyncio.run(on_ray(directory, arguments, tasks))
    written = bytes_written() - before
    of_tasks, of_episodes = measured.image_bytes_of_tasks, measured.image_bytes_of_episodes
    least = of_tasks * (arguments.workers + 1) + of_episodes * 2
    report_speed(arguments, "Ray", beside, measured)
    print(f"{'':36}{'each once':>14}{'written':>14}{'ratio':>8}")
    print(f"{'MB in the object stores':36}{least / 1e6:14.1f}{written / 1e6:14.1f}{written / least:8.2f}")


if __name__ == "__main__":
    main()
