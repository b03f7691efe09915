"""The blob table of a message that is being encoded: one row per array, tensor and media source.

The data of a small array stand in its row. The data of a large array, of a large tensor and of a media source become a
frame of the message.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import numpy.typing as npt

from renderers.media.item import MediaSource
from transport.errors import NotEncodableError, quoted
from transport.wire import wire_format
from transport.wire.arrays import Bytes, array_bytes, describe_dtype, tensor_parts, vector_code

OmitMedia: TypeAlias = Callable[[MediaSource], bool]

_SHA256: Final = re.compile(r"[0-9a-f]{64}")


class BlobTable:
    """The rows and the frames. Every object is added once, however often a message refers to it."""

    def __init__(self, omit_media: OmitMedia) -> None:
        self.rows: list[list[object]] = []
        self.frames: list[wire_format.Buffer] = []
        self.numbers: dict[int | str, int] = {}  # of rows, by id() of an array or tensor, by digest of a media source
        self._omit_media = omit_media
        self._alive: list[object] = []  # the owners of these id(): another object could get the id() of a freed one

    def add_array(self, array: npt.NDArray[Any]) -> int:
        """The number of the array's row. Raises `NotEncodableError`."""
        number = self.numbers.get(id(array))
        if number is not None:
            return number
        code = vector_code(array)
        if code is None or array.nbytes > wire_format.MAX_INLINE_BYTES:
            description: list[object] = [wire_format.BLOB_ARRAY, describe_dtype(array.dtype), list(array.shape)]
            return self._add_data(array, description, array_bytes(array))
        self._alive.append(array)
        return self._add_row(id(array), [code, array.tobytes()])

    def add_tensor(self, tensor: Any) -> int:
        """The number of the tensor's row. Raises `NotEncodableError`."""
        number = self.numbers.get(id(tensor))
        if number is not None:
            return number
        name, shape, data = tensor_parts(tensor)
        return self._add_data(tensor, [wire_format.BLOB_TENSOR, name, shape], data)

    def add_media(self, source: MediaSource) -> int:
        """The number of the media source's row. Raises `NotEncodableError` for a digest that is not a sha256."""
        number = self.numbers.get(source.digest)
        if number is not None:
            return number
        if not _SHA256.fullmatch(source.digest):
            raise NotEncodableError(
                f"media digest {quoted(source.digest)} is not a sha256", "Use MediaSource.of(data)."
            )
        if self._omit_media(source):
            return self._add_row(source.digest, [wire_format.BLOB_OMITTED, source.digest])
        self.frames.append(source.data)
        return self._add_row(source.digest, [wire_format.BLOB_MEDIA, source.digest])

    def _add_data(self, owner: object, description: list[object], data: Bytes) -> int:
        self._alive.append(owner)
        if data.nbytes <= wire_format.MAX_INLINE_BYTES:
            return self._add_row(id(owner), [*description, data.tobytes()])
        self.frames.append(data.data)
        return self._add_row(id(owner), description)

    def _add_row(self, key: int | str, row: list[object]) -> int:
        number = self.numbers[key] = len(self.rows)
        self.rows.append(row)
        return number
