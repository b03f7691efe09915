"""Jobs and slots of a pool: none is lost, none is used twice, whatever workers and callers do."""

import asyncio
import gc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rollouts import EpisodeError, EpisodeLimits, SamplingParams, Task
from rollouts.episodes.errors import is_outage
from rollouts.errors import ServerUnreachableError
from rollouts.workers import EpisodeJob, EpisodeOutcome, WorkerGoneError, WorkerPool, WorkersClosedError
from transport import decode, encode

STEPS = 12  # rounds of the event loop in which all that is due happens


def job(name):
    return EpisodeJob(name, Task(name), 0, 0, 1, SamplingParams(), EpisodeLimits())


class Observer:
    def __init__(self):
        self.workers = []

    def assigned(self, worker):
        self.workers.append(worker)


class HeldWorker:
    """Holds its jobs until the test ends them."""

    def __init__(self):
        self.held = {}
        self.cancelled = []
        self.most = 0
        self.updates = []

    async def run(self, job, observer):
        future = asyncio.get_running_loop().create_future()
        assert job.episode_id not in self.held
        self.held[job.episode_id] = (job, future)
        self.most = max(self.most, len(self.held))
        try:
            return await future
        except asyncio.CancelledError:
            self.cancelled.append(job.episode_id)
            raise
        finally:
            del self.held[job.episode_id]

    def finish(self, name):
        job, future = self.held[name]
        future.set_result(EpisodeOutcome(job.new_trajectory()))

    def fail(self, name, error):
        self.held[name][1].set_exception(error)

    def set_update(self, in_flight):
        self.updates.append(in_flight)


async def settled():
    for _ in range(STEPS):
        await asyncio.sleep(0)


async def test_the_jobs_of_a_worker_that_leaves_run_again_in_their_order():
    pool, names, other = WorkerPool(), [f"job-{number}" for number in range(8)], HeldWorker()
    pool.add("leaves", 8, HeldWorker())
    calls = [asyncio.ensure_future(pool.run(job(name), Observer())) for name in names]
    await settled()
    pool.remove("leaves", "left", is_lost=False)
    pool.add("other", 8, other)
    await settled()
    assert list(other.held) == names
    await pool.close()
    assert all(isinstance(each, WorkersClosedError) for each in await asyncio.gather(*calls, return_exceptions=True))


class Pool(RuleBasedStateMachine):
    """Workers come, leave and are lost; jobs come, end and are cancelled."""

    @initialize(max_losses=st.integers(1, 3))
    def begin(self, max_losses):
        self.loop = asyncio.new_event_loop()
        self.max_losses = max_losses
        self.pool = WorkerPool(max_losses=max_losses)
        self.workers, self.slots = {}, {}
        self.calls, self.losses, self.number = {}, {}, 0
        self.finished, self.cancelled, self.given_up = set(), set(), set()
        self.seen_slots = []
        self.pool.on_slots_changed(lambda: self.seen_slots.append(self.pool.num_slots))

    def settle(self):
        self.loop.run_until_complete(settled())

    @rule(slots=st.integers(1, 3))
    def add(self, slots):
        self.number += 1
        name = f"worker-{self.number}"
        self.workers[name], self.slots[name] = HeldWorker(), slots
        self.pool.add(name, slots, self.workers[name])
        self.settle()

    @rule(count=st.integers(1, 4))
    def call(self, count):
        for _ in range(count):
            self.number += 1
            name = f"job-{self.number}"
            self.losses[name] = 0
            self.calls[name] = self.loop.create_task(self.pool.run(job(name), Observer()))
        self.settle()

    def running(self):
        return {name: worker for worker in self.workers.values() for name in worker.held}

    @precondition(lambda self: self.running())
    @rule(data=st.data())
    def finish(self, data):
        name = data.draw(st.sampled_from(sorted(self.running())))
        self.running()[name].finish(name)
        self.finished.add(name)
        self.settle()

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), how=st.sampled_from(["lost", "left", "gone"]))
    def remove(self, data, how):
        name = data.draw(st.sampled_from(sorted(self.workers)))
        worker = self.workers.pop(name)
        held = list(worker.held)
        del self.slots[name]
        if how == "gone" and held:  # noticed by the call of one of its jobs
            worker.fail(held[0], WorkerGoneError(name, "gone"))
        else:
            self.pool.remove(name, how, is_lost=how != "left")
        for each in held:
            self.losses[each] += how != "left"
            if self.losses[each] == self.max_losses:
                self.given_up.add(each)
        self.settle()

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def cancel(self, data):
        name = data.draw(st.sampled_from(sorted(self.calls)))
        if not self.calls[name].done():
            self.calls[name].cancel()
            self.cancelled.add(name)
            self.settle()

    @precondition(lambda self: self.running() and self.pool.metrics()["worker_jobs_waiting"])
    @rule(rounds=st.integers(0, 5))
    def cancel_the_job_that_waits_for_a_slot_when_one_becomes_free(self, rounds):
        ended = {*self.finished, *self.cancelled, *self.given_up, *self.running()}
        waiting = next(name for name in self.calls if name not in ended)
        other = sorted(self.running())[0]
        self.running()[other].finish(other)
        self.finished.add(other)

        async def cancel_later():
            for _ in range(rounds):
                await asyncio.sleep(0)
            self.calls[waiting].cancel()

        self.loop.run_until_complete(cancel_later())
        self.cancelled.add(waiting)
        self.settle()

    @invariant()
    def every_job_is_in_one_place(self):
        if not hasattr(self, "pool"):
            return
        running = [name for worker in self.workers.values() for name in worker.held]
        assert len(running) == len({*running}), "a job runs twice"
        for name, call in self.calls.items():
            if name in self.cancelled:
                assert call.cancelled()
            elif name in self.finished:
                assert call.result().episode_id == name
            elif name in self.given_up:
                assert isinstance(call.exception(), EpisodeError)
                assert "and is not run again" in str(call.exception().__cause__)
            else:
                assert not call.done()
        unended = {*self.calls} - self.cancelled - self.finished - self.given_up
        assert {*running} <= unended
        assert len(running) == min(len(unended), sum(self.slots.values())), "a slot is free although a job waits"

    @invariant()
    def slots_are_counted(self):
        if not hasattr(self, "pool"):
            return
        metrics = self.pool.metrics()
        running = [len(worker.held) for worker in self.workers.values()]
        assert all(worker.most <= self.slots[name] for name, worker in self.workers.items())
        assert metrics["worker_slots_used"] == sum(running)
        assert metrics["worker_slots"] == self.pool.num_slots == sum(self.slots.values())
        assert metrics["worker_jobs_waiting"] == len(
            {*self.calls} - self.cancelled - self.finished - self.given_up
        ) - sum(running)
        assert self.seen_slots[-1:] in ([], [self.pool.num_slots])

    def teardown(self):
        if not hasattr(self, "pool"):
            return
        self.loop.run_until_complete(self.pool.close())
        self.settle()
        for name, call in self.calls.items():
            if name not in self.finished | self.cancelled | self.given_up:
                assert isinstance(call.exception(), WorkersClosedError)
        assert not asyncio.all_tasks(self.loop)
        self.loop.close()


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


