"""The orchestrator's side: workers that connect, leave and are lost, as `Workers` of a runner."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Final, Self

from rollouts.engines.protocol import InFlight
from rollouts.workers.episode_job import EpisodeJob
from rollouts.workers.episode_outcome import EpisodeOutcome
from rollouts.workers.errors import UnreadableOutcomeError, WorkerGoneError
from rollouts.workers.link.errors import WorkersNotStartedError
from rollouts.workers.link.messages import (
    Announced,
    CancelJob,
    RunEnded,
    SetUpdate,
    WorkerHello,
    WorkerLeaves,
    own_version,
)
from rollouts.workers.link.outbox import Outbox
from rollouts.workers.progress import JobTurn, JobWaiting
from rollouts.workers.protocol import JobObserver
from rollouts.workers.worker_pool import WorkerPool
from transport.link import (
    Delivery,
    LinkClosedError,
    LinkLimits,
    LinkServer,
    PeerConnected,
    PeerLost,
    ServerKeys,
    UnacknowledgedError,
    UndecodableMessageError,
)

log = logging.getLogger("rollouts.workers")

#: How many seconds `close` waits until the workers have what was sent to them.
_LINGER: Final = 1.0


class LinkWorkers(WorkerPool):
    """`Workers` that connect to `bind` (`rollouts worker --connect ADDRESS`), at any time while the run goes on.

        async with LinkWorkers("tcp://127.0.0.1:7100") as workers:
            async with Runner(None, engine, None, sampling=sampling, workers=workers) as runner:
                ...

    `address` is where workers connect: `bind` with the port that was free for `tcp://127.0.0.1:*`. Those that other
    machines can reach need `allow_remote=True` and `keys` (`rollouts keys`). Without keys every local user can connect.
    A worker with another version of mmrollouts is refused, and one with another `configuration` where both name one. A
    worker that has been silent for `peer_timeout` seconds is lost; its episodes run again on others, as `WorkerPool`
    describes. At the end of the block workers are told that the run has ended, except after an exception: then
    they wait for a while for another orchestrator.

    Raises `LinkAddressError` for an address that cannot be bound, and `ArgumentError`.
    """

    def __init__(
        self,
        bind: str = "tcp://127.0.0.1:*",
        *,
        keys: ServerKeys | None = None,
        allow_remote: bool = False,
        configuration: str = "",
        max_losses: int = 3,
        limits: LinkLimits | None = None,
        heartbeat: float = 1.0,
        peer_timeout: float = 10.0,
    ) -> None:
        super().__init__(max_losses=max_losses)
        self._configuration = configuration
        self._server = LinkServer(
            bind,
            keys=keys,
            allow_remote=allow_remote,
            limits=limits,
            heartbeat=heartbeat,
            peer_timeout=peer_timeout,
            linger=_LINGER,
        )
        self._linked: dict[str, _LinkedWorker] = {}
        self._receiving: asyncio.Task[None] | None = None
        self._is_over = False

    @property
    def address(self) -> str:
        """Where workers connect."""
        return self._server.address

    async def __aenter__(self) -> Self:
        self._receiving = asyncio.ensure_future(self._receive())
        self._receiving.add_done_callback(self._has_received)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close(run_ended=error is None)

    def on_slots_changed(self, listener: Callable[[], object]) -> Callable[[], None]:
        """As `Workers.on_slots_changed`. Raises `WorkersNotStartedError` outside of the `async with` block."""
        if self._receiving is None:
            raise WorkersNotStartedError
        return super().on_slots_changed(listener)

    async def close(self) -> None:
        """Cancel what runs, tell the workers that the run has ended, and close the link."""
        await self._close(run_ended=True)

    async def _close(self, *, run_ended: bool) -> None:
        if self._is_over:
            return
        self._is_over = True
        await super().close()
        linked = list(self._linked.values())  # while this waits, workers may leave
        if run_ended:
            for worker in linked:
                worker.outbox.put(RunEnded())
        if linked:
            # A worker that receives nothing any more is not waited for.
            await asyncio.wait([asyncio.ensure_future(worker.outbox.flush()) for worker in linked], timeout=_LINGER)
        if self._receiving is not None:
            self._receiving.cancel()
            await asyncio.wait([self._receiving])
        for worker in list(self._linked.values()):
            await worker.outbox.close()
        await asyncio.to_thread(_close_link, self._server)

    # What arrives.

    async def _receive(self) -> None:
        while True:
            try:
                match await self._server.recv_async():
                    case PeerConnected(peer):
                        self._linked[peer] = _LinkedWorker(self._server, peer)
                    case PeerLost(peer, reason):
                        await self._disconnected(peer, reason)
                    case Delivery(peer, message):
                        self._delivered(self._linked[peer], message)
            except UndecodableMessageError as error:
                self._linked[error.peer].cannot_decode(error)
            except LinkClosedError:
                return

    def _has_received(self, receiving: asyncio.Task[None]) -> None:
        """Nothing is received any more. Unless this was asked for, nothing waits for workers for ever."""
        if not receiving.cancelled() and not self._is_over:
            log.error("workers cannot be reached any more", exc_info=receiving.exception())
            self._ending = asyncio.ensure_future(super().close())

    async def _disconnected(self, peer: str, reason: str) -> None:
        worker = self._linked.pop(peer)
        worker.lose(reason)
        self.remove(peer, reason, is_lost=not worker.leaves)
        await worker.outbox.close()

    def _delivered(self, worker: _LinkedWorker, message: object) -> None:
        if isinstance(message, WorkerHello):
            self._greet(worker, message)
        elif isinstance(message, EpisodeOutcome):
            worker.end(message)
        elif isinstance(message, Announced):
            worker.announced = message.episode_id
        elif isinstance(message, list) and all(isinstance(one, JobWaiting | JobTurn) for one in message):
            worker.report(message)
        elif isinstance(message, WorkerLeaves):
            worker.leaves = True
            self.remove(worker.name, "it ends", is_lost=False)
        else:
            reason = f"it sent a {type(message).__name__}, which no worker sends; use `rollouts worker`"
            self._refuse(worker.name, reason)

    def _greet(self, worker: _LinkedWorker, hello: WorkerHello) -> None:
        own = own_version()
        if hello.version != own:
            reason = f"the worker has mmrollouts {hello.version}, the orchestrator {own}; install one version on both"
            self._refuse(worker.name, reason)
        elif self._configuration and hello.configuration and hello.configuration != self._configuration:
            reason = "its configuration differs from that of the run; give both the same file, or correct its copy"
            self._refuse(worker.name, reason)
        elif worker.name not in self.names and not self._is_over:
            log.info("worker %.80s is there, with %d slots", worker.name, hello.slots)
            self.add(worker.name, hello.slots, worker)

    def _refuse(self, peer: str, reason: str) -> None:
        log.warning("worker %.80s is refused: %s", peer, reason)
        self._server.refuse_peer(peer, reason)


class _LinkedWorker:
    """A `RemoteWorker` over a connection of the link."""

    def __init__(self, server: LinkServer, name: str) -> None:
        self.name = name
        self.leaves = False  # whether it has said that it ends
        self.announced = ""  # the episode whose outcome comes next
        self.outbox = Outbox(lambda message: server.send_async(name, message))
        self._jobs: dict[str, tuple[asyncio.Future[EpisodeOutcome], JobObserver]] = {}
        self._gone = ""

    async def run(self, job: EpisodeJob, observer: JobObserver) -> EpisodeOutcome:
        if self._gone:
            raise WorkerGoneError(self.name, self._gone)
        outcome: asyncio.Future[EpisodeOutcome] = asyncio.get_running_loop().create_future()
        self._jobs[job.episode_id] = (outcome, observer)
        try:
            self.outbox.put(Announced(job.episode_id))
            self.outbox.put(job, on_error=lambda error: self._fail(job.episode_id, error))
            return await outcome
        except asyncio.CancelledError:
            self.outbox.put(CancelJob(job.episode_id))
            raise
        finally:
            del self._jobs[job.episode_id]

    def set_update(self, in_flight: InFlight | None) -> None:
        self.outbox.put(SetUpdate(in_flight))

    def report(self, progress: list[JobWaiting | JobTurn]) -> None:
        """Pass on what episodes report that are still waited for."""
        for one in progress:
            if one.episode_id in self._jobs:
                one.report(self._jobs[one.episode_id][1])

    def end(self, outcome: EpisodeOutcome) -> None:
        """An episode has ended. One that is not waited for was cancelled meanwhile."""
        waiting = self._jobs.get(outcome.episode.episode_id)
        if waiting is not None and not waiting[0].done():
            waiting[0].set_result(outcome)

    def cannot_decode(self, error: UndecodableMessageError) -> None:
        """The outcome that was announced last cannot be decoded."""
        self._fail(self.announced, UnreadableOutcomeError(self.name, str(error)))

    def lose(self, reason: str) -> None:
        """The connection has ended."""
        self._gone = reason
        for episode_id in list(self._jobs):
            self._fail(episode_id, WorkerGoneError(self.name, reason))

    def _fail(self, episode_id: str, error: Exception) -> None:
        waiting = self._jobs.get(episode_id)
        if waiting is not None and not waiting[0].done():
            waiting[0].set_exception(error)


def _close_link(server: LinkServer) -> None:
    """Close, though a worker that has just ended has not confirmed all that was sent to it."""
    with suppress(UnacknowledgedError):
        server.close()
