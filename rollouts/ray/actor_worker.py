"""One actor of a cluster as a worker of a pool."""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

from ray.exceptions import RayError, RayTaskError

from rollouts.engines.protocol import InFlight
from rollouts.errors import RolloutsError
from rollouts.ray.cluster import loss_reason
from rollouts.ray.object_media import ObjectMedia, frames_and_media
from rollouts.ray.worker_actor import CallResult, ProgressReader
from rollouts.workers import EpisodeJob, EpisodeOutcome, JobObserver, WorkerGoneError
from transport import decode_frames


class ActorWorker:
    """A `RemoteWorker` over a handle of a `WorkerActor` that has started.

    `media` are those of this process; of an outcome only the media that are not among them are fetched. `calls` has the
    numbers of the calls: an actor that could not be reached for a while must receive no number a second time.
    """

    def __init__(self, name: str, actor: Any, media: ObjectMedia, calls: Iterator[int]) -> None:
        self._name = name
        self._actor = actor
        self._media = media
        self._calls = calls
        self._readers: dict[int, ProgressReader] = {}
        self._released: list[int] = []
        self._loss: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def run(self, job: EpisodeJob, observer: JobObserver) -> EpisodeOutcome:
        """Run a job in the actor. Raises `WorkerGoneError`, and `RolloutsError` where it cannot be run."""
        call = next(self._calls)
        reader = self._readers[call] = ProgressReader(observer)
        try:
            return await self._run(call, job, reader)
        except asyncio.CancelledError:
            self._actor.cancel.remote(call)
            raise
        except RayTaskError as error:
            raise RolloutsError(f"worker {self._name:.80} could not run the episode: {error.cause!s}") from error
        except RayError as error:
            reason = loss_reason(error)
            if not self._loss.done():
                self._loss.set_result(reason)
            raise WorkerGoneError(self._name, reason) from error
        finally:
            del self._readers[call]
            self._released.append(call)

    async def watch(self) -> str:
        """Report the progress of the jobs until the actor is lost; why it was lost."""
        reporting = asyncio.ensure_future(self._report())
        try:
            await asyncio.wait([reporting, self._loss], return_when=asyncio.FIRST_COMPLETED)
            return self._loss.result() if self._loss.done() else reporting.result()
        finally:
            reporting.cancel()

    async def _report(self) -> str:
        while True:
            released, self._released = self._released, []
            try:
                batches = await self._actor.progress.remote(released)
            except RayError as error:
                return loss_reason(error)
            for call, batch in batches.items():
                reader = self._readers.get(call)
                if reader is not None:
                    reader.read(batch)

    def set_update(self, in_flight: InFlight | None) -> None:
        """Tell the actor that an update of the weights begins, or has ended (None)."""
        self._actor.set_update.remote(in_flight)

    async def _run(self, call: int, job: EpisodeJob, reader: ProgressReader) -> EpisodeOutcome:
        frames, sources = frames_and_media(job)
        result: CallResult = await self._actor.run.remote(call, frames, self._media.put(sources.values()))
        if result.progress is not None:
            reader.read(result.progress)
        if result.outcome is None:
            raise RolloutsError(
                f"worker {self._name:.80} could not run the episode: {result.error or 'it was cancelled there'}"
            )
        media = await self._media.receive(result.media, lambda digests: self._fetch(call, digests))
        outcome: EpisodeOutcome = decode_frames(result.outcome.frames, find_media=media.get)
        return outcome

    def _fetch(self, call: int, digests: Sequence[str]) -> Sequence[Any]:
        results = self._actor.media.options(num_returns=len(digests)).remote(call, list(digests))
        return [results] if len(digests) == 1 else list(results)
