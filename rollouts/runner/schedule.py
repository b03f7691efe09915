"""Starts the groups of a source of tasks as mode and capacity allow, and keeps those that are finished for delivery."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final, TypeAlias, TypeGuard

import numpy as np

from rollouts.engines.protocol import InFlight
from rollouts.errors import RolloutsError, short_repr
from rollouts.runner.errors import GroupFailedError, TaskSourceError
from rollouts.runner.events import GroupDelivered, GroupFinished, GroupSkipped, GroupStale
from rollouts.runner.group import Group
from rollouts.runner.group_run import GroupRun, GroupSettings
from rollouts.runner.modes import Demand, Mode, is_dropped, sample_weight
from rollouts.runner.task_source import TaskSource
from rollouts.runner.version_history import oldest_place, staleness
from rollouts.workers.episode_worker import EpisodeWorker
from rollouts.workers.protocol import WorkersClosedError

log = logging.getLogger("rollouts.runner")

#: After so many groups that were dropped one after the other, a warning says so.
_MANY_DROPPED: Final = 10
#: As many for groups that `skip_group` has skipped.
_MANY_SKIPPED: Final = 100
#: Whether a finished group is skipped; text is the reason, under which it is counted.
SkipGroup: TypeAlias = Callable[[Group], bool | str]


@dataclass(slots=True, eq=False)
class FinishedGroup:
    """A group that waits for delivery. `run` is None for a group of an earlier process."""

    run: GroupRun | None
    group: Group


class FirstGroups:
    """Whether the `count` groups that a runner began first have failed in one way, before any episode succeeded.

    They are those that began first, and not those that ended first: a few tasks that fail at once would otherwise end a
    run whose other episodes take their time. With 0 nothing is checked.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._is_decided = count == 0
        self._first: set[GroupRun] = set()
        self._errors: list[str] = []

    def begin(self, run: GroupRun) -> None:
        """Count a group that begins."""
        if not self._is_decided and len(self._first) < self._count:
            self._first.add(run)

    def end(self, run: GroupRun, group: Group) -> RolloutsError | None:
        """The error that ends the run, once the last of the first groups has ended; None otherwise."""
        if self._is_decided or (run not in self._first and group.num_failed == len(group)):
            return None
        self._errors += [episode.error for episode in group.episodes]
        kinds = {error.partition(":")[0] for error in self._errors}
        differ = "" in kinds or len(kinds) > 1
        if not differ and len(self._errors) < self._count * len(group):
            return None
        self._is_decided = True
        self._first.clear()
        if differ:
            return None
        first = self._errors[0][:2000].rstrip(".?! ")
        return RolloutsError(
            f"the first groups failed: each of their {len(self._errors)} episodes ended with the same kind of error, "
            f"and no episode has succeeded. The first error: {first}. Correct the cause; to run on in spite of it, set "
            f"stop_after_failed_groups, which is {self._count}, to 0"
        )


