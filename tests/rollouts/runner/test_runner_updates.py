"""Weight updates while groups run: what goes on, what is dropped, and that its capacity is free."""

import asyncio
import logging

import pytest
from runner_world import HeldEngine, make_runner
from simulated_engine import SimulatedEngine
from simulated_runs import LoopRenderer, TaskLog

from rollouts import SamplingParams, StepResult
from rollouts.errors import WeightUpdateError
from rollouts.runner import Asynchronous, Journal, OneStepOffPolicy, Runner, Synchronous
from rollouts.runner.events import WeightUpdateFailed
from rollouts.task import Task
from rollouts.testing import ScriptedEngine

TOKENS = 30
DROPPED = "groups_stale/drop"


class OneTurn:
    """Asks once."""

    def reset(self, seed):
        return [{"role": "user", "content": "begin"}]

    def step(self, assistant):
        return StepResult(reward=1.0, done=True)


class HeldSecondTurn:
    """Waits between its two turns until `released`."""

    released = asyncio.Event()
    num_waiting = 0

    def __init__(self):
        self.turn = 0

    def reset(self, seed):
        return [{"role": "user", "content": "begin"}]

    async def step(self, assistant):
        self.turn += 1
        if self.turn == 1:
            type(self).num_waiting += 1
            await self.released.wait()
        return StepResult([{"role": "user", "content": "go on"}], done=self.turn == 2)


@pytest.fixture
def held(monkeypatch):
    monkeypatch.setattr(HeldSecondTurn, "released", asyncio.Event())
    monkeypatch.setattr(HeldSecondTurn, "num_waiting", 0)
    return HeldSecondTurn


def engine_with(**options):
    return SimulatedEngine(**{"tokens": (TOKENS, TOKENS), "queue_seconds": (0.0, 0.01), **options})


def runner_with(engine, mode, make=OneTurn, tasks=None, **options):
    return Runner(
        lambda task: make(),
        engine,
        LoopRenderer(),
        sampling=SamplingParams(max_tokens=TOKENS),
        mode=mode,
        tasks=TaskLog() if tasks is None else tasks,
        **options,
    )


async def until(condition):
    """Let the event loop run until a condition holds."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  rounds of the loop are the simulated time
            await asyncio.sleep(0)


async def collect_with_update_before_the_first_token(runner, engine, count, mode):
    engine.pause()
    collecting = asyncio.ensure_future(runner.collect(count))
    await until(lambda: engine.running == count)
    updating = asyncio.ensure_future(runner.update_weights(None, "1", mode))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not updating.done()
    engine.resume()
    await updating
    return await asyncio.wait_for(collecting, 60)


def versions_of(group):
    return [span.version for e in group.episodes for node in e.nodes for span in node.weight_spans]


async def test_requests_that_had_to_wait_for_the_update_are_not_too_old():
    engine = engine_with(update_seconds=(5.0, 5.0))
    async with runner_with(engine, Synchronous()) as runner:
        groups = await collect_with_update_before_the_first_token(runner, engine, 2, "wait")
        assert [versions_of(group) for group in groups] == [["1"], ["1"]]
        assert DROPPED not in runner.metrics()


async def test_stale_samples_are_weighted_down_where_that_is_chosen():
    engine = engine_with()
    async with runner_with(engine, Asynchronous(1, "downweight")) as runner:
        collecting = asyncio.ensure_future(runner.collect(1))
        await until(lambda: engine.running == 2)
        for version in "123":
            await runner.update_weights(None, version, "keep")
        (group,) = await collecting
        assert group.oldest_version == "0"
        assert group.sample_weights.tolist() == [(1 + 1) / (3 + 1)]
        assert runner.metrics()["groups_stale/downweight"] == 1


async def test_a_running_request_counts_from_when_it_was_sent():
    """With "abort" its tokens may be of the old version, and nobody but the engine knows."""
    engine = engine_with(update_seconds=(5.0, 5.0))
    async with runner_with(engine, Synchronous()) as runner:
        await collect_with_update_before_the_first_token(runner, engine, 2, "abort")
        assert runner.metrics()[DROPPED] == 2


async def test_the_oldest_of_the_running_requests_of_sub_agents_counts():
    """A request that is sent later, and its end, do not let an older one count as younger or as ended."""
    in_flight = []

    class HeldSubAgents(SimulatedEngine):
        async def generate(self, request, listen=None):
            ended = asyncio.Event()
            in_flight.append(ended)
            await ended.wait()
            return await super().generate(request)

    class TwoSubAgents(OneTurn):
        def attach(self, context):
            self.context = context

        async def reset(self, seed):
            first = asyncio.create_task(self.context.generate_turn([{"role": "user", "content": "a"}], agent="a"))
            await until(lambda: len(in_flight) == 1)
            await self.released.wait()
            await self.context.generate_turn([{"role": "user", "content": "b"}], agent="b")
            await first

        released = asyncio.Event()

    engine = HeldSubAgents(tokens=(2, 2))
    async with runner_with(engine, Asynchronous(1), make=TwoSubAgents, tasks=[Task("t")]) as runner:
        collecting = asyncio.ensure_future(runner.collect(1))
        await until(lambda: len(in_flight) == 1)
        await runner.update_weights(None, "1", "keep")
        TwoSubAgents.released.set()
        await until(lambda: len(in_flight) == 2)
        in_flight[1].set()  # the younger request ends
        await until(lambda: runner.metrics()["turns"] == 1)
        assert DROPPED not in runner.metrics()
        await runner.update_weights(None, "2", "keep")
        assert await asyncio.wait_for(collecting, 60) == []
        assert runner.metrics()[DROPPED] == 1


async def test_a_run_whose_groups_are_all_too_old_says_so_once(held, caplog):
    async with runner_with(engine_with(), Asynchronous(1), make=held) as runner:
        collecting = asyncio.ensure_future(runner.collect(1))
        with caplog.at_level(logging.WARNING, "rollouts.runner"):
            for number in range(1, 7):  # two groups run at a time
                await until(lambda number=number: held.num_waiting == 2 * number)
                await runner.update_weights(None, f"{number}.a")
                await runner.update_weights(None, f"{number}.b")
                await until(lambda number=number: runner.metrics().get(DROPPED) == 2 * number)
        held.released.set()
        await asyncio.wait_for(collecting, 60)
    (message,) = [record.getMessage() for record in caplog.records]
    assert "the last 10 groups were too old" in message
    assert "by 2 versions of the weights, where the mode allows 1" in message


async def test_a_consumer_may_ask_for_groups_while_an_update_drops_others(tmp_path, monkeypatch):
    discarded, release, discard = [], asyncio.Event(), Journal.discarded

    async def held_discarded(journal, task_id, reason):
        discarded.append(task_id)
        if len(discarded) == 1:
            await release.wait()
        await discard(journal, task_id, reason)

    monkeypatch.setattr(Journal, "discarded", held_discarded)
    async with runner_with(engine_with(), OneStepOffPolicy(), journal=Journal.open(tmp_path / "journal")) as runner:
        await runner.collect(2)
        await until(lambda: runner.metrics()["groups_queued"] == 2)
        await runner.update_weights(None, "1")
        updating = asyncio.ensure_future(runner.update_weights(None, "2"))
        await until(lambda: len(discarded) == 1)
        collecting = asyncio.ensure_future(runner.collect(2))
        await until(lambda: len(discarded) == 2)
        release.set()
        await updating
        assert [versions_of(group) for group in await collecting] == [["2"], ["2"]]
        assert runner.metrics()[DROPPED] == len(set(discarded)) == 2


# Updates alone.


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
