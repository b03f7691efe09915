"""Groups of episodes for the tasks of a run, delivered as they finish."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack
from inspect import iscoroutinefunction
from typing import Any, Self

from renderers import Renderer, RendererPool
from rollouts.calls import ClosedAtEnd
from rollouts.engines.protocol import ChatEngine, Engine, InFlight, SamplingParams, check_engine
from rollouts.episodes.limits import EpisodeLimits
from rollouts.episodes.turns import check_sampling
from rollouts.errors import ArgumentError, RolloutsError
from rollouts.rewards import GroupReward, check_names
from rollouts.runner.capacity import Capacity
from rollouts.runner.events import Listener
from rollouts.runner.group import Group
from rollouts.runner.group_run import GroupRun, GroupSettings, ScoreEpisode, attempt_of
from rollouts.runner.journal import Journal
from rollouts.runner.journal_file import RecordedAttempt, ResumedRun
from rollouts.runner.modes import Demand, Mode, Synchronous
from rollouts.runner.reporting import Reporter
from rollouts.runner.retries import RetryPolicy
from rollouts.runner.schedule import FirstGroups, Schedule, SkipGroup
from rollouts.runner.task_source import Tasks, TaskSource
from rollouts.runner.weight_updates import WeightUpdates
from rollouts.task import MakeEnvironment, Task
from rollouts.trajectory.tree import Trajectory
from rollouts.values import check_integer, has_members, whole_number
from rollouts.workers.episode_worker import EpisodeWorker
from rollouts.workers.worker_pool import WorkerPool


class Runner(ClosedAtEnd):
    """Runs groups of episodes, `group_size` for each task, and delivers each group when its episodes have ended.

        async with Runner(make_environment, engine, renderer, sampling=sampling, group_size=8) as runner:
            async for group in runner.stream(tasks):
                ...

    `make_environment(task)`, `async` or not, returns a new environment for each episode; its `reset` receives the same
    seed for all episodes of a task: that of the task, or one derived from `seed` and the task's id. The samples of each
    attempt have a seed derived from `seed`, the task's id, the index in the group and the attempt.

    At most `concurrency` episodes run at once. An episode that reaches one of the `limits` ends `truncated`; by default
    there is no limit, and an episode whose environment is never done does not end. One that fails is repeated as
    `retry` says, and if that does not help it is in its group with its `error` and its completed turns: no episode ends
    another. `mode` says how far groups may run ahead of updates of the weights. `group_rewards` are computed when the
    episodes of a group have ended, and added to their own. `skip_group(group)` may return True or a reason to leave a
    group out, such as one whose rewards are all equal. `await score_episode(episode)` gets each episode that has ended
    without an error and returns it with a teacher's scores (`rollouts.training.with_scores`). Where it raises an
    exception it is called again, as `retry` says and without another run of the episode; after that the episode has
    failed, with `ScoringError`. Where all episodes of the `stop_after_failed_groups` groups that
    begin first fail with one kind of error, and none succeeds, their consumer receives them and then a `RolloutsError`
    with the text of the first; 0 runs on. With a `journal`, the work of an earlier process is continued.
    `listeners` are called with each event (`rollouts.runner.events`). `tasks` are those of `collect`.

    With `workers` the episodes run in other processes, with environments, engines and renderers of their own
    (`rollouts.workers`); `engine` is then for updates of the weights alone. `make_environment` and `renderer` are None,
    and `engine` is None where nothing updates the weights.

    One event loop uses a runner. `renderer` may be a `RendererPool`; for any other renderer one is made, whose threads
    do all rendering. The engine, a pool that was given and the workers are not closed; the journal is, also where the
    runner is refused. A runner that has begun groups and is garbage-collected without `close` gives a
    `ResourceWarning`. Raises `ArgumentError`.
    """

    def __init__(
        self,
        make_environment: MakeEnvironment | None,
        engine: Engine | ChatEngine | None,
        renderer: Renderer | RendererPool | None,
        *,
        sampling: SamplingParams,
        group_size: int = 1,
        limits: EpisodeLimits = EpisodeLimits(),  # noqa: B008  immutable
        concurrency: int = 1024,
        retry: RetryPolicy = RetryPolicy(),  # noqa: B008  immutable
        mode: Mode = Synchronous(),  # noqa: B008  immutable
        seed: int = 0,
        group_rewards: Sequence[GroupReward] = (),
        skip_group: SkipGroup | None = None,
        score_episode: ScoreEpisode | None = None,
        stop_after_failed_groups: int = 8,
        journal: Journal | None = None,
        listeners: Sequence[Listener] = (),
        tasks: Tasks | None = None,
        workers: WorkerPool | None = None,
    ) -> None:
        self._has_begun = False  # before anything can be refused: `__del__` reads it
        with ExitStack() as refused:  # a runner that is refused keeps nothing open
            if isinstance(journal, Journal):
                refused.callback(journal.close_unused)
            check_sampling(sampling)
            # A journal records plain integers, and these may be integers of numpy.
            group_size = check_integer("group_size", group_size)
            concurrency = check_integer("concurrency", concurrency)
            rule = "pass the number of groups after which a run without a success stops, or 0 to run on"
            stop_after = check_integer("stop_after_failed_groups", stop_after_failed_groups, least=0, rule=rule)
            call = getattr(skip_group, "__call__", None)  # noqa: B004  of an object, which may be async too
            is_async = iscoroutinefunction(skip_group) or iscoroutinefunction(call)
            skips = skip_group is None or (callable(skip_group) and not is_async)
            scores = score_episode is None or callable(score_episode)
            rewards: Any = group_rewards
            are_rewards = isinstance(rewards, Sequence) and all(isinstance(one, GroupReward) for one in rewards)
            is_pool = isinstance(workers, WorkerPool | None)
            of_workers = "pass None: with workers=... it is the workers that have one"
            for name, value, is_valid, rule in (
                ("seed", seed, whole_number(seed) is not None, "pass an integer"),
                ("limits", limits, isinstance(limits, EpisodeLimits), "pass EpisodeLimits(...)"),
                ("retry", retry, isinstance(retry, RetryPolicy), "pass RetryPolicy(...)"),
                ("mode", mode, has_members(mode, Mode), "pass Synchronous(), OneStepOffPolicy() or Asynchronous(...)"),
                ("skip_group", skip_group, skips, "pass a function of a Group that is not async, or None"),
                ("score_episode", score_episode, scores, "pass a function, or None"),
                ("journal", journal, isinstance(journal, Journal | None), "pass Journal.open(directory), or None"),
                ("group_rewards", rewards, are_rewards, "pass a list of GroupReward(name, weight, function)"),
                ("listeners", listeners, all(map(callable, listeners)), "pass a list of functions of an event"),
                ("workers", workers, is_pool, "pass a WorkerPool, such as RayWorkers(...), or None"),
                ("make_environment", make_environment, workers is None or make_environment is None, of_workers),
                ("renderer", renderer, workers is None or renderer is None, of_workers),
            ):
                if not is_valid:
                    raise ArgumentError(name, value, rule)
            check_names("group_rewards", group_rewards)
            seed = int(seed)
            self._resources = refused.enter_context(ExitStack())
            running: EpisodeWorker | WorkerPool
            if workers is None:
                running = EpisodeWorker(make_environment, engine, renderer)  # type: ignore[arg-type]  # None is refused
                self._resources.callback(running.release)
                self._capacity = Capacity(concurrency)
            else:
                if engine is not None:
                    check_engine(engine)
                running = workers
                self._capacity = Capacity(concurrency, lambda: workers.num_slots)
                self._resources.callback(workers.on_slots_changed(self._capacity.changed.set))
            self._workers = workers
            self._reporter = Reporter(listeners, limits)
            self._updates = WeightUpdates(engine, self._reporter, running.set_update)
            self._settings = GroupSettings(
                workers=running,
                sampling=sampling,
                limits=limits,
                group_size=group_size,
                retry=retry,
                seed=seed,
                group_rewards=tuple(group_rewards),
                capacity=self._capacity,
                history=self._updates.history,
                reporter=self._reporter,
                journal=journal,
                score_episode=score_episode,
            )
            self._mode = mode
            self._skip_group = skip_group
            self._first_groups = FirstGroups(stop_after)
            self._journal = journal
            self._resuming: asyncio.Task[None] | None = None
            self._left: ResumedRun | None = None  # of earlier processes, until a consumer asks for groups
            self._ids: set[str] = set()
            self._schedules: set[Schedule] = set()
            self._collected = None if tasks is None else self._new_schedule(tasks)
            self._ending: set[asyncio.Task[None]] = set()  # of streams that nobody refers to
            self._is_closed = False
            refused.pop_all()

    # Groups.

    def stream(self, tasks: Tasks) -> GroupStream:
        """An async iterator of the groups of `tasks`, as they finish.

        `tasks` is an iterable or async iterable, finite or not, of tasks with different ids. A task is taken from it
        when there is capacity for its group. Groups that the consumer has not asked for yet wait in memory, about as
        many as can run at once.

        A group counts as delivered when the consumer asks for the next one, or calls `acknowledge`. A consumer that is
        cancelled while it waits cancels the running episodes; asking for the next group begins them again. `aclose`, or
        the end of the runner, cancels them for good.

        Several streams share the capacity of the runner. Iterating raises `TaskSourceError`, after the groups of all
        earlier tasks, if `tasks` raises or yields something else or an id twice; `GroupFailedError`; `RolloutsError`
        where all of the first groups have failed, while another call waits for the same stream, and once the runner is
        closed; `WorkersClosedError`, each time,
        once the workers are closed and no finished group is left (`collect`: fewer than `count`). Raises
        `ArgumentError` where `tasks` is none of these.
        """
        return GroupStream(self, self._new_schedule(tasks))

    async def collect(self, count: int) -> list[Group]:
        """The next `count` groups of the runner's `tasks`, as they finish; fewer at the end of the tasks.

        The groups of the previous call count as delivered. A call that is cancelled cancels the running episodes; no
        group is lost, and the next call begins the episodes again. Raises as iterating over a `stream` does, and
        `ArgumentError` for a runner without `tasks`.
        """
        check_integer("count", count)
        if self._collected is None:
            raise ArgumentError("tasks", None, "make the Runner with tasks=... to collect their groups")
        return await self._next_groups(self._collected, count, Demand(waiting=count, batch=count))

    async def acknowledge(self, group: Group) -> None:
        """Count a group as delivered now: after a restart with the journal it is not delivered again."""
        for schedule in list(self._schedules):
            if await schedule.acknowledge(group):
                return
        if self._journal is not None:  # of a stream that has ended
            await self._journal.delivered(group.task.task_id)

    async def resume(self) -> None:
        """Read what earlier processes have recorded in the journal, which otherwise the first group does.

        Raises `JournalOfAnotherRunError` and the other errors of `Journal.resume`.
        """
        self._check_open()
        if self._journal is None:
            return
        if self._resuming is None:
            self._resuming = asyncio.ensure_future(self._read_journal(self._journal))
        # The journal is read to its end though a consumer that waits for it is cancelled.
        await asyncio.shield(self._resuming)

    async def group_of(self, task: Task, episodes: Sequence[Trajectory]) -> Group:
        """The group of episodes that an earlier process ran and stored, with the rewards that this runner gives it.

        There are `group_size` of them; `seconds` are those of the longest. The journal records nothing of the group.
        Raises `GroupFailedError` where a group reward fails.
        """
        await self.resume()
        assert len(episodes) == self._settings.group_size
        # How often each was begun is part of its id.
        attempts = [RecordedAttempt(attempt_of(each.episode_id), True, each) for each in episodes]
        run = GroupRun(task, self._settings, dict(enumerate(attempts)))
        return await run.make_group(max(each.seconds for each in episodes))

    @property
    def group_size(self) -> int:
        """The number of episodes of each task."""
        return self._settings.group_size

    # Weights.

    @property
    def versions(self) -> tuple[str, ...]:
        """The versions of the weights that were in use, the oldest first; the last is in use now.

        The argument `versions` of `rollouts.training.sample_staleness`.
        """
        return self._updates.history.versions

    async def update_weights(self, weights: Any, version: str, in_flight: InFlight = "abort") -> None:
        """Replace the weights of the engine, which takes weights, and drop what is too old then for the mode.

        `weights` is what the engine takes (a checkpoint directory, a mapping from names to tensors), `version` a name
        that this run has not used; versions are ordered by use. A runner that continues a journal knows the versions of
        the earlier processes, and may use the name of weights that are loaded again. Running requests end and continue
        from their tokens with the new weights ("abort"), finish first with the old ones ("wait"), or stay in the engine
        and continue with the new ones ("keep"). Episodes go on: a sample may have spans of several versions.

        Raises `ArgumentError`; `WeightUpdateError` if another update is under way, and what the engine raises: the
        weights of before are then in use, unless the text says otherwise. A cancelled call waits for the end of the
        update.
        """
        await self.resume()
        try:
            await self._updates.update(weights, version, in_flight)
        finally:
            # Also after an error or a cancellation: the engine may have the new weights all the same.
            if self._updates.history.current == version:
                if self._journal is not None:
                    await self._journal.uses_weights(version)
                for schedule in list(self._schedules):
                    await schedule.drop_stale(in_flight)

    # The run.

    def metrics(self) -> dict[str, float]:
        """The counts of this runner by name (`rollouts.observability.METRICS` has their units and meanings).

        A `rollouts.observability.RunMetrics` among the `listeners` counts more: times, rates, rewards, staleness.
        """
        return {
            **self._reporter.counts,
            **({} if self._workers is None else self._workers.metrics()),
            "groups_queued": sum(schedule.num_finished for schedule in self._schedules),
        }

    async def close(self) -> None:
        """Cancel what runs, and wait for it. A second call does nothing."""
        self._is_closed = True
        for schedule in list(self._schedules):
            await self._end(schedule)
        if self._ending:
            await asyncio.wait(self._ending)
        if self._resuming is not None:
            await asyncio.wait([self._resuming])
        self._resources.close()
        if self._journal is not None:
            await self._journal.close()

    async def __aenter__(self) -> Self:
        self._check_open()
        return self

    def __del__(self, _warn: Callable[..., None] = warnings.warn) -> None:  # at exit the module may be cleared already
        if self._has_begun and not self._is_closed:
            cure = "use `async with Runner(...) as runner:`, or call `await runner.close()`"
            _warn(f"a Runner that has begun groups was not closed; {cure}", ResourceWarning, source=self)

    def _check_open(self) -> None:
        if self._is_closed:
            raise RolloutsError("this Runner is closed; make another one, with the same journal to continue the run")

    def _new_schedule(self, tasks: Tasks) -> Schedule:
        journal = self._journal
        # With a journal, an id is that of one task for the whole run.
        ids = set() if journal is None else self._ids
        source = TaskSource(tasks, ids, lambda task_id: journal is not None and task_id in journal)
        schedule = Schedule(source, self._settings, self._mode, self._skip_group, self._first_groups)
        self._schedules.add(schedule)
        return schedule

    async def _next_groups(self, schedule: Schedule, count: int, demand: Demand) -> list[Group]:
        self._check_open()
        self._has_begun = True
        await self.resume()
        # Where `collect` can be called, evaluations that stream other tasks do not receive what it left.
        if self._left is not None and self._collected in (None, schedule):
            left, self._left = self._left, None
            schedule.resume(left.undelivered, left.unfinished)
        groups = await schedule.next_groups(count, demand)
        if not groups:
            self._check_open()  # it may have been closed in the meantime
        return groups

    async def _read_journal(self, journal: Journal) -> None:
        """Read what earlier processes left. `collect` gets their groups, without `tasks` the first stream."""
        left = await journal.resume({"group_size": self._settings.group_size, "seed": self._settings.seed})
        self._updates.history.restore(left.versions)
        await journal.uses_weights(self._updates.history.current)
        self._left = left

    async def _end(self, schedule: Schedule) -> None:
        await schedule.close()
        self._schedules.discard(schedule)
        stored, unfinished = schedule.take_left()
        if stored or unfinished:  # for the next consumer
            self._left = ResumedRun(undelivered=stored, unfinished=unfinished)

    def _abandon(self, schedule: Schedule) -> None:
        """`_end`, called on the event loop for a stream that nobody refers to."""
        if schedule in self._schedules:
            ending = asyncio.get_running_loop().create_task(self._end(schedule))
            # The event loop has only a weak reference to a task.
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)


class GroupStream(AsyncIterator[Group]):
    """The groups of a call of `Runner.stream`. A stream that is no longer referred to cancels its episodes."""

    def __init__(self, runner: Runner, schedule: Schedule) -> None:
        self._runner = runner
        self._schedule = schedule
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __anext__(self) -> Group:
        self._loop = asyncio.get_running_loop()
        groups = await self._runner._next_groups(self._schedule, 1, Demand(waiting=None, batch=None))
        if not groups:
            await self.aclose()
            raise StopAsyncIteration
        return groups[0]

    async def aclose(self) -> None:
        """Cancel the episodes of the stream, and wait for them. A second call does nothing."""
        await self._runner._end(self._schedule)

    def __del__(self) -> None:
        # The garbage collector may run this on any thread.
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._runner._abandon, self._schedule)
