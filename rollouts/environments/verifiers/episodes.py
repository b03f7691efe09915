"""The tasks of verifiers environments, and one episode of them."""

from __future__ import annotations

from collections.abc import Iterator
from weakref import WeakKeyDictionary

from verifiers.v1.clients import ModelContext
from verifiers.v1.env import Env
from verifiers.v1.episode import Episode
from verifiers.v1.task import Task as VerifiersTask
from verifiers.v1.taskset import Taskset
from verifiers.v1.trace import Trace

from rollouts.environments.verifiers.client import EngineClient, EngineClientConfig, Rollout
from rollouts.episodes.activity import EpisodeActivity, EpisodeObserver
from rollouts.episodes.deadlines import EpisodeDeadlines
from rollouts.episodes.errors import EpisodeLimitError
from rollouts.episodes.turns import EpisodeSettings
from rollouts.errors import ArgumentError
from rollouts.task import Task


class VerifiersTasks:
    """The tasks of a verifiers environment as tasks of a `Runner`; iterating begins with the first one each time.

        async for group in runner.stream(VerifiersTasks(env)):
            ...

    The id of a task is its index in `env.taskset`, which is also its seed; its data has "index", and "id" and
    "name" where the taskset gives them. verifiers' tasks are loaded as they are needed, once for an
    environment, and kept.
    """

    def __init__(self, env: Env) -> None:
        known = _loaded_tasks.get(env)
        if known is None or known[0] is not env.taskset:
            known = _loaded_tasks[env] = (env.taskset, [], iter(env.taskset))
        _, self._loaded, self._loading = known

    def __iter__(self) -> Iterator[Task]:
        index = 0
        while self._load(index):
            data = self._loaded[index].data
            names = {name: value for name in ("id", "name") if (value := getattr(data, name, None)) is not None}
            yield Task(str(index), {"index": index, **names}, index)
            index += 1

    def verifiers_task(self, index: int) -> VerifiersTask:
        """The task of verifiers at an index. Raises `ArgumentError`."""
        if index < 0 or not self._load(index):
            raise ArgumentError("seed", index, "pass the index of a task of the environment's taskset")
        return self._loaded[index]

    def _load(self, index: int) -> bool:
        """Load the tasks up to an index; whether there is one at it."""
        while len(self._loaded) <= index and (task := next(self._loading, None)) is not None:
            self._loaded.append(task)
        return index < len(self._loaded)


#: The taskset of an environment, what is loaded of it, and the iterator of the rest.
_loaded_tasks: WeakKeyDictionary[Env, tuple[Taskset, list[VerifiersTask], Iterator[VerifiersTask]]] = (
    WeakKeyDictionary()
)


class EpisodeRun:
    """One episode of an environment, whose rollouts `client` records with `settings`. Made on its event loop."""

    def __init__(self, env: Env, client: EngineClient, settings: EpisodeSettings, observer: EpisodeObserver) -> None:
        self._env = env
        self._client = client
        self._settings = settings
        self._activity = EpisodeActivity(observer)
        self._deadlines = EpisodeDeadlines(settings.limits, settings.pauses)
        self._begun: list[Trace] = []
        self._episode: Episode | None = None
        self._passed: EpisodeLimitError | None = None  # the deadline that has ended it

    async def play(self, task: VerifiersTask, model: str) -> None:
        """Play it. A failure of a rollout is no exception; those of `Env.run_slot` are raised."""
        (slot,) = self._env.slots(task)
        context = ModelContext(model=model, client=self._client.config)
        self._activity.waits_for("environment.reset", 0)
        try:
            async with self._deadlines.scope:
                self._deadlines.begin_turn()
                self._episode = await self._env.run_slot(slot, context, on_trace=self._begin)
        except TimeoutError:
            self._passed = self._deadlines.passed(self._activity)
            if self._passed is None:
                raise

    def _begin(self, trace: Trace) -> None:
        self._begun.append(trace)
        self._client.begin(trace.id, self._settings, activity=self._activity, deadlines=self._deadlines)

    @property
    def is_complete(self) -> bool:
        """Whether the environment counts the episode as a valid result."""
        return self._episode is not None and self._env.complete(self._episode)

    def end(self, error: str) -> list[tuple[Trace, Rollout]]:
        """The rollouts with their outcome, forgotten by the client; `error` is why the episode failed."""
        episode = self._episode
        if not error and episode is not None and not episode.ok and episode.errors:
            error = f"{episode.errors[-1].type}: {episode.errors[-1].message}"
        rollouts = {trace.id: self._client.pop(trace.id) for trace in self._begun}
        traces = self._begun if episode is None else episode.traces  # without those that were discarded for a retry
        played = [trace for trace in traces if isinstance(trace.agent.config.client, EngineClientConfig)]
        for trace in played:
            rollout = rollouts[trace.id]
            rollout.limit = rollout.limit or self._passed
            rollout.record_outcome(trace)
            if error and (trace.ok or not trace.errors):
                rollout.trajectory.error, rollout.trajectory.done = error, False
        return [(trace, rollouts[trace.id]) for trace in played]
