"""The episodes of one task: started as there is capacity, repeated where that may help, and made into a group."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from types import MappingProxyType
from typing import TypeAlias

import numpy as np

from rollouts.calls import gathered
from rollouts.engines.protocol import SamplingParams
from rollouts.episodes.activity import Part, TurnFinished
from rollouts.episodes.errors import EpisodeError, ScoringError, ends_task, is_outage
from rollouts.episodes.limits import EpisodeLimits
from rollouts.episodes.turns import derived_seed
from rollouts.errors import describe_exception, short_repr, text_with_notes
from rollouts.rewards import GroupReward, reward_parts, score_group
from rollouts.runner.capacity import Capacity, Claims
from rollouts.runner.errors import GroupFailedError
from rollouts.runner.events import EpisodeEnded, EpisodeRetried, EpisodeStarted, EpisodeWaiting, Outcome
from rollouts.runner.group import Group
from rollouts.runner.journal import Journal
from rollouts.runner.journal_file import RecordedAttempt
from rollouts.runner.reporting import Reporter
from rollouts.runner.retries import FailedAttempts, RetryPolicy
from rollouts.runner.version_history import VersionHistory, oldest_place
from rollouts.task import Task
from rollouts.trajectory.tree import Trajectory
from rollouts.workers.episode_worker import EpisodeJob, EpisodeWorker
from rollouts.workers.protocol import JobObserver
from rollouts.workers.worker_pool import WorkerPool

#: Gets an episode that has ended without an error, and returns a copy of it with more extras or metrics.
ScoreEpisode: TypeAlias = Callable[[Trajectory], Awaitable[Trajectory]]


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """What the groups of a runner have in common. `workers` run their episodes: that of this process, or others."""

    workers: EpisodeWorker | WorkerPool
    sampling: SamplingParams
    limits: EpisodeLimits
    group_size: int
    retry: RetryPolicy
    seed: int
    group_rewards: Sequence[GroupReward]
    capacity: Capacity
    history: VersionHistory
    reporter: Reporter
    journal: Journal | None
    score_episode: ScoreEpisode | None = None


class Attempt(JobObserver):
    """One attempt at an episode: reports its events, and knows how old its tokens may be.

    `episode` grows with it.
    """

    def __init__(self, settings: GroupSettings, episode: Trajectory) -> None:
        self._reporter = settings.reporter
        self._history = settings.history
        self._episode = episode
        self.began = settings.history.current_place  # the place of the version in use at the start
        self._assigned: int | None = None  # of that in use when a worker of another process began
        self._requested: dict[object, int] = {}  # of those in use when the running requests were sent

    def assigned(self, worker: str) -> None:
        self.began = self._assigned = self._history.current_place  # no token is older

    @contextmanager
    def requesting(self) -> Iterator[None]:
        request = object()  # an environment may make several at once
        self._requested[request] = self._history.current_place
        try:
            yield
        finally:
            del self._requested[request]

    def waiting(self, turn: int, part: Part) -> None:
        if self._reporter.listeners:  # the most frequent event, which counts nothing
            self._reporter.emit(EpisodeWaiting(self._episode.episode_id, turn, part))

    def turn_finished(self, turn: TurnFinished) -> None:
        # The trajectories of the agents of verifiers have ids of their own, until the episode has ended.
        self._reporter.turn_finished(replace(turn, episode_id=self._episode.episode_id))

    def oldest_place(self) -> int | None:
        """The place of the oldest version that sampled a token.

        The tokens of a running request are not known yet; they count as sampled when it was sent. Those of an episode
        that runs in another process count as sampled when it began there.
        """
        sampled = oldest_place(self._episode, self._history, self.began)
        return _oldest([sampled, *self._requested.values(), self._assigned])

    def expect_no_older_tokens(self) -> None:
        """No running request has a token that is older than the version in use: they had to wait for an update."""
        self._requested.update(dict.fromkeys(self._requested, self._history.current_place))


class EpisodeRun:
    """One episode of a group, attempt after attempt. `recorded` is the last attempt of an earlier process."""

    def __init__(self, task: Task, index: int, settings: GroupSettings, recorded: RecordedAttempt | None) -> None:
        self.index = index
        self.attempts = 0
        self.ended: Trajectory | None = None  # after the final attempt
        self.running: Attempt | None = None
        self._task = task
        self._settings = settings
        self._began = settings.history.current_place  # as that of the attempt that has ended
        if recorded is not None:
            # The next attempt has a number, and so an id and a seed, that no earlier one had.
            self.attempts = recorded.attempt + 1
            self.ended = recorded.episode if recorded.final else None
        self.failures = FailedAttempts(settings.retry, self.attempts)

    def oldest_place(self) -> int | None:
        """The place of the oldest version that sampled a token, as far as the episode has come."""
        if self.running is not None:
            return self.running.oldest_place()
        return None if self.ended is None else oldest_place(self.ended, self._settings.history, self._began)

    async def attempt(self) -> tuple[Trajectory, BaseException | None]:
        """Run one attempt; the episode, and the exception that it failed with.

        One that is cancelled does not count.
        """
        settings, job = self._settings, self._job()
        reporter, workers = settings.reporter, settings.workers
        episode = job.new_trajectory()
        running = self.running = Attempt(settings, episode)
        reporter.emit(EpisodeStarted(job.episode_id, self._task.task_id, self.index, self.attempts))
        outcome: Outcome = "cancelled"
        failure: BaseException | None = None
        try:
            if isinstance(workers, EpisodeWorker):
                await workers.record(job, episode, running)
            else:
                reporter.emit(EpisodeWaiting(job.episode_id, 0, "worker"))
                episode = await workers.run(job, running)
            if settings.score_episode is not None:
                episode = await self._scored(settings.score_episode, episode)
            outcome = "done" if episode.done else "truncated"
        except EpisodeError as error:
            # The cause, because retries depend on what failed and not on the error around it.
            episode, outcome, failure = error.trajectory, "failed", error.__cause__ or error
        except ScoringError as error:
            episode = replace(episode, done=False, truncated=False, error=describe_exception(error))
            outcome, failure = "failed", error
        finally:
            self.running, self._began = None, running.began
            reporter.emit(
                EpisodeEnded(
                    job.episode_id,
                    outcome,
                    episode.reward,
                    episode.error,
                    episode.seconds,
                    episode.forks,
                    episode.length_stops,
                )
            )
        self.attempts += 1
        return episode, failure

    def _job(self) -> EpisodeJob:
        settings, task = self._settings, self._task
        seed = derived_seed(settings.seed, "environment", task.task_id) if task.seed is None else task.seed
        sampling_seed = derived_seed(settings.seed, "sampling", task.task_id, self.index, self.attempts)
        return EpisodeJob(
            episode_id=f"{task.task_id}/{self.index}.{self.attempts}",
            task=task,
            index=self.index,
            attempt=self.attempts,
            seed=seed,
            sampling=replace(settings.sampling, seed=sampling_seed),
            limits=settings.limits,
            group_id=task.task_id,
        )

    async def _scored(self, score_episode: ScoreEpisode, episode: Trajectory) -> Trajectory:
        """The episode with its scores, which `retry` repeats as it does episodes. Raises `ScoringError`.

        The episode keeps its slot meanwhile, so that not more of them wait for a teacher than run at once.
        """
        settings = self._settings
        failures = FailedAttempts(settings.retry, 0)
        for attempt in count(1):
            try:
                scored = await score_episode(episode)
                break
            except BaseException as error:  # a function of a user may raise anything
                if ends_task(error):
                    raise
                text = text_with_notes(error, describe_exception(error))
                if (delay := failures.delay(error, time.monotonic())) is None:
                    times = "" if attempt == 1 else f" {attempt} times"
                    raise ScoringError(f"score_episode failed{times}: {text}") from error
                settings.reporter.warn_of_score(episode.episode_id, error, text)
            settings.reporter.emit(EpisodeWaiting(episode.episode_id, episode.num_turns, "retry"))
            await asyncio.sleep(delay)
        if not isinstance(scored, Trajectory) or scored.episode_id != episode.episode_id:
            returned = short_repr(scored)
            raise ScoringError(f"score_episode returned {returned}; return the episode with its scores, as with_scores")
        return scored


class GroupRun:
    """Runs the episodes of a task. A `run` that was cancelled may be called again: it runs the episodes that are left.

    `recorded` are attempts of an earlier process.
    """

    def __init__(
        self, task: Task, settings: GroupSettings, recorded: Mapping[int, RecordedAttempt] = MappingProxyType({})
    ) -> None:
        self.task = task
        self.dropped_for: int | None = None  # the staleness for which the run was cancelled
        self.is_interrupted = False  # whether it was cancelled, to be begun again
        self.is_over = False  # whether nothing is left to do
        self._is_assembling = False  # whether it runs, and all its episodes have ended
        self._settings = settings
        self._episodes = [
            EpisodeRun(task, index, settings, recorded.get(index)) for index in range(settings.group_size)
        ]
        self._claims = Claims(settings.capacity)
        self._group: Group | None = None
        self._is_recorded = False
        self._started_at: float | None = None

    def claim(self) -> None:
        """Claim capacity for the episodes that are left, before `run`."""
        self._claims.add(len(self._left()))
        self._note_assembling()

    def release(self) -> None:
        """Give back the capacity that is still claimed, after `run`."""
        if self._is_assembling:
            self._is_assembling = False
            self._settings.capacity.assembling -= 1
        self._claims.release()

    def _left(self) -> list[EpisodeRun]:
        return [episode for episode in self._episodes if episode.ended is None]

    def _note_assembling(self) -> None:
        """If all episodes have ended, count the group as one of which rewards and record are left."""
        if not self._left():
            self._is_assembling = True
            self._settings.capacity.assembling += 1

    def oldest_place(self) -> int | None:
        """The place of the oldest version that sampled a token, in running episodes too."""
        return _oldest(self.places())

    def places(self) -> list[int | None]:
        """The place of the oldest version of each episode, as far as it has come."""
        return [episode.oldest_place() for episode in self._episodes]

    @property
    def ended_episodes(self) -> tuple[Trajectory, ...]:
        """The episodes that need no further attempt."""
        return tuple(episode.ended for episode in self._episodes if episode.ended is not None)

    def expect_no_older_tokens(self) -> None:
        """As `Attempt.expect_no_older_tokens`, of the attempts that run."""
        for episode in self._episodes:
            if episode.running is not None:
                episode.running.expect_no_older_tokens()

    async def run(self) -> Group:
        """Run the episodes, compute the rewards of the group and record it. Raises `GroupFailedError`."""
        if self._started_at is None:
            self._started_at = time.monotonic()
        await gathered(self._run_episode(run) for run in self._left())
        if self._group is None:
            self._group = await self.make_group(time.monotonic() - self._started_at)
        journal = self._settings.journal
        if journal is not None and not self._is_recorded:
            self._is_recorded = True  # a cancelled call of the journal is carried out nevertheless
            await journal.finished(self._group)
        return self._group

    async def _run_episode(self, run: EpisodeRun) -> None:
        settings = self._settings
        while run.ended is None:
            async with settings.capacity.slots:
                episode, error = await run.attempt()
            delay = None if error is None else run.failures.delay(error, time.monotonic())
            if delay is None:
                run.ended = episode
                self._note_assembling()
                if error is not None:
                    settings.reporter.log_failure(episode, error)
            # Before the journal, which may wait for the disk: another group can begin meanwhile.
            self._claims.release(1)
            if settings.journal is not None:
                await settings.journal.attempted(
                    self.task.task_id, run.index, run.attempts - 1, episode, final=delay is None
                )
            if delay is not None:
                if error is not None and is_outage(error):
                    settings.reporter.warn_of_outage(episode, settings.retry.outage_seconds)
                settings.reporter.emit(EpisodeRetried(episode.episode_id, episode.error, delay))
                settings.reporter.emit(EpisodeWaiting(episode.episode_id, episode.num_turns, "retry"))
                with self._claims.waiting():
                    await asyncio.sleep(delay)
                self._claims.add(1)

    async def make_group(self, seconds: float) -> Group:
        """The group, whose episodes have ended, all in `seconds`. Raises `GroupFailedError`."""
        settings, task_id = self._settings, self.task.task_id
        episodes = self.ended_episodes
        try:
            scores = await score_group(settings.group_rewards, f"the group of task {task_id!r:.80}", episodes)
        except BaseException as error:  # a reward of a user may raise anything
            if ends_task(error):
                raise
            raise GroupFailedError(task_id, episodes, "a group reward", error) from error
        environment_rewards = np.array([episode.reward for episode in episodes], np.float64)
        oldest = self.oldest_place()
        return Group(
            task=self.task,
            episodes=episodes,
            attempts=tuple(run.attempts for run in self._episodes),
            rewards=environment_rewards + scores.rewards,
            group_rewards=scores.rewards,
            reward_parts={**reward_parts(episodes), **scores.parts},
            oldest_version="" if oldest is None else settings.history.name_of(oldest),
            seconds=seconds,
        )


def _oldest(places: Sequence[int | None]) -> int | None:
    return min((place for place in places if place is not None), default=None)


def attempt_of(episode_id: str) -> int:
    """The attempt that an id names; 0 for an id of another form."""
    attempt = episode_id.rpartition(".")[2]
    return int(attempt) if attempt.isascii() and attempt.isdigit() else 0
