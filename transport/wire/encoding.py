"""Encoding an object as frames: a header with everything small, and one frame per large array and media source.

msgpack's C packer walks the object. It calls `_Encoding.replace` for every value that it cannot pack, and
packs what that returns in the place of the value: an extension value, or the list of the parts of an object.
"""

import functools
import re
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import msgpack
import numpy as np

from renderers.media.item import MediaSource
from transport.errors import EncodeError, quoted
from transport.wire import registry, wire_format
from transport.wire.arrays import COMMON_CODES, Bytes, array_parts, is_array, is_tensor, scalar_parts, tensor_parts
from transport.wire.builtin_values import PARTS, Parts
from transport.wire.unencodable import WRONG_KEY, located

OmitMedia: TypeAlias = Callable[[MediaSource], bool]

#: What a packer raises, beside `EncodeError` for values: text that is not Unicode, nesting, buffers with
#: gaps.
_PACKER_ERRORS: Final = (EncodeError, ValueError, OverflowError, BufferError, TypeError)


def encode_message(obj: object, omit_media: OmitMedia) -> list[wire_format.Buffer]:
    """The frames of `obj`, the header first.

    Raises `EncodeError` with the path of what has no wire format. `omit_media` is called once per media
    source; the bytes of a source for which it returns True are left out.
    """
    try:
        return _Encoding(omit_media).encode(obj)
    except _PACKER_ERRORS as error:
        registered = registry.registration_of_class(type(obj))
        name = "value" if registered is None else registered.cls.__qualname__
        raise located(obj, name, error, error_of) from error


def error_of(value: object) -> Exception | None:
    """Why a value cannot be encoded by itself, without its path; None if it can."""
    try:
        _Encoding(lambda source: True).encode(value)
    except _PACKER_ERRORS as error:
        return error
    return None


@functools.lru_cache(maxsize=1 << 14)
def _reference(code: int, number: int) -> msgpack.ExtType:
    # Without the checks of the constructor, which would take a tenth of the whole encoding.
    return tuple.__new__(msgpack.ExtType, (code, wire_format.number_data(number)))


class _End:
    """The last value of the list that stands for an object. msgpack asks for it when it has packed all others."""

    __slots__ = ("mark",)

    def __init__(self, kind: int) -> None:
        self.mark = _reference(wire_format.OBJECT, kind)


_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_ARRAY: Final = np.ndarray