class Schedule:
    """Runs groups for one consumer, which calls `next_groups`."""

    def __init__(
        self,
        source: TaskSource,
        settings: GroupSettings,
        mode: Mode,
        skip_group: SkipGroup | None,
        first_groups: FirstGroups,
    ) -> None:
        self._source = source
        self._settings = settings
        self._reporter = settings.reporter
        self._journal = settings.journal
        self._mode = mode
        self._skip_group = skip_group
        self._first_groups = first_groups
        self._demand = Demand()
        self._is_taking = False
        self._is_closed = False
        self._unacknowledged: list[Group] = []
        self._stored: deque[str] = deque()  # finished by an earlier process
        self._unfinished: deque[str] = deque()  # begun by an earlier process
        self._interrupted: deque[GroupRun] = deque()
        self._running: dict[GroupRun, asyncio.Task[None]] = {}
        self._finished: deque[FinishedGroup | Exception] = deque()
        self._dropped_in_a_row = 0  # groups that were too old, since one was delivered
        self._skipped_in_a_row = 0  # likewise, by `skip_group`
        self._source_error: TaskSourceError | None = None
        self._starting: asyncio.Task[None] | None = None
        self._lacks_workers = False  # whether groups are left that cannot be started: the workers are closed
        self._progress = asyncio.Event()  # set when `next_groups` may have something to return

    # The consumer.

    @property
    def num_finished(self) -> int:
        """Groups that wait for delivery."""
        return len(self._finished) + len(self._stored)

    def resume(self, stored: Iterable[str], unfinished: Iterable[str]) -> None:
        """Begin with what an earlier process left: ids of finished and of unfinished tasks."""
        self._stored.extend(stored)
        self._unfinished.extend(unfinished)

    def take_left(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Ids of the finished and the unfinished tasks that were resumed and not begun; this schedule forgets them."""
        left = tuple(self._stored), tuple(self._unfinished)
        self._stored.clear()
        self._unfinished.clear()
        return left

    async def next_groups(self, count: int, demand: Demand) -> list[Group]:
        """The next `count` groups, fewer at the end of the source. Those of the last call count as delivered.

        A call that is cancelled cancels the episodes that run; the next call begins them again. Raises
        `TaskSourceError` after the last group, `GroupFailedError`, and the error of `FirstGroups`. After any error the
        groups that were taken wait for delivery again.
        """
        if self._is_taking:
            raise RolloutsError(
                "another call waits for the next groups; await it first, or make a stream for each consumer: "
                "`runner.stream(tasks)`"
            )
        self._is_taking = True
        try:
            for group in list(self._unacknowledged):
                await self.acknowledge(group)
            taken = await self._take(count, demand)
        except asyncio.CancelledError:
            await self.interrupt()
            raise
        finally:
            self._is_taking = False
        groups = [self._deliver(finished) for finished in taken]
        self._unacknowledged += groups
        return groups

    async def acknowledge(self, group: Group) -> bool:
        """Count a group as delivered for good; False if it is not one that was returned last."""
        if not any(one is group for one in self._unacknowledged):
            return False
        if self._journal is not None:
            await self._journal.delivered(group.task.task_id)
        self._unacknowledged = [one for one in self._unacknowledged if one is not group]
        return True

    async def interrupt(self) -> None:
        """Cancel what runs. The next `next_groups` begins it again, without the episodes that have ended."""
        tasks = [*self._running.values()] + ([] if self._starting is None else [self._starting])
        self._starting = None
        for run in self._running:
            # Before the tasks are cancelled, which look at it to know why they are.
            run.is_interrupted = True
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def close(self) -> None:
        """Cancel what runs. From now on there is no next group."""
        self._is_closed = True
        await self.interrupt()
        self._progress.set()
        await self._source.close()

    async def drop_stale(self, in_flight: InFlight) -> None:
        """Drop running and finished groups that are too old, after an update of the weights. Their capacity is free."""
        for run, task in self._running.items():
            if in_flight == "wait":
                run.expect_no_older_tokens()
            age = staleness(self._settings.history, run.oldest_place())
            # Once: a second cancellation would interrupt the recording of the first.
            if is_dropped(self._mode, age) and run.dropped_for is None:
                run.dropped_for = age
                task.cancel()
        # Recording that one is dropped takes time, in which the consumer may receive others.
        while stale := next((one for one in self._finished if self._is_stale(one)), None):
            self._finished.remove(stale)
            self._settings.capacity.changed.set()
            await self._drop(stale.group.task.task_id, max(self._ages(stale)))
        self._progress.set()

    # Delivery.

    async def _take(self, count: int, demand: Demand) -> list[FinishedGroup]:
        taken: list[FinishedGroup] = []
        ended = False
        try:
            while True:
                if len(taken) < count and not ended:
                    waiting = None if demand.waiting is None else count - len(taken)
                    self._set_demand(replace(demand, waiting=waiting))
                    found = await self._next()
                    ended = found is None
                    if found is not None:
                        taken.append(found)
                elif stale := next(filter(self._is_stale, taken), None):  # the weights may have changed since
                    taken.remove(stale)
                    await self._drop(stale.group.task.task_id, max(self._ages(stale)))
                else:
                    break
            if not taken and self._source_error is not None:
                raise self._source_error
        except BaseException:
            # In front and in their order, so that the next call delivers them first.
            self._finished.extendleft(reversed(taken))
            raise
        finally:
            if demand.waiting is not None:
                self._set_demand(replace(demand, waiting=0))
        return taken

    def _deliver(self, finished: FinishedGroup) -> Group:
        """Count a group as received by the consumer; the group, with the weights of its samples."""
        self._dropped_in_a_row = self._skipped_in_a_row = 0
        group, of_episodes = finished.group, self._ages(finished)
        worst = max(of_episodes)
        if worst > self._mode.max_staleness:
            group = replace(group, sample_weights=np.array([sample_weight(self._mode, age) for age in of_episodes]))
            self._reporter.emit(GroupStale(group.task.task_id, worst, "downweight"))
        self._reporter.emit(GroupDelivered(group.task.task_id, worst))
        return group

    def _set_demand(self, demand: Demand) -> None:
        self._demand = demand
        self._settings.capacity.changed.set()

    async def _next(self) -> FinishedGroup | None:
        """The next finished group; None at the end. Raises a group's error, and `WorkersClosedError`."""
        while not self._is_closed:
            if self._stored and self._journal is not None:
                # Removed after it was read: a call that is cancelled meanwhile loses no group.
                group = await self._journal.group(self._stored[0])
                self._stored.popleft()
                if reason := self._skip_reason(group):  # its process was killed before it had recorded that
                    await self._skip(group.task.task_id, reason)
                    continue
                return FinishedGroup(None, group)
            if self._finished:
                found = self._finished.popleft()
                self._settings.capacity.changed.set()
                if isinstance(found, Exception):
                    raise found
                return found
            if self._starting is None:
                self._starting = asyncio.create_task(self._start_groups())
            elif self._starting.done() and not self._running:
                # Raises what has ended it, such as a journal that cannot be read.
                self._starting.result()
                if self._lacks_workers:
                    raise WorkersClosedError
                return None
            # Nothing was awaited since the checks above, so that no progress between is missed.
            self._progress.clear()
            await self._progress.wait()
        return None

    # Groups.

    async def _start_groups(self) -> None:
        """Start groups until there are no more tasks, or the workers are closed."""
        changed = self._settings.capacity.changed
        try:
            while True:
                while self._may_start():
                    run = await self._next_run()
                    age = staleness(self._settings.history, run.oldest_place())
                    if is_dropped(self._mode, age):  # it was interrupted, and the weights have changed since
                        await self._drop(run.task.task_id, age)
                        continue
                    # Another stream may have claimed the capacity while the task was awaited.
                    if not self._may_start():
                        self._interrupted.appendleft(run)
                        break
                    self._start(run)
                    await asyncio.sleep(0)  # what else is due on the event loop does not wait for all groups to begin
                workers = self._settings.workers
                if not isinstance(workers, EpisodeWorker) and workers.is_closed:
                    self._lacks_workers = True
                    return
                # Nothing was awaited since `_may_start`, so that no change between is missed.
                changed.clear()
                await changed.wait()
        except StopAsyncIteration:
            pass
        except TaskSourceError as error:
            self._source_error = error
        finally:
            self._progress.set()

    def _start(self, run: GroupRun) -> None:
        run.is_interrupted = False
        self._first_groups.begin(run)
        run.claim()
        task = asyncio.create_task(self._run_group(run))
        self._running[run] = task
        # A callback: a task that is cancelled before its first step does not come to a `finally`.
        task.add_done_callback(lambda _: self._end(run))

    def _may_start(self) -> bool:
        capacity = self._settings.capacity
        limit = self._mode.max_undelivered(self._demand)
        # A consumer that is slower than the groups does not fill the memory with them; nor does a group reward that is
        # slower than the episodes. One group more may be put together, so that episodes run while it is.
        max_finished = max(1, capacity.limit // self._settings.group_size)
        return (
            capacity.claimed < capacity.limit
            and capacity.claimed + capacity.waiting < 2 * capacity.limit
            and len(self._finished) < max_finished
            and len(self._finished) + capacity.assembling <= max_finished
            and (limit is None or len(self._running) + len(self._finished) < limit)
        )

    async def _next_run(self) -> GroupRun:
        """The next group to be started. Raises `StopAsyncIteration` and `TaskSourceError`."""
        if self._interrupted:
            return self._interrupted.popleft()
        if self._unfinished and self._journal is not None:
            # Removed after it was read: a start that is cancelled meanwhile loses no task.
            task, recorded = await self._journal.task(self._unfinished[0])
            self._unfinished.popleft()
            return GroupRun(task, self._settings, recorded)
        if self._source_error is not None:
            raise self._source_error
        return GroupRun(await self._source.next(), self._settings)

    async def _run_group(self, run: GroupRun) -> None:
        task_id = run.task.task_id
        try:
            if self._journal is not None:
                await self._journal.started(run.task)
            group = await run.run()
            run.is_over = True
            self._reporter.emit(
                GroupFinished(
                    task_id,
                    group.rewards,
                    group.environment_rewards,
                    group.group_rewards,
                    group.reward_parts,
                    group.seconds,
                )
            )
            reason = self._skip_reason(group)
            if reason:
                await self._skip(task_id, reason)
            else:
                self._finished.append(FinishedGroup(run, group))
            if failure := self._first_groups.end(run, group):
                self._finished.append(failure)
        # These end the program, and not the group alone.
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # raised by `next_groups`: a group must not be lost, whatever ends its task
            if isinstance(error, asyncio.CancelledError):
                if run.dropped_for is not None and not run.is_over:
                    run.is_over = True
                    await self._drop(task_id, run.dropped_for)
                    return
                if run.is_interrupted or run.is_over:
                    raise
            if not isinstance(error, Exception):
                group_failure = GroupFailedError(task_id, run.ended_episodes, "running the group", error)
                group_failure.__cause__ = error
                error = group_failure
            self._finished.append(error)
            run.is_over = True

    def _end(self, run: GroupRun) -> None:
        del self._running[run]
        run.release()
        if not run.is_over:
            self._interrupted.append(run)
        self._progress.set()

    def _skip_reason(self, group: Group) -> str:
        """Why a group is skipped; empty if it is not. Raises `GroupFailedError`."""
        if self._skip_group is None:
            return ""
        try:
            reason: object = self._skip_group(group)
            if isinstance(reason, str):
                return reason
            if reason is None or isinstance(reason, bool | np.bool_):
                return "skipped" if reason else ""
            raise TypeError(f"it returned {short_repr(reason)}; return True, False, None or a reason")
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a function of a user may raise anything, CancelledError too
            raise GroupFailedError(group.task.task_id, group.episodes, "skip_group", error) from error

    async def _skip(self, task_id: str, reason: str) -> None:
        self._reporter.emit(GroupSkipped(task_id, reason))
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row == _MANY_SKIPPED:
            log.warning(
                "skip_group has skipped the last %d groups, the latest for %.80r; a consumer waits until one is not "
                "skipped, or the tasks have ended",
                _MANY_SKIPPED,
                reason,
            )
        if self._journal is not None:
            await self._journal.discarded(task_id, reason)

    def _ages(self, finished: FinishedGroup) -> list[int]:
        history, run = self._settings.history, finished.run
        if run is not None:
            places = run.places()
        else:  # tokens of an earlier process without a version count as sampled at the start of this one
            places = [oldest_place(episode, history, 0) for episode in finished.group.episodes]
        return [staleness(history, place) for place in places]

    def _is_stale(self, finished: FinishedGroup | Exception) -> TypeGuard[FinishedGroup]:
        return isinstance(finished, FinishedGroup) and is_dropped(self._mode, max(self._ages(finished)))

    async def _drop(self, task_id: str, age: int) -> None:
        self._reporter.emit(GroupStale(task_id, age, "drop"))
        self._dropped_in_a_row += 1
        if self._dropped_in_a_row == _MANY_DROPPED:
            log.warning(
                "the last %d groups were too old and were dropped, the latest by %d versions of the weights, where the "
                "mode allows %d. Take the groups with collect (all groups of a stream that run are as old as each "
                "other), update the weights less often, or pass Asynchronous(...) with a larger max_staleness or "
                "on_stale='downweight'; after a restart, begin with the weights of the last checkpoint",
                _MANY_DROPPED,
                age,
                self._mode.max_staleness,
            )
        if self._journal is not None:
            await self._journal.discarded(task_id, f"stale by {age} versions")
