"""The workers of a runner as actors of a Ray cluster."""

import asyncio
import logging
from collections.abc import Iterable, Mapping
from functools import partial
from importlib.metadata import version
from itertools import count
from typing import Any, Final

import ray
from ray.exceptions import ActorUnavailableError, RayError

from rollouts.calls import StartAndClose
from rollouts.errors import ArgumentError, RolloutsError, describe_exception
from rollouts.ray.actor_worker import ActorWorker
from rollouts.ray.cluster import end_actor, loss_reason, require_connection
from rollouts.ray.object_media import ObjectMedia
from rollouts.ray.worker_actor import MakeEngine, MakeRenderer, StartedActor, WorkerActor
from rollouts.task import MakeEnvironment, check_make_environment
from rollouts.trajectory.tree import Trajectory
from rollouts.values import check_integer, check_positive
from rollouts.workers import EpisodeJob, JobObserver, WorkerPool, WorkersClosedError

log = logging.getLogger("rollouts.ray")

_RETRY_SECONDS: Final = 0.5  # until an actor that restarts is asked again
_STARTS: Final = 3  # failed starts in a row after which a worker is given up
_FIXED_OPTIONS: Final = frozenset({"max_concurrency", "max_task_retries", "concurrency_groups", "name", "lifetime"})


