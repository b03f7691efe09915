"""Optional methods of environments: `close` at the end of an episode, `step_parsed` for malformed tool calls."""

import asyncio
import logging
import threading

import pytest
from sub_agents import play

from rollouts import SamplingParams, StepResult, ThreadedEnvironment, run_episode
from rollouts.episodes import environment_calls
from rollouts.episodes.errors import EpisodeError
from rollouts.testing import ScriptedEngine

QUESTION = [{"role": "user", "content": "?"}]


class Closable:
    def __init__(self, failing=""):
        self.calls, self.failing = [], failing

    def _called(self, method):
        self.calls.append(method)
        if self.failing == method:
            raise OSError(f"{method} failed")

    def reset(self, seed):
        self._called("reset")
        return QUESTION

    def step(self, assistant):
        self._called("step")
        return StepResult(done=True, reward=1.0)

    def close(self):
        self._called("close")


class AsynchronouslyClosable(Closable):
    async def close(self):
        await asyncio.sleep(0)
        self._called("close")


KINDS = {
    "synchronous": lambda environment: environment,
    "in a thread": ThreadedEnvironment,
}


@pytest.mark.parametrize("wrap", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("kind", [Closable, AsynchronouslyClosable])
def test_an_environment_is_closed_once_when_its_episode_is_done(renderer, kind, wrap):
    environment = kind()
    assert play(wrap(environment), ScriptedEngine(["a"], renderer=renderer), renderer).reward == 1.0
    assert environment.calls == ["reset", "step", "close"]


def test_close_does_not_wait_for_the_methods_of_other_environments():
    may_return = threading.Event()

    class Slow(Closable):
        def step(self, assistant):
            assert may_return.wait(30)
            return super().step(assistant)

    async def close_beside_steps():
        slow = [ThreadedEnvironment(Slow()) for _ in range(40)]  # more than there are threads for
        steps = [asyncio.create_task(environment.step({"role": "assistant", "content": ""})) for environment in slow]
        await asyncio.sleep(0)
        environment = Closable()
        try:
            await asyncio.wait_for(ThreadedEnvironment(environment).close(), 20)
            assert not any(step.done() for step in steps)
        finally:
            may_return.set()
            await asyncio.gather(*steps)
        return environment.calls

    assert asyncio.run(close_beside_steps()) == ["close"]


@pytest.mark.parametrize("failing", ["reset", "step"])
def test_an_environment_is_closed_when_its_episode_fails(renderer, failing):
    environment = Closable(failing)
    with pytest.raises(EpisodeError, match=f"{failing} failed"):
        play(environment, ScriptedEngine(["a"], renderer=renderer), renderer)
    assert environment.calls.count("close") == 1
    assert environment.calls[-1] == "close"


@pytest.mark.parametrize("kind", [Closable, AsynchronouslyClosable])
def test_a_close_that_fails_is_logged_and_the_episode_is_complete(renderer, kind, caplog):
    trajectory = play(kind("close"), ScriptedEngine(["a"], renderer=renderer), renderer)
    assert (trajectory.reward, trajectory.done, trajectory.error) == (1.0, True, "")
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert "close failed" in record.getMessage()


def test_a_close_that_does_not_end_is_left_and_logged(renderer, caplog, monkeypatch):
    monkeypatch.setattr(environment_calls, "CLOSE_SECONDS", 0.01)

    class Hanging(Closable):
        async def close(self):
            await asyncio.Event().wait()

    assert play(Hanging(), ScriptedEngine(["a"], renderer=renderer), renderer).done
    assert "Hanging.close had not ended after 0.01 seconds" in caplog.text


async def test_a_threaded_environment_is_closed_after_the_step_that_a_cancelled_episode_left_running(renderer):
    stepping, may_return, closed = threading.Event(), threading.Event(), threading.Event()

    class Slow(Closable):
        def step(self, assistant):
            stepping.set()
            assert may_return.wait(30)
            self._called("step")
            return StepResult(done=True)

        def close(self):
            super().close()
            closed.set()

    environment = Slow()

    engine = ScriptedEngine(["a"], renderer=renderer)
    episode = asyncio.create_task(
        run_episode(
            ThreadedEnvironment(environment),
            engine=engine,
            renderer=renderer,
            sampling=SamplingParams(),
            max_turns=1,
        )
    )
    await asyncio.to_thread(stepping.wait, 30)
    episode.cancel()
    may_return.set()
    with pytest.raises(asyncio.CancelledError):
        await episode
    assert closed.wait(30)
    assert environment.calls == ["reset", "step", "close"]


class Limited(Closable):
    def __init__(self, reason, done=True):
        super().__init__()
        self.reason, self.done = reason, done

    def step(self, assistant):
        return StepResult(QUESTION, reward=0.5, done=self.done, truncation_reason=self.reason)


def test_an_environment_ends_its_episode_as_truncated_with_a_reason(renderer):
    trajectory = play(Limited("out of fuel"), ScriptedEngine(["a"], renderer=renderer), renderer)
    assert (trajectory.done, trajectory.truncated, trajectory.error) == (False, True, "")
    assert (trajectory.truncation_reason, trajectory.reward) == ("environment: out of fuel", 0.5)


@pytest.mark.parametrize(("reason", "done"), [("late", False), (None, True), (3, True), ("\ud800", True)])
def test_a_reason_without_an_end_or_that_is_no_text_is_refused(renderer, reason, done):
    with pytest.raises(EpisodeError, match="step returned truncation_reason="):
        play(Limited(reason, done), ScriptedEngine(["a"], renderer=renderer), renderer)
