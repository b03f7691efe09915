"""Episodes with images and an engine that samples nothing, for the benchmark of workers on Ray.

Every task has an image, which all episodes of its group see, and every episode has one more that only it sees.
"""

import argparse
import asyncio
import os
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from renderers import MediaSource, load_renderer
from renderers.media.decoding import array_to_raw
from rollouts import Completion, FinishReason, GenerateRequest, GenerateResult, SamplingParams, StepResult, WeightSpan
from rollouts.engines.protocol import Engine, TokenListener
from rollouts.runner import Group, Runner, Task
from rollouts.workers import WorkerPool

GROUP_SIZE = 8
SIDE = 256


def image(number: int) -> MediaSource:
    """Noise of which no two numbers are alike."""
    return MediaSource.of(array_to_raw(np.random.default_rng(number).integers(0, 256, (SIDE, SIDE, 3), np.uint8)))


class SlowEngine(Engine):
    """Returns one completion for every request, after about `latency` seconds."""

    weight_version = "0"

    def __init__(self, latency: float, stop: int) -> None:
        self.ids = np.array([*range(100, 111), stop], np.int32)
        self.logprobs = np.full(len(self.ids), -0.5, np.float32)
        self.latency = latency

    async def generate(self, request: GenerateRequest, listen: TokenListener | None = None) -> GenerateResult:
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


def in_one_process(directory: str, arguments: argparse.Namespace, tasks: Sequence[Task]) -> Measured:
    """Run the share of one worker in this process."""
    runner = Runner(
        partial(Maze, arguments.turns),
        make_engine(directory, arguments.latency),
        load_renderer(directory),
        sampling=SamplingParams(max_tokens=32),
        group_size=GROUP_SIZE,
        concurrency=arguments.concurrency,
    )
    return asyncio.run(measure(runner, tasks[: len(tasks) // arguments.workers]))


async def on_workers(
    workers: WorkerPool, num_started: Callable[[], int], arguments: argparse.Namespace, tasks: Sequence[Task]
) -> Measured:
    """Run all tasks on workers, once all of these have started."""
    while num_started() < arguments.workers:  # noqa: ASYNC110  a benchmark, before its clock starts
        await asyncio.sleep(0.1)
    sampling = SamplingParams(max_tokens=32)
    return await measure(Runner(None, None, None, sampling=sampling, group_size=GROUP_SIZE, workers=workers), tasks)


def parsed_arguments(description: str | None) -> argparse.Namespace:
    """The options of such a benchmark."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--concurrency", type=int, default=16, help="episodes at once, of a worker")
    parser.add_argument("--latency", type=float, default=0.5, help="seconds of a completion")
    return parser.parse_args()


def tasks_of(arguments: argparse.Namespace) -> list[Task]:
    return [Task(f"t{number}", image(number)) for number in range(-(-arguments.episodes // GROUP_SIZE))]


def report_speed(arguments: argparse.Namespace, name: str, beside: Measured, measured: Measured) -> None:
    """Two rows: turns per second of a worker, and processor time of the runner's process, beside one process."""
    per_worker = measured.turns_per_second / arguments.workers
    episodes = -(-arguments.episodes // GROUP_SIZE) * GROUP_SIZE
    print(f"{episodes} episodes of {arguments.turns} turns, {arguments.workers} workers, {arguments.latency} s a turn")
    print(f"{'':36}{'one process':>14}{name:>14}{'ratio':>8}")
    ratio = per_worker / beside.turns_per_second
    print(f"{'turns/s of a worker':36}{beside.turns_per_second:14.1f}{per_worker:14.1f}{ratio:8.2f}")
    own, with_workers = beside.cpu_per_turn * 1e3, measured.cpu_per_turn * 1e3
    print(f"{'CPU ms a turn, process of the runner':36}{own:14.2f}{with_workers:14.2f}")
