"""Decoding frames. Every part of a message is checked before it is used, and no large buffer is copied.

The header is parsed twice: first with msgpack's `skip`, which builds no objects and proves that the message holds as
many bytes as its lengths announce; then to build the objects. A message of a few bytes can therefore not allocate a
list of gigabytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import msgpack

from renderers.errors import MediaError
from renderers.media.item import MediaSource
from transport.errors import ChecksumError, DecodeError, MalformedError, MissingMediaError
from transport.wire import registry, wire_format
from transport.wire.arrays import build_array, build_scalar, build_tensor, build_vector
from transport.wire.builtin_values import BUILDERS, Build, is_safe_key
from transport.wire.limits import DecodeLimits
from transport.wire.wire_format import number_data

FindMedia: TypeAlias = Callable[[str], MediaSource | None]

_TYPE_ROW: Final = [str, int, list, str]
_MEDIA_ROW: Final = [str, bool]
# The exceptions that msgpack documents for bytes it cannot read, and those that it was found to raise.
_MSGPACK_ERRORS: Final = (msgpack.UnpackException, ValueError, TypeError, OverflowError)


def decode_message(frames: Sequence[wire_format.Buffer], limits: DecodeLimits, find_media: FindMedia) -> Any:
    """The object that `encode_message` encoded. `find_media` supplies the media that the sender left out."""
    views = [as_bytes(frame) for frame in frames]
    limits.check("max_frames", len(views))
    limits.check("max_total_bytes", sum(view.nbytes for view in views))
    if not views:
        raise MalformedError("the message has no frames")
    limits.check("max_header_bytes", views[0].nbytes)
    body = _checked_body(views[0])
    tables = _unpacker(body)
    frames_left = _Frames(views[1:])
    try:
        kinds = _read_kinds(tables.unpack(), frames_left)
        media = _read_media(tables.unpack(), frames_left, limits, find_media)
        extension, end_list, check_ended = _hooks(kinds, media, limits)
        unpacker = _unpacker(
            body[tables.tell() :], ext_hook=extension, list_hook=end_list, object_pairs_hook=build_dict
        )
        obj = unpacker.unpack()
    except _MSGPACK_ERRORS as error:
        raise MalformedError(f"message header is not valid: {error}") from error
    check_ended()
    frames_left.check_used()
    return obj


def omitted_digests(header: memoryview) -> list[str]:
    """The digests of the media that a message omits, from its first frame alone; needs none of its types."""
    unpacker = _unpacker(_checked_body(header))
    try:
        unpacker.skip()
        table = unpacker.unpack()
    except _MSGPACK_ERRORS as error:
        raise MalformedError(f"message header is not valid: {error}") from error
    return [digest for digest, omitted in _rows(table, _MEDIA_ROW, "media table") if omitted]


def as_bytes(buffer: wire_format.Buffer) -> memoryview:
    """A flat, read-only view: a value that is decoded from it cannot be used to change the received bytes."""
    try:
        view = memoryview(buffer).toreadonly()
        return view.cast("B") if view.nbytes else memoryview(b"")  # cast() refuses an empty view
    except TypeError as error:
        raise MalformedError(f"frame is not a contiguous buffer: {error}", "Pass bytes or a memoryview.") from error


def check_version(what: str, version: int, read: int) -> None:
    """Raise `DecodeError` for a format of another version than the one that is read here."""
    if version != read:
        raise DecodeError(
            f"{what} has version {version} and this installation reads {read}. Install one version of mmrollouts on "
            "both sides."
        )


def build_media(digest: str, data: memoryview) -> MediaSource:
    """The source, after its bytes were verified against its digest. Raises `ChecksumError`."""
    source = MediaSource(digest, data)
    try:
        source.verify()
    except MediaError as error:
        raise ChecksumError(f"media source {digest} of {data.nbytes} bytes") from error
    return source


def build_dict(pairs: list[tuple[Any, object]]) -> dict[Any, object]:
    """A dict whose keys are distinct and safe to hash (see `wire_format.KEY_TYPES`)."""
    for key, _ in pairs:
        if type(key) is not str and not is_safe_key(key):
            raise MalformedError(f"dict key of type {type(key).__name__}", "Use str keys, or int keys of 64 bits.")
    built = dict(pairs)
    if len(built) != len(pairs):
        raise MalformedError("dict with one key twice")
    return built


def _checked_body(header: memoryview) -> memoryview:
    """What follows the prelude: the two tables and the object, complete and nothing else."""
    if header.nbytes < wire_format.PRELUDE.size:
        raise MalformedError(f"the message header needs {wire_format.PRELUDE.size} bytes and has {header.nbytes}")
    magic, version = wire_format.PRELUDE.unpack_from(header)
    if magic != wire_format.PRELUDE_MAGIC:
        raise MalformedError(f"message header starts with {magic!r}, not {wire_format.PRELUDE_MAGIC!r}")
    check_version("message", version, wire_format.FORMAT_VERSION)
    body = header[wire_format.PRELUDE.size :]
    unpacker = _unpacker(body)
    try:
        for _ in range(3):
            unpacker.skip()
    except _MSGPACK_ERRORS as error:
        raise MalformedError(f"message header breaks off or is not msgpack: {error!r}") from error
    if unpacker.tell() != body.nbytes:
        raise MalformedError(f"message header has {body.nbytes - unpacker.tell()} bytes after its object")
    return body


def _unpacker(body: memoryview, **hooks: Any) -> msgpack.Unpacker:
    unpacker = msgpack.Unpacker(strict_map_key=False, max_buffer_size=max(body.nbytes, 1), **hooks)
    unpacker.feed(body)
    return unpacker


def _rows(table: object, types: list[type], name: str) -> list[list[Any]]:
    if type(table) is not list or any(type(row) is not list or [*map(type, row)] != types for row in table):
        raise MalformedError(f"{name} is not a list of rows of {', '.join(kind.__name__ for kind in types)}")
    return table


class _Frames:
    """The frames of a message after the header, each of which is used once, in order."""

    def __init__(self, frames: Sequence[memoryview]) -> None:
        self.count = len(frames)
        self._left = iter(frames)

    def next(self, what: str) -> memoryview:
        frame = next(self._left, None)
        if frame is None:
            raise MalformedError(f"the message carries no frame for {what}")
        return frame

    def array_parts(self, parts: list[Any]) -> tuple[object, object, bytes | memoryview]:
        """dtype, shape and bytes of an array, whose parts are these."""
        if len(parts) == 2:
            return parts[0], parts[1], self.next("an array")
        if len(parts) != 3 or type(parts[2]) is not bytes:
            raise MalformedError(f"array of {len(parts)} parts is not a dtype, a shape and bytes")
        return parts[0], parts[1], parts[2]

    def check_used(self) -> None:
        left = sum(1 for _ in self._left)
        if left:
            raise MalformedError(f"the message carries {left} frames that nothing refers to")


def _read_kinds(types: object, frames: _Frames) -> dict[bytes, Build]:
    """The function that makes an object of its parts, by the data of `OBJECT`."""
    kinds = {
        **BUILDERS,
        wire_format.KIND_SCALAR: build_scalar,
        wire_format.KIND_ARRAY: lambda parts: build_array(*frames.array_parts(parts)),
        wire_format.KIND_TENSOR: lambda parts: build_tensor(*frames.array_parts(parts)),
    }
    for row, (name, version, fields, declared_in) in enumerate(_rows(types, _TYPE_ROW, "type table")):
        registered = registry.registration_of_name(name, declared_in)
        kinds[wire_format.FIRST_TYPE + row] = registered.builder(version, fields)
    return {number_data(number): build for number, build in kinds.items()}


def _read_media(table: object, frames: _Frames, limits: DecodeLimits, find_media: FindMedia) -> list[MediaSource]:
    rows = _rows(table, _MEDIA_ROW, "media table")
    limits.check("max_frames", 1 + frames.count + sum(omitted for _, omitted in rows))
    media: list[MediaSource] = []
    for digest, omitted in rows:
        source = find_media(digest) if omitted else build_media(digest, frames.next(f"the medium {digest:.64}"))
        if source is None:
            raise MissingMediaError(digest)
        media.append(source)
    return media


def _hooks(
    kinds: Mapping[bytes, Build], media: Sequence[MediaSource], limits: DecodeLimits
) -> tuple[Callable[[int, bytes], object], Callable[[list[Any]], object], Callable[[], None]]:
    """What msgpack calls for each extension value and for each list of the body, and the check of its end.

    Closures, because they are called for the smallest parts, and attributes take longer than variables.
    """
    max_objects = limits.max_objects
    objects: list[object] = []  # by number
    ending: Build | None = None  # of the list that ends next, which stands for an object
    misplaced = "the kind of an object is not the last value of a list"

    def extension(code: int, data: bytes) -> object:
        nonlocal ending
        if code >= wire_format.VECTOR:
            vector = build_vector(code - wire_format.VECTOR, data)
            objects.append(vector)
            return vector
        if code == wire_format.OBJECT and ending is None:
            ending = kinds.get(data)
            if ending is not None:
                return ending
        elif code == wire_format.EMPTY_TUPLE and not data:
            return ()
        elif code == wire_format.SHARED or code == wire_format.MEDIUM:
            number, found = int.from_bytes(data), media if code == wire_format.MEDIUM else objects
            if number < len(found):
                return found[number]
        raise MalformedError(f"extension value {code}:{data[:8].hex()} means nothing at its place")

    def end_list(values: list[Any]) -> object:
        nonlocal ending
        if ending is None:
            return values
        if not values or values.pop() is not ending:
            raise MalformedError(misplaced)
        build, ending = ending, None
        obj = build(values)
        objects.append(obj)
        if len(objects) > max_objects:
            limits.check("max_objects", len(objects))
        return obj

    def check_ended() -> None:
        if ending is not None:
            raise MalformedError(misplaced)

    return extension, end_list, check_ended
