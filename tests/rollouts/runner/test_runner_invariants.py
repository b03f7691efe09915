"""A run under random latency, errors, aborts, pauses and weight updates loses nothing and delivers nothing too old."""

import asyncio

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from simulated_engine import SimulatedEngine
from simulated_runs import LoopRenderer, RandomEnvironment, TaskLog

from rollouts import SamplingParams
from rollouts.errors import WeightUpdateError
from rollouts.runner import Asynchronous, OneStepOffPolicy, RetryPolicy, Runner, Synchronous
from rollouts.runner.events import EpisodeEnded, EpisodeStarted, GroupSkipped, GroupStale

SECONDS = 30.0  # after which a call is taken to wait for ever
MODES = [
    Synchronous(),
    OneStepOffPolicy(),
    Asynchronous(0),
    Asynchronous(1),
    Asynchronous(3),
    Asynchronous(0, "downweight"),
    Asynchronous(2, "downweight"),
]
in_flight_modes = st.sampled_from(["abort", "wait", "keep"])
rounds = st.sampled_from([0, 1, 3, 10, 30, 60, 100, 150])  # of the event loop


class RecordingEngine(SimulatedEngine):
    """Keeps the versions in the order of their use."""

    def __init__(self, **options):
        super().__init__(**options)
        self.used = [self.weight_version]

    async def update_weights(self, weights, version, *, in_flight="abort"):
        await super().update_weights(weights, version, in_flight=in_flight)
        self.used.append(version)

    def is_sampling(self):
        return any(held.tokens for held in self._requests)

    def age(self, spans):
        """How many updates the oldest of these spans is behind."""
        return max((len(self.used) - 1 - self.used.index(span.version) for span in spans), default=0)


def spans_of(episode):
    return [span for node in episode.nodes for span in node.weight_spans]


