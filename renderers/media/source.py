"""The source bytes of an image or video, identified by their digest."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any, Self

from renderers.errors import MediaDecodeError, MediaDigestError

#: The first bytes of the forms for pixels that were not given as a file.
IMAGE_MAGIC = b"mmpx"
VIDEO_MAGIC = b"mmpv"


@dataclass(frozen=True, slots=True, weakref_slot=True)
class MediaSource:
    """Immutable source bytes and the sha256 (hex) of exactly those bytes.

    `data` is an encoded file (PNG, JPEG...) or the form that `renderers.media.raw` writes for pixels
    that were not given as a file. Two sources are equal when their digests are; the bytes are not compared. Raises
    `MediaDecodeError` for a memoryview that is not contiguous.
    """

    digest: str
    data: bytes | memoryview = field(repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_contiguous(self.data)

    @classmethod
    def of(cls, data: bytes | memoryview) -> Self:
        """The source of `data`, with its digest computed."""
        _check_contiguous(data)
        return cls(hashlib.sha256(data).hexdigest(), data)

    def __reduce__(self) -> tuple[Any, ...]:  # a memoryview, as decoding gives it, cannot be pickled
        return type(self), (self.digest, bytes(self.data))

    def verify(self) -> None:
        """Raise `MediaDigestError` unless the bytes hash to the digest."""
        actual = hashlib.sha256(self.data).hexdigest()
        if actual != self.digest:
            raise MediaDigestError(self.digest, actual)

    @property
    def is_pixels(self) -> bool:
        """Whether `data` has a form of `renderers.media.raw`."""
        return bytes(self.data[:4]) in (IMAGE_MAGIC, VIDEO_MAGIC)

    @property
    def nbytes(self) -> int:
        return memoryview(self.data).nbytes


def _check_contiguous(data: bytes | memoryview) -> None:
    if type(data) is memoryview and not data.c_contiguous:
        raise MediaDecodeError("the bytes of the medium are a memoryview that is not contiguous; pass bytes(view)")
