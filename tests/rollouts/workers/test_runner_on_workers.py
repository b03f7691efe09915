"""A runner whose episodes run on workers that end and begin at any moment behaves as one whose episodes run in it."""

import asyncio
import logging

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule
from local_workers import EncodedWorker, local_pool
from runner_world import Counting, HeldEngine, assert_no_task_is_left, groups_of, outcomes, run_groups, tasks
from simulated_runs import LoopRenderer
from test_runner_invariants import Run, rounds

from rollouts import EpisodeLimits, SamplingParams, Task
from rollouts.errors import ArgumentError
from rollouts.runner import RetryPolicy, Runner
from rollouts.testing import ScriptedEngine
from rollouts.workers import EpisodeJob, EpisodeWorker, WorkerPool, WorkersClosedError


class RunOnWorkers(Run):
    """The calls of `Run`, with workers that are killed and begun between and during them."""

    def place(self, make_environment):
        self.make_environment = make_environment
        self.pool = WorkerPool(max_losses=10**6)
        self.killed, self.begun = [], 0
        for _ in range(2):
            self.begin_worker()
        return {"make_environment": None, "engine": self.engine, "renderer": None, "workers": self.pool}

    def begin_worker(self):
        name = f"worker-{self.begun}"
        self.begun += 1
        worker = EpisodeWorker(self.make_environment, self.engine, LoopRenderer(), slots=2)
        self.pool.add(name, 2, EncodedWorker(name, worker))

    def kill_worker(self):
        name = self.pool.names[0]
        self.killed.append(self.pool._members[name].remote)
        self.killed[-1].killed.set()
        self.pool.remove(name, "killed")

    @rule(count=st.integers(1, 4), waits=st.lists(rounds, min_size=1, max_size=4))
    def kill_workers_while_collecting(self, count, waits):
        async def both():
            collecting = asyncio.ensure_future(self.collected(count))
            for wait in waits:
                await self.pass_rounds(wait)
                self.kill_worker()
                await self.pass_rounds(wait // 10)
                self.begin_worker()
            return await collecting

        assert len(self.run(both())) == count

    @rule(count=st.integers(1, 4), wait=rounds)
    def collect_with_no_worker_at_first(self, count, wait):
        async def both():
            for _ in range(2):
                self.kill_worker()
            collecting = asyncio.ensure_future(self.collected(count))
            await self.pass_rounds(wait)
            for _ in range(2):
                self.begin_worker()
            return await collecting

        assert len(self.run(both())) == count

    def teardown(self):
        if hasattr(self, "runner"):
            assert len(self.pool.names) == 2
            super().teardown()
            assert self.pool.metrics()["worker_slots_used"] == 0


TestRunOnWorkers = RunOnWorkers.TestCase
TestRunOnWorkers.settings = settings(max_examples=15, stateful_step_count=12, deadline=None)


class ManyRunsOnWorkers(RunOnWorkers):
    """The same, for many more runs."""


TestManyRunsOnWorkers = pytest.mark.long(pytest.mark.slow(ManyRunsOnWorkers.TestCase))
TestManyRunsOnWorkers.settings = settings(max_examples=800, stateful_step_count=25, deadline=None)


def finish(run):
    """Run to the end in an event loop whose only task it is."""

    async def timed():
        async with asyncio.timeout(60):
            return await run()

    return asyncio.run(timed())


def run_on_workers(renderer, source, make_environment=Counting, engine=None, *, count=2, **options):
    """The groups of a whole run by task id, the runner, and its workers."""

    async def run():
        made = engine or ScriptedEngine(lambda request: "yes", renderer=renderer)
        pool, workers = local_pool(lambda: EpisodeWorker(make_environment, made, renderer), count)
        runner = Runner(None, made, None, sampling=SamplingParams(max_tokens=8), workers=pool, **options)
        async with runner:
            groups = await groups_of(runner, source)
        await pool.close()
        for worker in workers.values():
            await worker.worker.close()
        assert_no_task_is_left()
        return {group.task.task_id: group for group in groups}, runner, workers

    return finish(run)


def content(group):
    """What of a group does not depend on time."""
    return (
        group.rewards.tolist(),
        group.attempts,
        group.oldest_version,
        [(one.episode_id, one.seed, one.group_id, one.error, one.done, one.num_turns) for one in group.episodes],
        [[one.token_ids(leaf).tolist() for leaf in one.leaves()] for one in group.episodes],
        [one.to_messages(leaf) for one in group.episodes for leaf in one.leaves()],
    )


def test_groups_of_workers_are_those_of_a_runner_alone(renderer):
    alone, local = run_groups(renderer, tasks(6), group_size=3, seed=5)
    elsewhere, remote, _ = run_on_workers(renderer, tasks(6), group_size=3, seed=5)
    assert {name: content(group) for name, group in alone.items()} == {
        name: content(group) for name, group in elsewhere.items()
    }
    counted = ("turns", "prompt_tokens", "completion_tokens", "episodes_started", "episodes_ended/done")
    assert [remote.metrics()[name] for name in counted] == [local.metrics()[name] for name in counted]


class Failing(Counting):
    """Raises in the step of every first attempt."""

    def attach(self, context):
        self.first = context.episode_id.endswith(".0")

    def step(self, assistant):
        if self.first:
            raise KeyError("a broken environment")
        return super().step(assistant)


def test_the_kind_of_a_remote_failure_decides_whether_it_is_run_again(renderer, caplog):
    options = {"group_size": 2, "retry": RetryPolicy(kinds=("environment",), first_delay=0.0)}
    groups, runner, _ = run_on_workers(renderer, tasks(2), Failing, **options)
    assert outcomes(runner) == {"failed": 4, "done": 4}
    assert {group.attempts for group in groups.values()} == {(2, 2)}

    with caplog.at_level(logging.WARNING, "rollouts.runner"):
        groups, runner, _ = run_on_workers(renderer, tasks(2), Failing, group_size=2)
    assert outcomes(runner) == {"failed": 4}
    episode = groups["t0"].episodes[0]
    assert episode.num_turns == 1, "the completed turn is kept"
    assert "KeyError: 'a broken environment'" in episode.error
    records = [record for record in caplog.records if record.name == "rollouts.runner"]
    (logged,) = [record.getMessage() for record in records if "failed" in record.getMessage()]
    assert "in step" in logged, "the traceback shows the line of the environment"
    assert 'raise KeyError("a broken environment")' in logged


async def test_an_environment_that_ends_its_worker_again_and_again_is_given_up(renderer):
    engine = ScriptedEngine(lambda request: "yes", renderer=renderer)
    pool = WorkerPool(max_losses=3)
    begun = iter(range(100))

    def begin():
        name = f"worker-{next(begun)}"

        def make(task):
            if task.task_id == "t1":
                remote.killed.set()
            return Counting(task)

        remote = EncodedWorker(name, EpisodeWorker(make, engine, renderer))
        pool.add(name, 1, remote)

    begin()
    stop_beginning = pool.on_slots_changed(lambda: pool.num_slots or begin())
    runner = Runner(None, engine, None, sampling=SamplingParams(max_tokens=8), workers=pool)
    async with runner:
        groups = {group.task.task_id: group.episodes[0] for group in await groups_of(runner, tasks(4))}
    assert {name for name, episode in groups.items() if episode.done} == {"t0", "t2", "t3"}
    assert "lost 3 workers" in groups["t1"].error
    assert runner.metrics()["workers_lost"] == runner.metrics()["worker_jobs_moved"] == 3
    assert outcomes(runner) == {"done": 3, "failed": 1}
    stop_beginning()
    await pool.close()
    assert_no_task_is_left()


async def test_an_update_of_the_weights_reaches_workers_and_drops_what_began_before_it(renderer):
    engine = HeldEngine(renderer)
    engine.update_release.set()
    pool, workers = local_pool(lambda: EpisodeWorker(Counting, engine, renderer))
    runner = Runner(None, engine, None, sampling=SamplingParams(max_tokens=8), workers=pool, tasks=iter(tasks(100)))
    async with runner:
        collecting = asyncio.ensure_future(runner.collect(2))
        await engine.wait_for_in_flight(2)
        await runner.update_weights(None, "new")
        assert [worker.updates for worker in workers.values()] == [["abort", None]] * 2
        engine.release.set()
        groups = await collecting
    assert runner.metrics()["groups_stale/drop"] == 2
    assert {group.oldest_version for group in groups} == {"new"}
    await pool.close()


def test_the_deadline_of_an_episode_ends_it_on_its_worker(renderer):
    engine = HeldEngine(renderer)
    groups, *_ = run_on_workers(renderer, tasks(1), engine=engine, limits=EpisodeLimits(episode_seconds=0.05))
    assert groups["t0"].episodes[0].truncation_reason.startswith("episode_seconds")
    assert not engine.in_flight


def test_a_job_that_cannot_be_encoded_fails_alone(renderer):
    source = [*tasks(1), *(type(one)("bad", object()) for one in tasks(1))]
    groups, runner, _ = run_on_workers(renderer, source)
    assert groups["t0"].episodes[0].done
    assert "EncodeError" in groups["bad"].episodes[0].error
    assert outcomes(runner) == {"done": 1, "failed": 1}


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"make_environment": Counting}, "make_environment"),
        ({"renderer": LoopRenderer()}, "renderer"),
        ({"engine": "http://127.0.0.1:8000"}, "engine"),
        ({"workers": WorkerPool}, "workers"),
        ({"workers": None}, "make_environment"),
    ],
)
def test_arguments_that_contradict_workers_are_refused(arguments, name):
    options = {"make_environment": None, "engine": None, "renderer": None, "workers": WorkerPool(), **arguments}
    with pytest.raises(ArgumentError) as caught:
        Runner(**options, sampling=SamplingParams())
    assert caught.value.name == name


