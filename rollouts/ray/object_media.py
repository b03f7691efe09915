"""The media of a process that are in Ray's object store: one object for each digest.

A node of the cluster has at most one copy of an object. So an image of which all processes use the same object is at
most once on a node, however many episodes and groups show it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pickle import PickleBuffer
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import ray
from ray.exceptions import ObjectLostError

from renderers import MediaSource
from renderers.process.caches import ByteLRU
from rollouts.errors import RolloutsError
from rollouts.trajectory.tree import Trajectory
from transport import decode_frames, encode_frames
from transport.wire.wire_format import Buffer


class ObjectFrames:
    """The frames of a message, or the bytes of one medium, as a value that Ray stores.

    Ray pickles values with protocol 5 and keeps their buffers out of band: writing copies each frame once, into the
    store, and the frames that a reader gets are read-only views of the store's shared memory. The views keep the object
    in the store. A value that Ray sends inline, because it is small, has its frames in the memory of the process.
    """

    __slots__ = ("frames",)

    def __init__(self, frames: Sequence[Buffer]) -> None:
        self.frames = tuple(frames)

    def __reduce_ex__(self, protocol: Any) -> tuple[Callable[..., ObjectFrames], tuple[Any, ...]]:
        return _from_buffers, tuple(PickleBuffer(frame) for frame in self.frames)


def frames_and_media(value: object) -> tuple[ObjectFrames, dict[str, MediaSource]]:
    """An encoded value without its media, and these by their digest. Raises `EncodeError`."""
    media: dict[str, MediaSource] = {}

    def omit(source: MediaSource) -> bool:
        media[source.digest] = source
        return True

    return ObjectFrames(encode_frames(value, omit_media=omit)), media


def _from_buffers(*buffers: Any) -> ObjectFrames:
    # The objects that Ray returns have the buffer protocol alone.
    return ObjectFrames([memoryview(buffer).toreadonly() for buffer in buffers])


#: Requests the objects of media from the process that has them: a reference for each digest, in order.
FetchMedia = Callable[[Sequence[str]], Sequence[Any]]


class ObjectMedia:
    """Finds the source of a digest, and the object that holds its bytes.

    An object stays in the store as long as its source is used in this process, and up to `recent_bytes` of sources
    beyond that, the most recently used. One event loop uses an `ObjectMedia`.
    """

    def __init__(self, recent_bytes: int = 256 << 20) -> None:
        self._sources: WeakValueDictionary[str, MediaSource] = WeakValueDictionary()
        self._objects: WeakKeyDictionary[MediaSource, Any] = WeakKeyDictionary()
        self._recent: ByteLRU[str, MediaSource] = ByteLRU(recent_bytes)
        self._arriving: dict[str, asyncio.Future[None]] = {}

    def find(self, digest: str) -> MediaSource | None:
        """The source of a digest, if this process has it."""
        source = self._sources.get(digest)
        if source is not None:
            self._use(source)
        return source

    def put(self, sources: Iterable[MediaSource]) -> dict[str, Any]:
        """The object of each source, by digest. A source that is not in the store is written into it."""
        objects: dict[str, Any] = {}
        for source in sources:
            # The source of before, which has an object in the store already.
            known = self._sources.get(source.digest, source)
            found = self._objects.get(known)
            if found is None:
                found = ray.put(ObjectFrames([known.data]))
                self._add(known, found)
            self._use(known)
            objects[source.digest] = found
        return objects

    async def receive(self, digests: Iterable[str], fetch: FetchMedia) -> dict[str, MediaSource]:
        """The sources of `digests`; those that this process does not have are fetched, each of them once.

        What another call is fetching is waited for; if that call fails, it is fetched here. Raises what `fetch` and its
        objects raise, and `MediaError` for bytes with another digest.
        """
        wanted = list(dict.fromkeys(digests))
        found: dict[str, MediaSource] = {}
        while True:
            for digest in wanted:
                source = self.find(digest)
                if source is not None:
                    found[digest] = source
            missing = [digest for digest in wanted if digest not in found]
            if not missing:
                return found
            own = [digest for digest in missing if digest not in self._arriving]
            if own:
                found.update(await self._fetch(own, fetch))
            else:
                await asyncio.wait([self._arriving[digest] for digest in missing])

    async def _fetch(self, digests: Sequence[str], fetch: FetchMedia) -> dict[str, MediaSource]:
        arrived = asyncio.get_running_loop().create_future()
        self._arriving.update(dict.fromkeys(digests, arrived))
        try:
            objects = fetch(digests)
            values = await asyncio.gather(*objects)
            sources = [MediaSource(digest, value.frames[0]) for digest, value in zip(digests, values, strict=True)]
            await asyncio.to_thread(_verify, sources)
            for source, stored in zip(sources, objects, strict=True):
                self._add(source, stored)
            return {source.digest: source for source in sources}
        finally:
            for digest in digests:
                del self._arriving[digest]
            # Also after an error: those that wait look again, and fetch what is still missing.
            arrived.set_result(None)

    def _add(self, source: MediaSource, stored: Any) -> None:
        self._sources[source.digest] = source
        self._objects[source] = stored
        self._use(source)

    def _use(self, source: MediaSource) -> None:
        self._recent.put(source.digest, source, source.nbytes)


def _verify(sources: Sequence[MediaSource]) -> None:
    for source in sources:
        source.verify()


@dataclass(frozen=True, slots=True, eq=False)
class StoredEpisodes:
    """References to episodes in the object store: `frames` holds the episodes, `media` an object for each digest.

    Small, whatever the episodes hold: it may be an argument or a result of any task or actor of the cluster.
    """

    frames: Any
    media: Mapping[str, Any]
    num_episodes: int

    def load(self) -> list[Trajectory]:
        """The episodes. Blocks until this node has them.

        Large arrays and all media are views of the node's object store. Raises `RolloutsError` where the
        process that stored them has ended, and `DecodeError`.
        """
        try:
            message, *values = ray.get([self.frames, *self.media.values()])
        except ObjectLostError as error:
            raise RolloutsError(
                f"{self.num_episodes} stored episodes, or media of them, are no longer in the object store "
                f"({type(error).__name__}); the process that stored them must run until they have been loaded"
            ) from error
        found: dict[str, MediaSource] = {}
        for digest, value in zip(self.media, values, strict=True):
            found[digest] = MediaSource(digest, value.frames[0])
            found[digest].verify()
        episodes: list[Trajectory] = decode_frames(message.frames, find_media=found.get)
        return episodes


def store_episodes(episodes: Sequence[Trajectory], media: ObjectMedia) -> StoredEpisodes:
    """Write episodes into the object store, and of their media those that are not in it yet.

    `media` are the objects that this process has: `RayWorkers.media`, so that an image that came from a worker is not
    written again. They stay in the store while this process runs and uses the result. Raises `EncodeError`.
    """
    frames, sources = frames_and_media(list(episodes))
    return StoredEpisodes(ray.put(frames), media.put(sources.values()), len(episodes))