class RayWorkers(WorkerPool, StartAndClose):
    """Workers whose processes are actors: Ray places them, and starts them again when they or their node are lost.

        rollouts.ray.connect()
        workers = RayWorkers(make_environment, make_engine, make_renderer, num_workers=16, episodes_per_worker=32)
        async with workers, Runner(None, engine, None, sampling=sampling, workers=workers) as runner:
            ...

    The three functions are called in each actor: `make_environment(task)` for each episode, `make_engine()` and
    `make_renderer()`, `async` or not, when the actor starts. They, and what they refer to, must be importable on all
    nodes, or be defined in the program itself. An engine is usually one of URLs: `VLLMEngine`, or an `EngineFleet`.

    `actor_options` are those of Ray's `ActorClass.options`: `num_cpus` (1 by default), `num_gpus`, `resources`,
    `runtime_env`, `scheduling_strategy` ("SPREAD" by default), `max_restarts` (-1, without limit, by default)... An
    actor for which the cluster has no room waits until there is some, and an autoscaler sees that it waits; the run
    begins with the first actor that has started.

    An episode whose actor is lost runs again on another one, at most `max_losses` times. `media` finds the media that
    this process has in the object store, and is an argument of `store_episodes`.

    One event loop uses it. Raises `ArgumentError`.
    """

    def __init__(
        self,
        make_environment: MakeEnvironment,
        make_engine: MakeEngine,
        make_renderer: MakeRenderer,
        *,
        num_workers: int,
        episodes_per_worker: int = 64,
        actor_options: Mapping[str, Any] | None = None,
        max_losses: int = 3,
        start_seconds: float = 600.0,
    ) -> None:
        check_make_environment(make_environment)
        super().__init__(max_losses=max_losses)
        check_integer("num_workers", num_workers)
        check_integer("episodes_per_worker", episodes_per_worker)
        check_positive("start_seconds", start_seconds, "pass a number of seconds above 0")
        self.media = ObjectMedia()
        self._parts = (make_environment, make_engine, make_renderer, episodes_per_worker)
        self._slots = episodes_per_worker
        self._options = _actor_options(actor_options or {}, episodes_per_worker)
        self._start_seconds = start_seconds
        self._num_workers = num_workers
        self._numbers = count()
        self._calls = count()
        self._keepers: dict[str, asyncio.Task[None]] = {}  # by the name of the worker that each keeps running
        self._started: dict[str, StartedActor] = {}
        self._ending: set[asyncio.Task[None]] = set()  # keepers of workers that are no longer wanted
        self._last_failure: RolloutsError | None = None  # of a worker that was given up
        self._failure: RolloutsError | None = None
        self._changed = asyncio.Event()  # a worker has started, or none can
        self._is_over = False

    # The workers.

    async def start(self) -> None:
        """Make the actors, and return when one of them has started; a second call only waits.

        Raises `RolloutsError` where this process is not connected, and where a worker cannot be
        made or none has started after `start_seconds`, and `WorkersClosedError`.
        """
        if self._is_over:
            raise WorkersClosedError
        require_connection()
        while len(self._keepers) < self._num_workers:
            name = f"ray-{next(self._numbers)}"
            keeper = self._keepers[name] = asyncio.ensure_future(self._keep(name, self._new_actor(name)))
            keeper.add_done_callback(partial(self._has_kept, name))
        try:
            async with asyncio.timeout(self._start_seconds):
                await self._changed.wait()
        except TimeoutError:
            if self._last_failure is not None:
                raise self._last_failure from None
            free = {name: amount for name, amount in ray.available_resources().items() if ":" not in name}
            wanted = {
                name: self._options[name] for name in ("num_cpus", "num_gpus", "resources") if name in self._options
            }
            raise RolloutsError(
                f"worker {next(iter(self._keepers), '0'):.80} cannot be started: no worker has started after "
                f"{self._start_seconds:g} s; the cluster has {free} free; add nodes that have what "
                f"actor_options ask for ({wanted}), or ask for less"
            ) from None
        if self._failure is not None:
            raise self._failure

    @property
    def places(self) -> dict[str, tuple[str, int]]:
        """The node and the process of each worker that has started, by its name: the id of Ray's node, and the pid."""
        return {name: (started.node_id, started.pid) for name, started in self._started.items()}

    # The protocol of workers.

    @property
    def num_slots(self) -> int:
        """How many episodes can be at the workers that have started; of each worker, a few of them wait there.

        1 where no worker can be started: the runner then runs an episode, and receives the error.
        """
        return super().num_slots if self._failure is None else 1

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called; where no worker can be started, a runner gets the error instead."""
        return self._is_over

    async def run(self, job: EpisodeJob, observer: JobObserver) -> Trajectory:
        """Run an attempt on a worker; also raises `RolloutsError` where none can be started."""
        try:
            return await super().run(job, observer)
        except WorkersClosedError:
            if self._failure is not None:
                raise self._failure from None
            raise

    async def close(self) -> None:
        """Cancel what runs, and end the actors. A second call does nothing."""
        if self._is_over:
            return
        self._is_over = True
        self._end(list(self._keepers))
        await super().close()
        if self._ending:
            await asyncio.wait(self._ending)

    # Each worker is kept running by a task of its own.

    def _has_kept(self, name: str, keeper: asyncio.Task[None]) -> None:
        """The task of a worker has ended. One that failed is reported, and its worker is given up."""
        if not keeper.cancelled() and (error := keeper.exception()) is not None:
            log.error("worker %s is no longer kept running", name, exc_info=error)
            if name in self._keepers:
                self._give_up(name, describe_exception(error))

    def _end(self, names: Iterable[str]) -> None:
        for name in names:
            keeper = self._keepers.pop(name)
            self._ending.add(keeper)
            keeper.add_done_callback(self._ending.discard)
            keeper.cancel()

    def _new_actor(self, name: str) -> Any:
        try:
            return ray.remote(WorkerActor).options(**self._options).remote(*self._parts)
        except (TypeError, ValueError) as error:  # a function that cannot be pickled, an option that Ray does not have
            cure = "correct actor_options, or let the functions import and make in the actor what cannot be pickled"
            raise RolloutsError(f"worker {name:.80} cannot be started: {error!s}; {cure}") from error

    async def _keep(self, name: str, actor: Any) -> None:
        """Run a worker until it is no longer wanted, or cannot be started."""
        failures = 0
        try:
            while True:
                started, reason = await self._start_actor(actor)
                if started is not None and not reason:
                    failures = 0
                    await self._serve(name, actor, started)
                    continue
                failures += 1
                if started is None or failures == _STARTS:
                    self._give_up(name, reason)
                    return
                log.warning("worker %s did not start (%s) and is started again", name, reason)
                await asyncio.sleep(_RETRY_SECONDS * 2**failures)
        finally:
            self.remove(name, "it was removed", is_lost=False)
            await end_actor(actor, 3.0)  # a command that is interrupted ends after 4 s

    async def _serve(self, name: str, actor: Any, started: StartedActor) -> None:
        """Let a worker that has started run episodes until it is lost."""
        worker = ActorWorker(name, actor, self.media, self._calls)
        self._started[name] = started
        # Jobs that wait in the worker begin at once when an episode ends, before its result has arrived here.
        self.add(name, self._slots + _num_queued(self._slots), worker)
        self._changed.set()
        try:
            self.remove(name, await worker.watch())
        finally:
            del self._started[name]

    async def _start_actor(self, actor: Any) -> tuple[StartedActor | None, str]:
        """Start the worker of an actor, when the actor runs.

        Returns where it runs, None if it never will, and why the worker did not start, empty if it did.
        """
        while True:
            try:
                started: StartedActor = await actor.start.remote()
            except ActorUnavailableError:  # it is placed again, perhaps on another node
                await asyncio.sleep(_RETRY_SECONDS)
            except RayError as error:
                return None, loss_reason(error)
            else:
                own = version("mmrollouts")
                if started.version != own:
                    return None, f"its node has mmrollouts {started.version}, and this program {own}"
                return started, started.error

    def _give_up(self, name: str, reason: str) -> None:
        """A worker cannot be started: the others go on without it. Where it was the last one, no episode can run."""
        error = self._last_failure = RolloutsError(f"worker {name:.80} cannot be started: {reason}; {_cure(reason)}")
        log.error("%s", error)
        self._keepers.pop(name, None)
        if not self._keepers:
            self._failure = error
            self._changed.set()
            closing = asyncio.ensure_future(super().close())  # for the episodes that wait for a worker
            self._ending.add(closing)
            closing.add_done_callback(self._ending.discard)


def _cure(reason: str) -> str:
    if "ModuleNotFoundError" in reason:
        return (
            "the nodes must be able to import the modules of the functions: install them there, or send them with "
            'ray.init(runtime_env={"working_dir": ...}) or ray job submit --working-dir'
        )
    return "the log of the actor, in the directory of Ray's session, has more"


def _num_queued(episodes_per_worker: int) -> int:
    """The jobs that wait in a worker: one for each eight that run."""
    return max(1, episodes_per_worker // 8)


def _actor_options(options: Mapping[str, Any], episodes_per_worker: int) -> dict[str, Any]:
    fixed = sorted(_FIXED_OPTIONS & set(options))
    if fixed:
        raise ArgumentError("actor_options", fixed[0], "leave this option out; RayWorkers sets it")
    return {
        "num_cpus": 1,
        "max_restarts": -1,
        "scheduling_strategy": "SPREAD",
        **options,
        "max_task_retries": 0,  # the pool repeats jobs, and counts the losses
        # 64 calls beyond those of the episodes: media, progress, cancellations.
        "max_concurrency": episodes_per_worker + _num_queued(episodes_per_worker) + 64,
    }
