"""An episode that failed, or reached a limit, is freed at once: its errors do not keep it until the collector runs.

With thousands of episodes the collector runs seldom (docs/runner.md), and an episode holds its prompts and images.
"""

import asyncio
import gc
import logging
import weakref
from collections.abc import Iterator

import pytest
from simulated_engine import SimulatedEngine

from rollouts import EpisodeError, SamplingParams, StepResult, run_episode
from rollouts.engines.local import LocalEngine
from rollouts.engines.protocol import Engine
from rollouts.errors import ContextLengthError
from rollouts.runner import EpisodeLimits, Runner, Task
from rollouts.testing import ScriptedEngine

SAMPLING = SamplingParams(max_tokens=5)
ENDS = ("limit", "overlong", "engine", "step", "result", "image")


class Failing:
    """An environment whose episode ends in one of the ways `ENDS`."""

    def __init__(self, end: str) -> None:
        self.end = end

    def reset(self, seed: int) -> list[dict[str, object]]:
        return [{"role": "user", "content": "Go"}]

    def step(self, assistant: object) -> StepResult:
        if self.end == "step":
            raise ValueError("no")
        if self.end == "result":
            return 3  # type: ignore[return-value]
        if self.end == "image":
            return StepResult([{"role": "user", "content": [{"type": "image", "image": b"no image"}]}])
        return StepResult([{"role": "user", "content": "Go on"}])


class FailingEngine(Engine):
    def __init__(self, end: str, renderer: object) -> None:
        self.end = end
        self.scripted = ScriptedEngine(["left"] * 8, renderer=renderer)

    async def generate(self, request, listen=None):
        if self.end == "overlong":
            raise ContextLengthError(request.request_id, 10, 5)
        if self.end == "engine":
            raise RuntimeError("no")
        return await self.scripted.generate(request)

    async def close(self) -> None: ...


def simulated_engine(model: str) -> SimulatedEngine:
    return SimulatedEngine(error_rate=1.0)


def local_engine(model: str) -> LocalEngine:
    engine = LocalEngine.from_pretrained(model)
    engine._run = lambda requests: 1 / 0
    return engine


@pytest.fixture
def without_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("make_engine", [simulated_engine, local_engine])
@pytest.mark.usefixtures("without_collector")
async def test_an_engine_that_holds_requests_does_not_keep_the_episodes_of_those_that_failed(
    renderer, tiny_model_dir, make_engine
):
    environment, engine = Failing("engine"), make_engine(str(tiny_model_dir))
    freed = weakref.ref(environment)
    with pytest.raises(EpisodeError) as failed:
        await run_episode(environment, engine=engine, renderer=renderer, sampling=SAMPLING, max_turns=2)
    del environment, failed
    async with asyncio.timeout(30):
        while freed() is not None:  # noqa: ASYNC110  until the queue of the engine has ended
            await asyncio.sleep(0.001)
    await engine.close()


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.usefixtures("without_collector")
async def test_the_environments_of_a_group_are_freed_before_the_runner_is_closed(renderer, end, monkeypatch):
    monkeypatch.setattr(logging.getLogger("rollouts.runner"), "disabled", True)  # pytest keeps each logged exception
    freed = []

    def make(task: Task) -> Failing:
        environment = Failing(end)
        freed.append(weakref.ref(environment))
        return environment

    engine = FailingEngine(end, renderer)
    limits = EpisodeLimits(max_turns=2)
    async with Runner(make, engine, renderer, sampling=SAMPLING, group_size=2, limits=limits) as runner:
        (group,) = [group async for group in runner.stream([Task("t")])]
        await asyncio.sleep(0)
        assert group.num_failed == (0 if end in ("limit", "overlong") else 2)
        assert len(freed) == 2
        assert [environment() for environment in freed] == [None, None]
