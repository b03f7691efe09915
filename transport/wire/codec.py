"""Encoding objects and decoding them, as one bytes object or as frames for a transport that sends several buffers."""

from collections.abc import Sequence
from typing import Any

import msgpack

from transport.wire import container
from transport.wire.decoding import FindMedia, decode_message
from transport.wire.encoding import OmitMedia, encode_message, error_of, may_hold_extensions
from transport.wire.limits import DEFAULT_LIMITS, DecodeLimits
from transport.wire.unencodable import located
from transport.wire.wire_format import Buffer


def encode_frames(obj: object, *, omit_media: OmitMedia = lambda source: False) -> list[Buffer]:
    """`obj` as a header frame and one frame per media source and per array or tensor of more than 1024 bytes.

    Supported: None, bool, int, float, str, bytes, dates, times, datetimes, timedeltas, fixed time zones,
    list, tuple, set and frozenset of plain values, dict with plain keys, numpy arrays and scalars of every
    dtype without Python objects and fields, torch tensors, `MediaSource`, and dataclasses, named tuples and
    enums registered with `wire_type`; nested up to 1000 deep, without cycles. bytearray and memoryview come
    back as bytes. Exact types only: a subclass of str or dict is an `EncodeError`; it is not sent as a str or
    dict.

    A frame of a C-contiguous array shares the array's memory, so send it before changing the array; other
    layouts are copied once, and smaller arrays are copied into the header. A media source and an array object
    are sent once however many references to them there are. A registered object with two references is one
    object after decoding, too.

    `omit_media(source)` is called once per media source; the bytes of a source for which it returns True are
    left out, and the receiver's `find_media` must supply them. Raises `EncodeError`, which gives the path of
    the part of `obj` that cannot be encoded.
    """
    return encode_message(obj, omit_media)


def decode_frames(
    frames: Sequence[Buffer], *, limits: DecodeLimits = DEFAULT_LIMITS, find_media: FindMedia = lambda digest: None
) -> Any:
    """The object that was passed to `encode_frames`.

    Arrays are read-only views on the frames, which they keep alive; those from the header have a few bytes of
    their own. Tensors are copied, because torch has no read-only tensors. Media sources are verified against
    their digests. Raises `DecodeError` for any bytes that are not a valid message.
    """
    return decode_message(frames, limits, find_media)


def encode(obj: object, *, omit_media: OmitMedia = lambda source: False) -> bytes:
    """`encode_frames` in one container: each frame at a multiple of 64 bytes, the header under a CRC-32."""
    return container.join(encode_frames(obj, omit_media=omit_media))


def decode(
    buffer: Buffer, *, limits: DecodeLimits = DEFAULT_LIMITS, find_media: FindMedia = lambda digest: None
) -> Any:
    """The object that was passed to `encode`, as `decode_frames` gives it. Large arrays are views on `buffer`."""
    return decode_message(container.split(buffer, limits), limits, find_media)


def check_encodable(value: object, name: str = "value") -> None:
    """Raise `EncodeError` unless `value` can be encoded, also as a part of a larger object.

    For a value that is stored now and encoded later with other data: the error comes while the origin of the
    value is known. The path in the error begins with `name`. Media sources and large arrays are not copied.
    """
    if is_plain(value):
        return
    error = error_of(_inside_others(value))
    if error is not None:
        raise located(value, name, error, error_of) from error


def is_plain(value: object) -> bool:
    """Whether `value` has text, numbers, bytes, None, lists and dicts alone, and can be encoded anywhere.

    A value for which this is False may still be encodable.
    """
    packer = msgpack.Packer(default=_refuse, strict_types=True, use_bin_type=True)
    try:
        packed = packer.pack(_inside_others(value))
        if may_hold_extensions(packed):
            msgpack.unpackb(packed, ext_hook=_refuse, strict_map_key=False)
    except (TypeError, ValueError, OverflowError, BufferError):  # also text that is not Unicode, and cycles
        return False
    return True


def _inside_others(value: object) -> list[Any]:
    """The value at the depth that it has in eight objects, each in a list."""
    return [[[[[[[[[[[[[[[[value]]]]]]]]]]]]]]]]


def _refuse(*value: object) -> None:
    raise TypeError
