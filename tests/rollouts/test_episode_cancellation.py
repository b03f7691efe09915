"""A cancelled episode raises CancelledError, as asyncio demands, and its turns are not lost."""

import asyncio
import threading

import pytest
from misbehaviour import Talkative

from renderers import RendererPool
from rollouts import SamplingParams, run_episode
from rollouts.episodes.episode import EpisodeSpec, run_episodes
from rollouts.testing import ScriptedEngine

#: Point -> how many turns are complete when the episode waits there.
POINTS = {
    "reset": 0,
    "render": 0,
    "generate 0": 0,
    "parse 0": 0,
    "step 0": 1,
    "bridge 0": 1,
    "generate 1": 1,
    "parse 1": 1,
    "step 1": 2,
    "bridge 1": 2,
    "generate 2": 2,
    "step 2": 3,
}


class Stop:
    """Where the episode is to wait for ever, on its event loop or on a thread of the renderer."""

    def __init__(self, point):
        self.point = point
        self.reached = asyncio.Event()
        self.released = threading.Event()
        self._loop = asyncio.get_running_loop()

    async def at(self, point):
        if point == self.point:
            self.reached.set()
            await asyncio.Event().wait()

    def on_thread(self, point):
        if point == self.point:
            self._loop.call_soon_threadsafe(self.reached.set)
            self.released.wait()


def world(stop, renderer, monkeypatch):
    """An environment and an engine that wait at the point, and the renderer made to."""

    class Environment(Talkative):
        closed = False

        def close(self):
            self.closed = True

        async def reset(self, seed):
            await stop.at("reset")
            return Talkative.reset(self, seed)

        async def step(self, assistant):
            await stop.at(f"step {self.turns}")
            return Talkative.step(self, assistant)

    class Engine(ScriptedEngine):
        async def generate(self, request, listen=None):
            await stop.at(f"generate {len(self.requests)}")
            return await super().generate(request)

    environment, engine = Environment(), Engine(["a", "b", "c"], renderer=renderer)
    for method, name in (("render", "render"), ("parse_response", "parse"), ("bridge_to_next_turn", "bridge")):
        real = getattr(renderer, method)

        def waiting(*args, _real=real, _name=name, **kwargs):
            turn = environment.turns - (_name == "bridge")
            stop.on_thread(_name if _name == "render" else f"{_name} {turn}")
            return _real(*args, **kwargs)

        monkeypatch.setitem(vars(renderer), method, waiting)
    return environment, engine


async def cancelled_at(point, renderer, monkeypatch):
    """The trajectories that `on_end` was given by an episode that was cancelled at the point."""
    stop = Stop(point)
    environment, engine = world(stop, renderer, monkeypatch)
    ended = []
    with RendererPool(lambda: renderer, 2) as pool:  # which makes all calls on threads
        episode = run_episode(
            environment, engine=engine, renderer=pool, sampling=SamplingParams(), max_turns=5, on_end=ended.append
        )
        task = asyncio.create_task(episode)
        try:
            await asyncio.wait_for(stop.reached.wait(), 60)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        finally:
            stop.released.set()
    assert environment.closed
    return ended


@pytest.mark.parametrize("point", POINTS)
async def test_an_episode_that_is_cancelled_anywhere_hands_over_its_completed_turns(renderer, monkeypatch, point):
    (trajectory,) = await cancelled_at(point, renderer, monkeypatch)
    assert trajectory.num_turns == POINTS[point]
    unpaid = point.startswith("step")  # the last answer, which the environment has not looked at
    assert [turn.reward for turn in trajectory.turns] == [0.25] * (POINTS[point] - unpaid) + [0.0] * unpaid
    assert trajectory.finished
    assert trajectory.error.startswith("CancelledError")


async def test_a_cancelled_run_has_handed_over_what_was_finished_and_what_it_broke_off(renderer):
    blocked = asyncio.Event()

    class SecondIsSlow(Talkative):
        def reset(self, seed):
            self.seed = seed
            return Talkative.reset(self, seed)

        async def step(self, assistant):
            result = Talkative.step(self, assistant)
            if (self.seed, self.turns) == (1, 2):
                blocked.set()
                await asyncio.Event().wait()
            return result

    ended = []
    engine = ScriptedEngine(lambda request: "x", renderer=renderer)
    options = {"engine": engine, "renderer": renderer, "sampling": SamplingParams(), "max_turns": 4}
    specs = [EpisodeSpec(seed) for seed in range(3)]
    run = asyncio.create_task(run_episodes(SecondIsSlow, specs, concurrency=1, on_end=ended.append, **options))
    await asyncio.wait_for(blocked.wait(), 60)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert [(trajectory.seed, trajectory.done, trajectory.num_turns) for trajectory in ended] == [
        (0, True, 3),
        (1, False, 2),
    ]
    assert ended[1].error.startswith("CancelledError")


async def test_an_on_end_that_fails_does_not_hide_a_cancellation(renderer, monkeypatch, caplog):
    def fail(trajectory):
        raise OSError("disk full")

    stop = Stop("generate 1")
    environment, engine = world(stop, renderer, monkeypatch)
    task = asyncio.create_task(
        run_episode(environment, engine=engine, renderer=renderer, sampling=SamplingParams(), max_turns=5, on_end=fail)
    )
    await asyncio.wait_for(stop.reached.wait(), 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert "on_end failed" in caplog.text
    assert "disk full" in caplog.text