class _Encoding:
    """The state of one message that is being encoded.

    It holds no reference to itself or to its packer, so that the objects which it keeps alive are freed with
    it.
    """

    def __init__(self, omit_media: OmitMedia) -> None:
        self.omit_media = omit_media
        self.types: list[list[object]] = []
        self.media: dict[str, int] = {}  # the row of each media source, by digest
        self.media_rows: list[list[object]] = []
        self.media_frames: list[wire_format.Buffer] = []
        self.array_frames: list[wire_format.Buffer] = []
        self.encoders: dict[type, tuple[Parts, _End]] = {}
        self.extensions = 0  # extension values in the body
        self.open: list[object] = []  # the objects whose parts are being packed, outermost first
        self.objects: list[object] = []  # those that ended, by number; alive, because another could get the id of one
        self.numbers: dict[int, int] = {}  # by id(); -1 while an object is open

    def encode(self, obj: object) -> list[wire_format.Buffer]:
        packer = msgpack.Packer(default=self.replace, strict_types=True, use_bin_type=True)
        body = packer.pack(obj)
        # Most messages hold none, and are not unpacked again.
        if self.extensions or may_hold_extensions(body):
            self.check(body)
        version = bytes([wire_format.FORMAT_VERSION])
        header = b"".join([version, packer.pack(self.types), packer.pack(self.media_rows), body])
        return [header, *self.media_frames, *self.array_frames]

    def replace(self, obj: Any) -> msgpack.ExtType | list[object]:
        """What msgpack packs in place of an object that it cannot pack."""
        kind = type(obj)
        if kind is _End:
            # The innermost open object: msgpack packs the parts of one before it goes on.
            ended = self.open.pop()
            self.numbers[id(ended)] = len(self.objects)
            self.objects.append(ended)
            self.extensions += 1
            return obj.mark
        number = self.numbers.get(id(obj))
        if number is not None:
            # It is open: msgpack would pack it within itself without an end.
            if number < 0:
                raise EncodeError("value", "the object contains itself", "Refer to the parent by index or id.")
            self.extensions += 1
            return _reference(wire_format.SHARED, number)
        if kind is _ARRAY and obj.ndim == 1 and obj.nbytes <= wire_format.MAX_INLINE_BYTES:
            code = COMMON_CODES.get(obj.dtype)
            if code is not None:
                self.numbers[id(obj)] = len(self.objects)
                self.objects.append(obj)
                self.extensions += 1
                return tuple.__new__(msgpack.ExtType, (wire_format.VECTOR + code, obj.tobytes()))
        if kind is MediaSource:
            self.extensions += 1
            return _reference(wire_format.MEDIUM, self.media_row(obj))
        parts, end = self.encoders.get(kind) or self.add_encoder(obj)
        self.numbers[id(obj)] = -1
        self.open.append(obj)
        return [*parts(obj), end]

    def add_encoder(self, obj: Any) -> tuple[Parts, _End]:
        """How objects of the class of `obj` are taken apart."""
        kind, frames = type(obj), self.array_frames
        registered = registry.registration_of_class(kind)
        found: tuple[int, Parts]
        if registered is not None:
            found = wire_format.FIRST_TYPE + len(self.types), registered.parts
            self.types.append(registered.type_row())
        elif kind in PARTS:
            found = PARTS[kind]
        elif isinstance(obj, np.generic):
            found = wire_format.KIND_SCALAR, scalar_parts
        elif is_array(obj):
            found = wire_format.KIND_ARRAY, lambda array: _data_parts(*array_parts(array), frames)
        elif is_tensor(obj):
            found = wire_format.KIND_TENSOR, lambda tensor: _data_parts(*tensor_parts(tensor), frames)
        else:
            raise _unsupported(obj)
        self.encoders[kind] = found[1], _End(found[0])
        return self.encoders[kind]

    def media_row(self, source: MediaSource) -> int:
        row = self.media.get(source.digest)
        if row is None:
            if not _SHA256.fullmatch(source.digest):
                reason = f"media digest {quoted(source.digest)} is not a sha256"
                raise EncodeError("value", reason, "Use MediaSource.of(data).")
            row = self.media[source.digest] = len(self.media_rows)
            omitted = bool(self.omit_media(source))
            self.media_rows.append([source.digest, omitted])
            if not omitted:
                self.media_frames.append(source.data)
        return row

    def check(self, body: bytes) -> None:
        """Refuse a dict key that the receiver would refuse, and an extension value of the user.

        msgpack does not say whether the object that it hands back is a key or a value. Unpacking the body
        with a list, which cannot be a key, in place of every extension value finds the keys.
        """
        found: list[int] = []

        def no_key(code: int, data: bytes) -> list[object]:
            found.append(code)
            return []

        try:
            msgpack.unpackb(body, ext_hook=no_key, strict_map_key=False)
        except TypeError as error:
            raise EncodeError("value", *WRONG_KEY) from error
        if len(found) != self.extensions:
            reason = "msgpack.ExtType, which the receiver could mistake for a reference"
            raise EncodeError("value", reason, "Send its code and data.")


def _data_parts(name: str, shape: list[int], data: Bytes, frames: list[wire_format.Buffer]) -> list[object]:
    """The parts of an array; those of a large one are without its data, which become a frame."""
    if data.nbytes <= wire_format.MAX_INLINE_BYTES:
        return [name, shape, data.tobytes()]
    frames.append(data.data)
    return [name, shape]


def _unsupported(obj: object) -> EncodeError:
    kind = type(obj)
    if isinstance(obj, str | int | float | list | dict | tuple | bytes):
        plain = next(base.__name__ for base in kind.__mro__ if base.__module__ == "builtins")
        reason = f"{kind.__qualname__}, a subclass of {plain}, would come back as another type"
        return EncodeError("value", reason, f"Pass {plain}(x).")
    return EncodeError(
        "value",
        f"values of type {kind.__module__}.{kind.__qualname__} cannot be encoded",
        "Register the class with @wire_type, or convert it to plain data first.",
    )


def may_hold_extensions(packed: bytes) -> bool:
    """False if no value in these msgpack bytes is an extension value."""
    # msgpack begins an extension value with one of these
    return any(map(packed.__contains__, b"\xc7\xc8\xc9\xd4\xd5\xd6\xd7\xd8"))
