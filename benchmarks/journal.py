"""What the journal of a run costs per group, and how long a run takes to continue.

    python benchmarks/journal.py [--groups 400]

Groups of 8 episodes of 8 turns are recorded as a runner records them: the task, each episode, the group, its delivery.
Once with text alone, once with an image of its own in every task, shown in each turn. "loop" is the time for which the
event loop is busy with the calls; the rest is on the journal's thread. Then the journal is opened again.
"""

import argparse
import asyncio
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from runner import GROUP_SIZE, SAMPLING, InstantEngine, Maze, png

from renderers import TemplateRenderer, load_renderer
from rollouts import Trajectory
from rollouts.runner import Group, Journal, Runner, Task
from rollouts.testing import tiny_qwen3_vl

TURNS = 8
CONFIGURATION = {"group_size": GROUP_SIZE, "seed": 0}


class Cost(NamedTuple):
    """Seconds for all groups."""

    wall: float
    cpu: float
    loop: float
    opening: float


async def made_groups(renderer: TemplateRenderer, count: int, side: int) -> list[Group]:
    tasks = [Task(str(number), png(side, number) if side else None) for number in range(count)]

    def make(task: Task) -> Maze:
        return Maze(TURNS, [task.data] if side else [])

    runner = Runner(make, InstantEngine(renderer), renderer, sampling=SAMPLING, group_size=GROUP_SIZE)
    async with runner:
        return [group async for group in runner.stream(tasks)]


async def record(journal: Journal, groups: list[Group]) -> float:
    """Record groups one after the other; the seconds for which the thread of the event loop was busy."""
    busy = time.thread_time()
    for group in groups:
        task_id = group.task.task_id
        await journal.started(group.task)
        calls = (
            journal.attempted(task_id, index, 0, episode, final=True) for index, episode in enumerate(group.episodes)
        )
        await asyncio.gather(*calls)
        await journal.finished(group)
        await journal.delivered(task_id)
    return time.thread_time() - busy


async def measure(groups: list[Group], directory: Path, *, fsync: bool) -> Cost:
    journal = Journal.open(directory, fsync=fsync)
    await journal.resume(CONFIGURATION)
    wall, cpu = time.perf_counter(), time.process_time()
    loop = await record(journal, groups)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    await journal.close()
    opened = time.perf_counter()
    journal = Journal.open(directory)
    await journal.resume(CONFIGURATION)
    opening = time.perf_counter() - opened
    await journal.close()
    return Cost(wall, cpu, loop, opening)


def report(name: str, groups: list[Group], cost: Cost, directory: Path) -> None:
    count = len(groups)
    wall, cpu, loop, opening = (1e3 * seconds / count for seconds in (cost.wall, cost.cpu, cost.loop, cost.opening))
    size = sum(path.stat().st_size for path in directory.iterdir()) / 1e6
    print(
        f"  {name:10} wall {wall:6.2f} ms, CPU {cpu:6.2f} ms, loop {loop:5.2f} ms; "
        f"{size:5.1f} MB at the end; opened again in {opening:5.2f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=400)
    parser.add_argument("--directory", type=Path, help="on the disk to be measured; default: the temporary directory")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as base:
        renderer = load_renderer(tiny_qwen3_vl(f"{base}/model", weights=False))
        for kind, side in (("text", 0), ("images of 256x256", 256)):
            groups = asyncio.run(made_groups(renderer, options.groups, side))
            assert all(isinstance(each, Trajectory) and not each.error for each in groups[0].episodes)
            tokens = sum(len(node) for node in groups[0].episodes[0].nodes)
            size = f"{GROUP_SIZE} episodes of {TURNS} turns and {tokens} tokens"
            print(f"{kind}: {len(groups)} groups of {size}; per group:")
            for name, fsync in (("no fsync", False), ("with fsync", True)):
                directory = Path(base) / f"{side}-{fsync}"
                cost = asyncio.run(measure(groups, directory, fsync=fsync))
                report(name, groups, cost, directory)


if __name__ == "__main__":
    main()
