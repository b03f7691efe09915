"""The frames of a message as a value in the object store of a cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pickle import PickleBuffer
from typing import Any

from renderers import MediaSource
from transport import encode_frames
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
