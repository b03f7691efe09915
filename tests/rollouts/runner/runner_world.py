"""A small world for runners: an environment that counts, an engine that can be held, and a runner of both."""

import asyncio
from collections import Counter

from rollouts import SamplingParams, StepResult
from rollouts.runner import Runner, Task
from rollouts.testing import ScriptedEngine


class Counting:
    """Asks `turns` times and rewards each turn with 1."""

    turns = 2

    def __init__(self, task):
        self.task = task
        self.seed = None
        self.taken = 0

    def reset(self, seed):
        self.seed = seed
        return [{"role": "user", "content": f"task {self.task.task_id}"}]

    def step(self, assistant):
        self.taken += 1
        done = self.taken == self.turns
        return StepResult([{"role": "user", "content": "next"}], reward=1.0, done=done, info={"seed": self.seed})


class HeldEngine(ScriptedEngine):
    """Holds requests until `release` is set; knows which are in flight, and which were cancelled.

    Updates begin at once, and end when `update_release` is set; `update_error` is raised then.
    """

    def __init__(self, renderer=None, script=None, update_error=None):
        super().__init__(script or (lambda request: "yes"), renderer=renderer)
        self.release = asyncio.Event()
        self.in_flight = set()
        self.most_in_flight = 0
        self.cancelled = []
        self.changed = asyncio.Event()
        self.update_begun, self.update_release = asyncio.Event(), asyncio.Event()
        self.update_error = update_error

    async def update_weights(self, weights, version, *, in_flight="abort"):
        self.update_begun.set()
        await self.update_release.wait()
        if self.update_error is not None:
            raise self.update_error
        await super().update_weights(weights, version, in_flight=in_flight)

    async def generate(self, request, listen=None):
        self.in_flight.add(request.request_id)
        self.most_in_flight = max(self.most_in_flight, len(self.in_flight))
        self.changed.set()
        try:
            await self.release.wait()
            return await super().generate(request)
        except asyncio.CancelledError:
            self.cancelled.append(request.request_id)
            raise
        finally:
            self.in_flight.discard(request.request_id)
            self.changed.set()

    async def wait_for_in_flight(self, count):
        while len(self.in_flight) < count:
            self.changed.clear()
            await self.changed.wait()


def tasks(count):
    return [Task(f"t{index}", index) for index in range(count)]


def make_runner(renderer, make_environment=Counting, engine=None, **options):
    engine = engine or ScriptedEngine(lambda request: "yes", renderer=renderer)
    return Runner(make_environment, engine, renderer, **{"sampling": SamplingParams(max_tokens=8), **options})


async def groups_of(runner, source):
    return [group async for group in runner.stream(source)]


def run_groups(renderer, source, make_environment=Counting, engine=None, **options):
    """The groups of a whole run by task id, and the runner, which is closed."""

    async def run():
        async with make_runner(renderer, make_environment, engine, **options) as runner:
            groups = await groups_of(runner, source)
        return {group.task.task_id: group for group in groups}, runner

    return asyncio.run(asyncio.wait_for(run(), 60))


def advance_clock(seconds):
    """The clock of the running event loop goes forward: what is due by then is due now, however slow the machine is."""
    loop = asyncio.get_running_loop()
    now = loop.time
    loop.time = lambda: now() + seconds


def assert_no_task_is_left():
    others = asyncio.all_tasks() - {asyncio.current_task()}
    assert not others, others


def outcomes(runner):
    prefix = "episodes_ended/"
    return Counter({key.removeprefix(prefix): n for key, n in runner.metrics().items() if key.startswith(prefix)})