class ManyPools(Pool):
    """The same, for many more pools."""


TestManyPools = pytest.mark.long(pytest.mark.slow(ManyPools.TestCase))
TestManyPools.settings = settings(max_examples=3000, stateful_step_count=40, deadline=None)


@given(st.lists(st.sampled_from(["abort", "wait", "keep", None]), max_size=12))
def test_an_update_ends_for_workers_when_the_last_of_those_in_progress_has_ended(calls):
    pool, worker = WorkerPool(), HeldWorker()
    pool.add("worker", 1, worker)
    in_progress = 0
    for number, call in enumerate(calls):
        if call is None and not in_progress:
            continue
        in_progress += -1 if call is None else 1
        pool.set_update(call)
        late = HeldWorker()
        pool.add(f"late-{number}", 1, late)
        assert (worker.updates[-1] is not None) == bool(in_progress)
        assert late.updates == worker.updates[-1:] * bool(in_progress)


@pytest.mark.parametrize(
    ("cause", "is_one"),
    [(ServerUnreachableError("r", "refused"), True), (KeyError("x"), False)],
    ids=["outage", "other"],
)
def test_an_outage_of_an_engine_is_one_for_the_runner_of_another_process(cause, is_one):
    failed = EpisodeError("it failed", job("a").new_trajectory())
    failed.__cause__ = cause
    with pytest.raises(EpisodeError) as caught:
        decode(encode(EpisodeOutcome.of_error(failed))).result()
    assert is_outage(caught.value.__cause__) is is_one


@pytest.mark.slow
async def test_jobs_of_one_episode_id_run_one_after_the_other():
    pool, worker, other = WorkerPool(), HeldWorker(), HeldWorker()
    pool.add("worker", 2, worker)
    calls = [asyncio.ensure_future(pool.run(job("a"), Observer())) for _ in range(4)]
    await settled()
    assert pool.metrics()["worker_slots_used"] == 1
    calls[1].cancel()  # it waits, and neither keeps a slot nor lets the third begin
    await settled()
    assert calls[1].cancelled()
    assert pool.metrics()["worker_slots_used"] == 1
    calls[0].cancel()
    await settled()
    assert worker.cancelled == ["a"]
    assert list(worker.held) == ["a"]
    pool.remove("worker", "killed")  # the third job runs again on another worker, and the fourth still waits
    pool.add("other", 2, other)
    await settled()
    other.finish("a")
    await settled()
    assert (calls[2].done(), calls[3].done()) == (True, False)
    other.finish("a")
    await settled()
    assert calls[3].result().episode_id == "a"
    assert pool.metrics()["worker_slots_used"] == 0
    calls.clear()
    gc.collect()  # the error of the cancelled call refers to its frames
    assert not pool._id_locks, "nothing is kept of an id whose jobs have ended"
    await pool.close()


async def test_a_job_that_waits_for_another_of_its_id_ends_when_the_pool_is_closed():
    pool = WorkerPool()
    pool.add("worker", 2, HeldWorker())
    calls = [asyncio.ensure_future(pool.run(job("a"), Observer())) for _ in range(3)]
    await settled()
    await pool.close()
    await settled()
    assert all(isinstance(call.exception(), WorkersClosedError) for call in calls)