async def test_a_stream_whose_workers_are_closed_while_its_groups_run_raises_each_time(renderer):
    engine = HeldEngine(renderer)
    pool, _ = local_pool(lambda: EpisodeWorker(Counting, engine, renderer), 1, slots=2)
    async with Runner(None, None, None, sampling=SamplingParams(max_tokens=8), workers=pool) as runner:
        stream = runner.stream(tasks(6))
        first = asyncio.ensure_future(anext(stream))
        await engine.wait_for_in_flight(2)
        await pool.close()
        with pytest.raises(WorkersClosedError):
            await first
        for _ in range(3):
            with pytest.raises(WorkersClosedError):
                await asyncio.wait_for(anext(stream), 10)


def test_an_episode_begins_again_after_the_cleanup_of_all_its_cancelled_runs(renderer):
    async def run():
        began, cleans_up, may_end = asyncio.Event(), asyncio.Event(), asyncio.Event()
        order = []

        class Slow(Counting):
            """The first run waits until it is cancelled, and then cleans up until the test lets it end."""

            async def reset(self, seed):
                order.append("reset")
                if not began.is_set():
                    began.set()
                    try:
                        await asyncio.Event().wait()
                    finally:
                        cleans_up.set()
                        await may_end.wait()
                        order.append("cleaned up")
                return super().reset(seed)

        worker = EpisodeWorker(Slow, ScriptedEngine(lambda request: "yes", renderer=renderer), renderer)
        job = EpisodeJob("episode", Task("t"), 0, 0, 1, SamplingParams(max_tokens=8), EpisodeLimits())
        first = asyncio.ensure_future(worker.run(job))
        await began.wait()
        second = asyncio.ensure_future(worker.run(job))
        await cleans_up.wait()
        third = asyncio.ensure_future(worker.run(job))
        await asyncio.wait([second])
        assert second.cancelled()
        for _ in range(50):  # in which the third run begins, if it does not wait
            await asyncio.sleep(0)
        may_end.set()
        assert (await third).failure is None
        assert order == ["reset", "cleaned up", "reset"]
        assert first.cancelled()
        await worker.close()
        assert_no_task_is_left()

    finish(run)
