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

from rollouts.episodes.error_kinds import error_kind
from rollouts.error_texts import describe_exception
from rollouts.errors import ArgumentError
from rollouts.numbers import finite_number
from rollouts.trajectory.tree import Trajectory
from rollouts.workers.episode_job import EpisodeJob
from rollouts.workers.episode_outcome import EpisodeFailure, EpisodeOutcome
from rollouts.workers.episode_worker import EpisodeWorker
from rollouts.workers.link.errors import OrchestratorLostError
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
from rollouts.workers.progress import Progress, ProgressObserver
from transport.link import (
    ClientKeys,
    LinkClient,
    LinkLimits,
    PeerLostError,
    UnacknowledgedError,
    UndecodableMessageError,
)

log = logging.getLogger("rollouts.workers")

#: Progress is sent at most so often, because a turn of an episode reports several times.
_PROGRESS_SECONDS: Final = 0.05
_FIRST_DELAY: Final = 0.2
_LONGEST_DELAY: Final = 10.0


def worker_name() -> str:
    """A name for this process: host, process id and a random part."""
    return f"{socket.gethostname()[:100]}-{os.getpid()}-{uuid.uuid4().hex[:6]}"


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
    name = name or worker_name()
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
        try:
            await connection.run()
            log.info("the run of the orchestrator at %s has ended", address)
            return
        except PeerLostError as error:
            reason = error.reason
        finally:
            await worker.cancel_all()
            await asyncio.to_thread(_close_link, client)
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
        self._announced = ""  # the episode whose job comes next
        self._jobs: dict[str, asyncio.Task[None]] = {}
        self._progress: list[Progress] = []
        self._flushing: asyncio.TimerHandle | None = None

    async def run(self) -> None:
        """Run jobs until the run has ended. Raises `PeerLostError` and `LinkRefusedError`."""
        await self._client.send_async(self._hello)
        self.is_connected = True
        log.info("connected to the orchestrator at %s", self._client.address)
        self._outbox = Outbox(self._client.send_async)
        try:
            await self._receive()
        except asyncio.CancelledError:
            self._outbox.put(WorkerLeaves())
            await self._outbox.flush()
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
                self._send_failure(self._announced, error)
                continue
            match message:
                case Announced(episode_id):
                    self._announced = episode_id
                case EpisodeJob():
                    self._begin(message)
                case CancelJob(episode_id):
                    if episode_id in self._jobs:
                        self._jobs[episode_id].cancel()
                case SetUpdate(in_flight):
                    self._worker.set_update(in_flight)
                case RunEnded():
                    return
                case _:
                    log.warning("a message of the orchestrator is ignored: it is a %s", type(message).__name__)

    def _begin(self, job: EpisodeJob) -> None:
        task = asyncio.ensure_future(self._run_job(job))
        self._jobs[job.episode_id] = task
        task.add_done_callback(lambda _: self._forget(job.episode_id, task))

    def _forget(self, episode_id: str, task: asyncio.Task[None]) -> None:
        if self._jobs.get(episode_id) is task:
            del self._jobs[episode_id]

    async def _run_job(self, job: EpisodeJob) -> None:
        outcome = await self._worker.run(job, ProgressObserver(job.episode_id, self._report))
        self._send_progress()
        self._outbox.put(Announced(job.episode_id))
        self._outbox.put(outcome, on_error=lambda error: self._send_failure(job.episode_id, error))

    def _send_failure(self, episode_id: str, error: Exception) -> None:
        """Send that an episode failed, whose job could not be read, or whose outcome could not be sent."""
        log.warning("episode %.80s: %s", episode_id, error)
        episode = Trajectory(episode_id)
        episode.error = describe_exception(error)
        episode.finish()
        failure = EpisodeFailure(type(error).__name__, str(error), error_kind(error))
        self._outbox.put(EpisodeOutcome(episode, failure))

    # Progress.

    def _report(self, progress: Progress) -> None:
        self._progress.append(progress)
        if self._flushing is None:
            self._flushing = asyncio.get_running_loop().call_later(_PROGRESS_SECONDS, self._send_progress)

    def _send_progress(self) -> None:
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None
        if self._progress:
            self._outbox.put(self._progress)
            self._progress = []


def _close_link(client: LinkClient) -> None:
    """Close, though an orchestrator that has just ended has not confirmed all that was sent to it."""
    with suppress(UnacknowledgedError):
        client.close()
