"""Objects to bytes and back: as one run of bytes, or as frames for a transport that sends several buffers at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgpack

from renderers.media.source import MediaSource
from transport.errors import EncodeError
from transport.wire import container
from transport.wire.limits import DecodeLimits
from transport.wire.locating import steps_into
from transport.wire.packing import OmitMedia, pack
from transport.wire.unpacking import FindMedia, unpack
from transport.wire.wire_format import Buffer

_DEFAULT_LIMITS = DecodeLimits()

#: `check_encodable` leaves room for so many objects around the value, and for as many lists.
_ENCLOSING = 8

#: How far into a value `check_encodable` goes to say where the trouble is.
_LONGEST_PATH = 32


def _omit_none(source: MediaSource) -> bool:
    return False


def _nothing_found(digest: str) -> MediaSource | None:
    return None


def encode_frames(obj: object, *, omit_media: OmitMedia = _omit_none) -> list[Buffer]:
    """`obj` as a header frame and one frame per media source and per array or tensor of more than 1024 bytes.

    Supported: None, bool, int, float, complex, Decimal, str, bytes, UUID, paths, dates, times, datetimes, timedeltas,
    fixed and named time zones, list, tuple, set and frozenset of plain values, dict with plain keys, numpy arrays and
    scalars of every dtype without Python objects (structured ones without titles), torch tensors, `MediaSource`, and
    dataclasses, pydantic models and enums registered with `wire_type`; nested as you like, without cycles. bytearray
    and memoryview come back as bytes, a path of this machine's kind as a path of the receiver's. Exact types only: a
    subclass of str or dict is an `EncodeError`, not a str or dict at the far end.

    A frame of a C-contiguous array shares the array's memory, so send it before changing the array; other layouts are
    copied once, and smaller arrays into the header. A media source and an array object are sent once however often they
    are referred to, and a registered object that is referred to twice is one object after decoding, too.

    `omit_media(source)` is called once per media source; the bytes of a source for which it returns True are left out,
    and the receiver's `find_media` must supply them. Raises `EncodeError`, which says where in `obj` the trouble is.
    """
    header, frames = pack(obj, omit_media)
    return [b"".join(header), *frames]


def decode_frames(
    frames: Sequence[Buffer], *, limits: DecodeLimits = _DEFAULT_LIMITS, find_media: FindMedia = _nothing_found
) -> Any:
    """The object that `encode_frames` was given.

    Arrays are read-only: views on the frames, which they keep alive, or if they came in the header on a few bytes of
    their own. Tensors are copied, torch having no read-only ones.
    Media sources are verified against their digests. Raises `DecodeError`, whatever the bytes are.
    """
    return unpack(frames, limits, find_media)


def encode(obj: object, *, omit_media: OmitMedia = _omit_none) -> bytes:
    """`encode_frames` in one container, each frame at a multiple of 64 bytes, its header under a CRC-32."""
    return container.join_parts(*pack(obj, omit_media))


def decode(buffer: Buffer, *, limits: DecodeLimits = _DEFAULT_LIMITS, find_media: FindMedia = _nothing_found) -> Any:
    """`decode_frames` for what `encode` gave. Large arrays are views on `buffer`."""
    return unpack(container.split(buffer, limits), limits, find_media)


def check_encodable(value: object, what: str = "value") -> None:
    """Raise `EncodeError` unless `value` can be encoded, also as a part of something larger.

    For a value that is kept now and encoded later with other data: the error comes while its origin is known. The path
    in the error begins with `what`. Media sources and large arrays are not copied.
    """
    if is_plain(value):
        return
    refusal = _refusal([[[[[[[[value]]]]]]]], depth=_ENCLOSING)
    if refusal is None:
        return
    path, part = what, value
    for _ in range(_LONGEST_PATH):
        inside = ((step, inner, _refusal(inner)) for step, inner in steps_into(part))
        deeper = next(((step, inner, error) for step, inner, error in inside if error is not None), None)
        if deeper is None:
            break
        step, part, refusal = deeper
        path += step
    raise EncodeError(path, refusal.reason, refusal.cure) from refusal


def is_plain(value: object) -> bool:
    """Whether `value` is text, numbers, bytes, None, lists and dicts alone, and can be encoded anywhere.

    False says nothing about whether it can be encoded. One call of msgpack finds out.
    """
    packer = msgpack.Packer(default=_refuse, strict_types=True, use_bin_type=True)
    try:
        # As deep as `check_encodable` has it, in an entry of a message.
        packer.pack([0, 0, [[[[[[[[value]]]]]]]]])
    except (TypeError, ValueError, OverflowError, BufferError):  # also text that is not Unicode, and cycles
        return False
    return True


def _refuse(value: object) -> None:
    raise TypeError


def _refusal(value: object, *, depth: int = 0) -> EncodeError | None:
    try:
        pack(value, _omit_all, depth=depth)
    except EncodeError as error:
        return error
    return None


def _omit_all(source: MediaSource) -> bool:
    return True
