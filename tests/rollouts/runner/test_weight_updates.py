"""Weight updates of a runner: exclusive, recorded in order of use, and without effect where they fail."""

import asyncio
import logging

import pytest
from runner_world import HeldEngine, make_runner
from simulated_engine import SimulatedEngine

from rollouts.errors import WeightUpdateError
from rollouts.runner.events import WeightUpdateFailed
from rollouts.testing import ScriptedEngine


async def test_a_failed_update_raises_the_reason_of_the_engine_and_leaves_the_version(renderer):
    events = []
    runner = make_runner(renderer, engine=SimulatedEngine(update_failure_rate=1.0), listeners=[events.append])
    with pytest.raises(WeightUpdateError, match="version '0' is in use"):
        await runner.update_weights(None, "1")
    assert runner.versions == ("0",)
    (event,) = events
    assert isinstance(event, WeightUpdateFailed)
    assert event.version == "1"
    assert "version '0' is in use" in event.error
    with pytest.raises(WeightUpdateError, match="failed"):
        await runner.update_weights(None, "1")  # the version has not been in use, so it can be tried again


async def test_an_engine_that_does_not_label_the_new_weights_is_an_error(renderer):
    class Unlabelled(ScriptedEngine):
        async def update_weights(self, weights, version, *, in_flight="abort"):
            pass

    runner = make_runner(renderer, engine=Unlabelled([]))
    with pytest.raises(WeightUpdateError, match="its weight_version is '0', not '1'"):
        await runner.update_weights(None, "1")
    assert runner.versions == ("0",)


async def test_an_update_that_is_cancelled_twice_is_cancelled_in_the_engine(renderer):
    engine = HeldEngine()
    runner = make_runner(renderer, engine=engine)
    updating = asyncio.ensure_future(runner.update_weights(None, "1"))
    await engine.update_begun.wait()
    for _ in range(2):
        updating.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await updating
    assert (engine.weight_version, runner.versions) == ("0", ("0",))
    assert len(asyncio.all_tasks()) == 1


async def test_the_failure_of_a_cancelled_update_is_logged(renderer, caplog):
    engine = HeldEngine(update_error=WeightUpdateError("no such directory"))
    runner = make_runner(renderer, engine=engine)
    updating = asyncio.ensure_future(runner.update_weights(None, "1"))
    await engine.update_begun.wait()
    updating.cancel()
    engine.update_release.set()
    with caplog.at_level(logging.WARNING), pytest.raises(asyncio.CancelledError):
        await updating
    assert "no such directory" in caplog.text
