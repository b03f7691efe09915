"""The orchestrator's side: workers that connect, leave and are lost, as `Workers` of a runner."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from types import TracebackType
from typing import Final, Self

from rollouts.engines.protocol import InFlight
from rollouts.errors import RolloutsError
from rollouts.workers.episode_worker import EpisodeJob, EpisodeOutcome
from rollouts.workers.link.messages import (
    Announced,
    CancelJob,
    JobFailed,
    RunEnded,
    SetUpdate,
    WorkerHello,
    WorkerLeaves,
    own_version,
)
from rollouts.workers.protocol import JobObserver, WorkerGoneError
from rollouts.workers.worker_pool import JobTurn, JobWaiting, WorkerPool
from transport import EncodeError
from transport.link import (
    Delivery,
    LinkClient,
    LinkClosedError,
    LinkLimits,
    LinkRefusedError,
    LinkServer,
    MessageTooLargeError,
    PeerConnected,
    PeerLost,
    PeerLostError,
    ServerKeys,
    UnacknowledgedError,
    UndecodableMessageError,
)

log = logging.getLogger("rollouts.workers")

#: Called with the error of a message that cannot be sent; the link stays usable.
OnError = Callable[[Exception], object]


class Outbox:
    """Messages to one peer. They are dropped when its connection has ended: what waits for their effect learns of that
    by other means.
    """

    def __init__(self, send: Callable[[object], Awaitable[None]]) -> None:
        self._send = send
        self._messages: asyncio.Queue[tuple[object, OnError | None]] = asyncio.Queue()
        self._sending = asyncio.ensure_future(self._run())

    @property
    def is_empty(self) -> bool:
        """Whether no message waits. One that was put before may be waiting for room in the queue of the link."""
        return self._messages.empty()

    def put(self, message: object, on_error: OnError | None = None) -> None:
        """Send a message after those before it. One that cannot be encoded, or is too large, is dropped.

        `on_error` is then called; without it the error is logged.
        """
        self._messages.put_nowait((message, on_error))

    async def flush(self) -> None:
        """Wait until what was put has been given to the link, or the connection has ended."""
        joining = asyncio.ensure_future(self._messages.join())
        try:
            await asyncio.wait([joining, self._sending], return_when=asyncio.FIRST_COMPLETED)
        finally:
            joining.cancel()

    async def close(self) -> None:
        """Drop what was not sent."""
        self._sending.cancel()
        await asyncio.wait([self._sending])

    async def _run(self) -> None:
        while True:
            message, on_error = await self._messages.get()
            try:
                await self._send(message)
            except (PeerLostError, LinkRefusedError, LinkClosedError):
                return
            except (EncodeError, MessageTooLargeError, MemoryError) as error:
                if on_error is None:
                    log.warning("a %s is not sent: %s", type(message).__name__, error)
                else:
                    on_error(error)
            finally:
                self._messages.task_done()


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
        self._numbers = count()  # of jobs; none is used twice, so that no message can name another job
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
        """As `Workers.on_slots_changed`. Raises `RolloutsError` outside of the `async with` block."""
        if self._receiving is None:
            raise RolloutsError(
                "these LinkWorkers receive nothing yet; write `async with LinkWorkers(...) as workers:`"
            )
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
        await asyncio.to_thread(close_link, self._server)

    # What arrives.

    async def _receive(self) -> None:
        while True:
            try:
                match await self._server.recv_async():
                    case PeerConnected(peer):
                        self._linked[peer] = _LinkedWorker(self._server, peer, self._numbers)
                    case PeerLost(peer, reason):
                        await self._disconnected(peer, reason)
                    case Delivery(peer, message):
                        self._delivered(self._linked[peer], message)
            except UndecodableMessageError as error:
                self._cannot_decode(self._linked[error.peer], error)
            except LinkClosedError:
                return

    def _has_received(self, receiving: asyncio.Task[None]) -> None:
        """Nothing is received any more. Unless this was asked for, nothing waits for workers for ever."""
        if not receiving.cancelled() and not self._is_over:
            log.error("workers cannot be reached any more", exc_info=receiving.exception())
            self._ending = asyncio.ensure_future(super().close())

    async def _disconnected(self, peer: str, reason: str) -> None:
        await asyncio.sleep(0)  # outcomes that came before are returned by their calls, which are cancelled below
        worker = self._linked.pop(peer)
        worker.lose(reason)
        self.remove(peer, reason, is_lost=not worker.leaves)
        await worker.outbox.close()

    def _cannot_decode(self, worker: _LinkedWorker, error: UndecodableMessageError) -> None:
        number, worker.announced = worker.announced, None
        if number is None:
            self._refuse(worker.name, f"{error}; install one version of mmrollouts on both sides")
        else:
            worker.fail(
                number, RolloutsError(f"worker {worker.name:.80} sent an outcome that cannot be used: {error!s}")
            )

    def _delivered(self, worker: _LinkedWorker, message: object) -> None:
        number, worker.announced = worker.announced, None
        if isinstance(message, WorkerHello):
            self._greet(worker, message)
        elif isinstance(message, EpisodeOutcome) and number is not None:
            worker.end(number, message)
        elif isinstance(message, Announced):
            worker.announced = message.job
        elif isinstance(message, JobFailed):
            worker.end_without_outcome(message)
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


@dataclass(frozen=True, slots=True, eq=False)
class _SentJob:
    """A job that a worker has, or is sent."""

    job: EpisodeJob
    observer: JobObserver
    outcome: asyncio.Future[EpisodeOutcome]


class _LinkedWorker:
    """A `RemoteWorker` over a connection of the link."""

    def __init__(self, server: LinkServer, name: str, numbers: Iterator[int]) -> None:
        self.name = name
        self.leaves = False  # whether it has said that it ends
        self.announced: int | None = None  # the number of the job whose outcome comes next
        self.outbox = Outbox(lambda message: server.send_async(name, message))
        self._numbers = numbers
        self._jobs: dict[int, _SentJob] = {}  # by number
        self._gone = ""

    async def run(self, job: EpisodeJob, observer: JobObserver) -> EpisodeOutcome:
        if self._gone:
            raise WorkerGoneError(self.name, self._gone)
        number = next(self._numbers)
        sent = self._jobs[number] = _SentJob(job, observer, asyncio.get_running_loop().create_future())
        try:
            self.outbox.put(Announced(number))
            self.outbox.put(job, on_error=lambda error: self.fail(number, error))
            return await sent.outcome
        except asyncio.CancelledError:
            self.outbox.put(CancelJob(number))
            raise
        finally:
            del self._jobs[number]

    def set_update(self, in_flight: InFlight | None) -> None:
        self.outbox.put(SetUpdate(in_flight))

    def report(self, progress: list[JobWaiting | JobTurn]) -> None:
        """Pass on what jobs report that are still waited for."""
        for one in progress:
            if one.job in self._jobs:
                one.report(self._jobs[one.job].observer)

    def end(self, number: int, outcome: EpisodeOutcome) -> None:
        """A job has ended. One that is not waited for was cancelled meanwhile."""
        sent = self._jobs.get(number)
        if sent is None or sent.outcome.done():
            return
        if outcome.episode.episode_id == sent.job.episode_id:
            sent.outcome.set_result(outcome)
        else:
            reason = f"it is of episode {outcome.episode.episode_id:.80}, not of {sent.job.episode_id:.80}"
            self.fail(number, RolloutsError(f"worker {self.name:.80} sent an outcome that cannot be used: {reason}"))

    def end_without_outcome(self, message: JobFailed) -> None:
        """A job could not be decoded at the worker, or its outcome could not be sent."""
        sent = self._jobs.get(message.job)
        if sent is not None:
            episode = sent.job.failed_trajectory(f"{message.failure.error_type}: {message.failure.reason}")
            self.end(message.job, EpisodeOutcome(episode, message.failure))

    def lose(self, reason: str) -> None:
        """The connection has ended."""
        self._gone = reason
        for number in list(self._jobs):
            self.fail(number, WorkerGoneError(self.name, reason))

    def fail(self, number: int, error: Exception) -> None:
        """The call of a job raises `error`, where it still waits."""
        sent = self._jobs.get(number)
        if sent is not None and not sent.outcome.done():
            sent.outcome.set_exception(error)


def close_link(link: LinkServer | LinkClient) -> None:
    """Close, though a peer that has just ended has not confirmed all that was sent to it."""
    with suppress(UnacknowledgedError):
        link.close()