class Run(RuleBasedStateMachine):
    """Calls of a runner in any order, and what must hold after each."""

    @initialize(
        mode=st.sampled_from(MODES),
        group_size=st.integers(1, 3),
        concurrency=st.sampled_from([1, 3, 6]),
        seed=st.integers(0, 2**16),
        failure_rate=st.sampled_from([0.0, 0.1]),
    )
    def begin(self, mode, group_size, concurrency, seed, failure_rate):
        self.loop = asyncio.new_event_loop()
        self.mode, self.group_size, self.concurrency = mode, group_size, concurrency
        self.engine = RecordingEngine(
            seed=seed, tokens=(2, 24), error_rate=failure_rate, abort_rate=failure_rate / 2, update_failure_rate=0.2
        )
        self.tasks = TaskLog()
        self.delivered, self.skipped, self.stale = [], [], []
        self.attempts = {EpisodeStarted: 0, EpisodeEnded: 0}
        self.num_updates, self.largest = 0, 0
        environments = iter(range(10**9))
        self.runner = Runner(
            **self.place(lambda task: RandomEnvironment(f"{seed} {next(environments)}", failure_rate)),
            sampling=SamplingParams(max_tokens=20),
            group_size=group_size,
            concurrency=concurrency,
            mode=mode,
            retry=RetryPolicy(kinds=("engine", "environment"), first_delay=0.0, max_delay=0.0),
            skip_group=lambda group: "uneven" if sum(group.rewards) % 5 == 4 else False,
            listeners=[self.note],
            tasks=self.tasks,
        )

    def place(self, make_environment):
        """The arguments of the runner that say where episodes run."""
        return {"make_environment": make_environment, "engine": self.engine, "renderer": LoopRenderer()}

    def note(self, event):
        if isinstance(event, EpisodeStarted | EpisodeEnded):
            self.attempts[type(event)] += 1
        elif isinstance(event, GroupSkipped):
            self.skipped.append(event.task_id)
        elif isinstance(event, GroupStale) and event.action == "drop":
            self.stale.append(event.task_id)

    def run(self, coroutine):
        return self.loop.run_until_complete(asyncio.wait_for(coroutine, SECONDS))

    async def pass_rounds(self, count):
        for _ in range(count):
            await asyncio.sleep(0)

    # Calls.

    @rule(count=st.integers(1, 4))
    def collect(self, count):
        assert len(self.run(self.collected(count))) == count

    @rule(count=st.integers(1, 4), mode=in_flight_modes, wait=rounds)
    def update_while_collecting(self, count, mode, wait):
        async def both():
            collecting = asyncio.ensure_future(self.collected(count))
            await self.pass_rounds(wait)
            await self.updated(mode)
            return await collecting

        assert len(self.run(both())) == count

    @rule(count=st.integers(1, 4), modes=st.lists(in_flight_modes, min_size=1, max_size=3))
    def update_while_tokens_are_sampled(self, count, modes):
        async def both():
            collecting = asyncio.ensure_future(self.collected(count))
            for mode in modes:
                while not collecting.done() and not self.engine.is_sampling():  # noqa: ASYNC110
                    await asyncio.sleep(0)
                await self.updated(mode)
            return await collecting

        assert len(self.run(both())) == count

    @rule(mode=in_flight_modes)
    def update(self, mode):
        self.run(self.updated(mode))

    @rule(mode=in_flight_modes)
    def update_twice_at_once(self, mode):
        async def both():
            first = asyncio.ensure_future(self.updated(mode))
            await asyncio.sleep(0)
            with pytest.raises(WeightUpdateError, match="under way"):
                await self.runner.update_weights(None, "second", mode)
            await first

        self.run(both())

    @rule(count=st.integers(1, 4), wait=rounds)
    def cancel_a_collect(self, count, wait):
        async def cancelled():
            collecting = asyncio.ensure_future(self.collected(count))
            await self.pass_rounds(wait)
            collecting.cancel()
            await asyncio.wait([collecting])
            assert collecting.cancelled() or collecting.exception() is None

        self.run(cancelled())

    @rule(wait=rounds)
    def pause(self, wait):
        async def paused():
            self.engine.pause()
            await self.pass_rounds(wait)
            self.engine.resume()

        self.run(paused())

    @rule(wait=rounds)
    def pass_time(self, wait):
        self.run(self.pass_rounds(wait))

    async def collected(self, count):
        self.largest = max(self.largest, count)
        groups = await self.runner.collect(count)
        for group in groups:
            self.check_delivered(group)
        return groups

    async def updated(self, mode):
        self.num_updates += 1
        version = f"{self.num_updates * 37 % 1000}"  # neither the order of the texts nor of the numbers
        try:
            await self.runner.update_weights(None, version, mode)
        except WeightUpdateError:
            assert self.engine.weight_version != version
        await self.pass_rounds(10)  # what the update cancelled ends in these
        if self.mode.on_stale == "drop":
            for held in self.engine._requests:
                assert self.engine.age(held.spans) <= self.mode.max_staleness, "a request runs on that is too old"

    # What must hold.

    def check_delivered(self, group):
        """Called in the round of the event loop in which a group is delivered."""
        assert group.task.task_id in self.tasks.given
        assert group.task.task_id not in {*self.delivered, *self.skipped, *self.stale}
        self.delivered.append(group.task.task_id)
        assert len(group.episodes) == self.group_size
        ages = []
        for episode, weight in zip(group.episodes, group.sample_weights, strict=True):
            assert bool(episode.error) != (episode.done or episode.truncated)
            sampled = sum(len(node.logprobs) for node in episode.nodes)
            assert sum(span.end - span.start for span in spans_of(episode)) == sampled
            age = self.engine.age(spans_of(episode))
            ages.append(age)
            if self.mode.on_stale == "drop" or age <= self.mode.max_staleness:
                assert weight == 1.0
            else:
                assert np.isclose(weight, (1 + self.mode.max_staleness) / (1 + age))
        if self.mode.on_stale == "drop":
            assert max(ages) <= self.mode.max_staleness
        if any(spans_of(episode) for episode in group.episodes):
            assert self.engine.used.index(group.oldest_version) == len(self.engine.used) - 1 - max(ages)

    @invariant()
    def capacity_is_conserved_and_memory_is_bounded(self):
        assert self.engine.peak_running <= self.concurrency
        running = self.attempts[EpisodeStarted] - self.attempts[EpisodeEnded]
        assert 0 <= self.engine.running <= running <= self.concurrency
        undelivered = len(self.tasks.given) - len(self.delivered) - len(self.skipped) - len(self.stale)
        # One task may have been taken for a group that was not started.
        assert 0 <= undelivered <= self.largest * (1 + self.mode.max_staleness) + 1

    def teardown(self):
        if not hasattr(self, "runner"):
            return
        try:
            self.tasks.is_over = True
            while self.run(self.collected(4)):
                pass
            ended = [*self.delivered, *self.skipped, *self.stale]
            assert sorted(ended) == sorted(self.tasks.given), "a task was lost, or ended twice"
            assert self.engine.running == 0
            capacity = self.runner._capacity
            assert (capacity.claimed, capacity.waiting, capacity.slots._value) == (0, 0, self.concurrency), (
                "capacity was not given back"
            )
            assert self.attempts[EpisodeStarted] == self.attempts[EpisodeEnded]
            self.run(self.runner.close())
            self.run(self.engine.close())
            assert not asyncio.all_tasks(self.loop)
        finally:
            self.loop.close()


TestRun = Run.TestCase
TestRun.settings = settings(max_examples=25, stateful_step_count=12, deadline=None)


class ManyRuns(Run):
    """The same, for many more runs."""


TestManyRuns = pytest.mark.long(pytest.mark.slow(ManyRuns.TestCase))
TestManyRuns.settings = settings(max_examples=1500, stateful_step_count=25, deadline=None)
