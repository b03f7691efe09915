"""A worker's side: connects to an orchestrator, runs its jobs, and connects again when it is lost."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import socket
import time
import uuid
from contextlib import suppress
from typing import Final

from rollouts.episodes.errors import error_kind
from rollouts.errors import ArgumentError, exception_text
from rollouts.values import finite_number
from rollouts.workers.episode_worker import EpisodeFailure, EpisodeJob, EpisodeWorker
from rollouts.workers.link.keys import OrchestratorLostError
from rollouts.workers.link.link_workers import Outbox, close_link
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
from rollouts.workers.worker_pool import Progress, ProgressObserver
from transport.link import (
    ClientKeys,
    LinkClient,
    LinkLimits,
    PeerLostError,
    UndecodableMessageError,
)

log = logging.getLogger("rollouts.workers")

#: Progress is sent at most so often, because a turn of an episode reports several times.
_PROGRESS_SECONDS: Final = 0.05
#: For how long a worker that ends tries to tell its orchestrator.
_LEAVE_SECONDS: Final = 1.0
#: For how long the first attempt to connect lasts at least, whatever `wait_seconds` says.
_SHORTEST_ATTEMPT: Final = 1.0
_FIRST_DELAY: Final = 0.2
_LONGEST_DELAY: Final = 10.0


#: Less than a link allows: the number of the connection follows.
_MAX_NAME_BYTES: Final = 180


async def run_link_worker(
    worker: EpisodeWorker,
    address: str,
    *,
    keys: ClientKeys | None = None,
    name: str | None = None,
    wait_seconds: float = 300.0,
    configuration: str = "",
    limits: LinkLimits | None = None,
    heartbeat: float = 1.0,
    peer_timeout: float = 10.0,
) -> None:
    """Run the jobs of the orchestrator at `address` (`LinkWorkers`) until it says that the run has ended.

    If the orchestrator cannot be reached, or is lost, the episodes that run are cancelled, and the worker tries to
    connect for up to `wait_seconds` seconds from then on. Cancelling the call cancels the episodes and tells the
    orchestrator. `configuration` is compared with that of the orchestrator. The worker is not closed.

    Raises `OrchestratorLostError` after `wait_seconds`; `LinkRefusedError` for another version of mmrollouts or another
    configuration; `LinkAddressError`, `ArgumentError`.
    """
    seconds = finite_number(wait_seconds)
    if seconds is None or seconds < 0:
        raise ArgumentError("wait_seconds", wait_seconds, "pass a number of seconds, 0 or more")
    name = name or f"{socket.gethostname()[:100]}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
    if not name.isprintable() or len(name.encode("utf-8", "replace")) > _MAX_NAME_BYTES:
        raise ArgumentError("name", name, f"pass printable text of at most {_MAX_NAME_BYTES} bytes")
    lost_since, delay, connections = time.monotonic(), _FIRST_DELAY, 0
    while True:
        connections += 1
        client = LinkClient(
            address,
            name=f"{name}/{connections}",
            keys=keys,
            limits=limits,
            heartbeat=heartbeat,
            peer_timeout=peer_timeout,
            linger=1.0,
        )
        connection = _Connection(worker, client, configuration)
        left = seconds - (time.monotonic() - lost_since)
        try:
            await connection.run(max(left, _SHORTEST_ATTEMPT if connections == 1 else 0.0))
            log.info("the run of the orchestrator at %s has ended", address)
            return
        except PeerLostError as error:
            reason = error.reason
        finally:
            await worker.cancel_all()
            await asyncio.to_thread(close_link, client)
        if connection.is_connected:
            lost_since, delay = time.monotonic(), _FIRST_DELAY
            log.warning("the orchestrator at %s is lost (%s); connecting again", address, reason)
        left = seconds - (time.monotonic() - lost_since)
        if left <= 0:
            raise OrchestratorLostError(address, time.monotonic() - lost_since, reason)
        await asyncio.sleep(min(left, delay * random.uniform(0.5, 1.0)))  # noqa: S311  no secret depends on it
        delay = min(_LONGEST_DELAY, delay * 2)


class _Connection:
    """One connection to an orchestrator, and the jobs that came over it."""

    def __init__(self, worker: EpisodeWorker, client: LinkClient, configuration: str) -> None:
        self._worker = worker
        self._client = client
        self._hello = WorkerHello(own_version(), worker.slots, configuration)
        self.is_connected = False  # whether it was connected
        self._announced: int | None = None  # the number of the job that comes next
        self._jobs: dict[int, asyncio.Task[None]] = {}  # by number
        self._progress: list[Progress] = []
        self._flushing: asyncio.TimerHandle | None = None

    async def run(self, connect_seconds: float) -> None:
        """Connect within `connect_seconds`, and run jobs until the run has ended.

        Raises `PeerLostError` and `LinkRefusedError`.
        """
        try:
            async with asyncio.timeout(connect_seconds):
                await self._client.send_async(self._hello)
        except TimeoutError:
            raise PeerLostError(self._client.address, f"did not answer within {connect_seconds:.3g} s") from None
        self.is_connected = True
        log.info("connected to the orchestrator at %s", self._client.address)
        self._outbox = Outbox(self._client.send_async)
        try:
            await self._receive()
        except asyncio.CancelledError:
            self._outbox.put(WorkerLeaves())
            with suppress(TimeoutError):  # an orchestrator that does not read notices the end of the connection
                await asyncio.wait_for(self._outbox.flush(), _LEAVE_SECONDS)
            raise
        finally:
            if self._flushing is not None:
                self._flushing.cancel()
            for job in self._jobs.values():
                job.cancel()
            if self._jobs:
                await asyncio.wait(self._jobs.values())
            self._worker.set_update(None)
            await self._outbox.close()

    async def _receive(self) -> None:
        while True:
            try:
                message = (await self._client.recv_async()).obj
            except UndecodableMessageError as error:
                if self._announced is None:
                    log.warning("a message of the orchestrator is ignored: %s", error)
                else:
                    self._send_failure(self._announced, error)
                self._announced = None
                continue
            number, self._announced = self._announced, None
            match message:
                case Announced(job):
                    self._announced = job
                case EpisodeJob() if number is not None:
                    self._begin(number, message)
                case CancelJob(job):
                    if job in self._jobs:
                        self._jobs[job].cancel()
                case SetUpdate(in_flight):
                    self._worker.set_update(in_flight)
                case RunEnded():
                    return
                case _:
                    log.warning("a message of the orchestrator is ignored: it is a %s", type(message).__name__)

    def _begin(self, number: int, job: EpisodeJob) -> None:
        task = self._jobs[number] = asyncio.ensure_future(self._run_job(number, job))
        task.add_done_callback(lambda _: self._jobs.pop(number, None))

    async def _run_job(self, number: int, job: EpisodeJob) -> None:
        outcome = await self._worker.run(job, ProgressObserver(number, self._report))
        self._send_progress()
        self._outbox.put(Announced(number))
        self._outbox.put(outcome, on_error=lambda error: self._send_failure(number, error))

    def _send_failure(self, number: int, error: Exception) -> None:
        """Send that a job failed, which could not be decoded, or whose outcome could not be sent."""
        log.warning("job %d: %s", number, error)
        failure = EpisodeFailure(type(error).__name__, exception_text(error), error_kind(error))
        self._outbox.put(JobFailed(number, failure))

    # Progress.

    def _report(self, progress: Progress) -> None:
        self._progress.append(progress)
        if self._flushing is None:
            self._flushing = asyncio.get_running_loop().call_later(_PROGRESS_SECONDS, self._send_due_progress)

    def _send_due_progress(self) -> None:
        """Send the progress, unless the orchestrator reads slowly: then all of it is one message, when it has read."""
        self._flushing = None
        if self._outbox.is_empty:
            self._send_progress()
        else:
            self._flushing = asyncio.get_running_loop().call_later(_PROGRESS_SECONDS, self._send_due_progress)

    def _send_progress(self) -> None:
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None
        if self._progress:
            self._outbox.put(self._progress)
            self._progress = []
