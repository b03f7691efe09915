"""What workers on Ray are made of in these tests: functions that their processes import."""

import asyncio
import os
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np

from renderers import MediaSource, load_renderer
from renderers.media.decoding import array_to_raw
from rollouts import Runner, SamplingParams, StepResult, Task
from rollouts.ray import RayWorkers
from rollouts.testing import ScriptedEngine

SIDE = 288
TURNS = 2


def image(number: int, side: int = SIDE) -> MediaSource:
    """Noise of which no two numbers are alike; about 3 * side**2 bytes."""
    pixels = np.random.default_rng(number).integers(0, 256, (side, side, 3), np.uint8)
    return MediaSource.of(array_to_raw(pixels))


def tasks(count: int, **data: object) -> list[Task]:
    return [Task(f"t{number}", {"image": image(number), **data}) for number in range(count)]


class Looking:
    """Shows the image of its task, and after the first turn one that is new for each episode."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.taken = 0

    def reset(self, seed: int) -> list[dict[str, object]]:
        return [{"role": "user", "content": [{"type": "image", "image": self.task.data["image"]}]}]

    async def step(self, assistant: object) -> StepResult:
        self.taken += 1
        await self.wait()
        number = int.from_bytes(os.urandom(6), "big")
        seen = {"type": "image", "image": image(number)}
        return StepResult([{"role": "user", "content": [seen]}], reward=1.0, done=self.taken == TURNS)

    async def wait(self) -> None:
        """Until the test has written the file of the task, if it has one."""
        gate = self.task.data.get("gate")
        while gate is not None and not os.path.exists(gate):  # noqa: ASYNC110, ASYNC240  of another process
            await asyncio.sleep(0.02)


class Deadly(Looking):
    """Ends its process."""

    async def wait(self) -> None:
        os._exit(1)


def make_renderer(directory: str) -> object:
    return load_renderer(directory)


def make_engine(directory: str) -> ScriptedEngine:
    return ScriptedEngine(lambda request: "yes", renderer=load_renderer(directory))


def make_engine_except_in_one_process(directory: str, marker: str, gate: str) -> ScriptedEngine:
    """Raises in the process that calls it first, which writes `marker`; in others it returns when `gate` exists."""
    with suppress(FileExistsError), open(marker, "x") as file:
        file.write(str(os.getpid()))
    if Path(marker).read_text() == str(os.getpid()):
        raise FileNotFoundError("no model on this node")
    while not os.path.exists(gate):
        time.sleep(0.02)
    return make_engine(directory)


def workers_of(directory: Path, make_environment: object = Looking, **options: object) -> RayWorkers:
    return RayWorkers(
        make_environment,
        partial(make_engine, str(directory)),
        partial(make_renderer, str(directory)),
        **{"num_workers": 2, "episodes_per_worker": 4, **options},
    )


def runner_of(workers: RayWorkers, **options: object) -> Runner:
    return Runner(None, None, None, **{"sampling": SamplingParams(max_tokens=8), "workers": workers, **options})
