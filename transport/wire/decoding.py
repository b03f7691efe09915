"""Decoding frames. Every part of a message is checked before it is used, and no large buffer is copied.

The header is parsed twice: first with msgpack's `skip`, which builds no objects and proves that the message
holds as many bytes as its lengths announce; then to build the objects. A message of a few bytes can therefore
not allocate a list of gigabytes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import msgpack

from renderers.errors import MediaError
from renderers.media.item import MediaSource
from transport.errors import ChecksumError, DecodeError, MalformedError, MissingMediaError
from transport.wire import registry, wire_format
from transport.wire.arrays import COMMON_DTYPES, build_array, build_scalar, build_tensor, build_vector
from transport.wire.builtin_values import BUILDERS, Build, is_safe_key
from transport.wire.limits import DecodeLimits

FindMedia: TypeAlias = Callable[[str], MediaSource | None]

_TYPE_ROW: Final = [str, int, list, str]
_MEDIA_ROW: Final = [str, bool]
# The exceptions that msgpack documents for bytes it cannot read, and those that it was found to raise.
_MSGPACK_ERRORS: Final = (msgpack.UnpackException, ValueError, TypeError, OverflowError)
_VECTOR_DTYPES: Final = dict(enumerate(COMMON_DTYPES, wire_format.VECTOR))
_MISPLACED: Final = "the kind of an object is not the last value of a list"


def decode_message(frames: Sequence[wire_format.Buffer], limits: DecodeLimits, find_media: FindMedia) -> Any:
    """The object that `encode_message` encoded. `find_media` supplies the media that the sender left out."""
    views = [as_bytes(frame) for frame in frames]
    limits.check("max_frames", len(views))
    limits.check("max_total_bytes", sum(view.nbytes for view in views))
    if not views:
        raise MalformedError("the message has no frames")
    limits.check("max_header_bytes", views[0].nbytes)
    frames_left = iter(views[1:])
    body, (types, media_rows) = _read_header(views[0])
    # Media that were left out count as if they had come: a short header could name any number of them.
    limits.check("max_frames", len(views) + sum(omitted for _, omitted in media_rows))
    media = []
    for digest, omitted in media_rows:
        source = find_media(digest) if omitted else build_media(digest, _next_frame(frames_left, "a media source"))
        if source is None:
            raise MissingMediaError(digest)
        media.append(source)
    extension, end_list, check_ended = _hooks(_read_kinds(types, frames_left), media, limits)
    unpacker = _unpacker(body, ext_hook=extension, list_hook=end_list, object_pairs_hook=build_dict)
    try:
        obj = unpacker.unpack()
    except _MSGPACK_ERRORS as error:
        raise MalformedError(f"message header is not valid: {error!r}") from error
    check_ended()
    unused = sum(1 for _ in frames_left)
    if unused:
        raise MalformedError(f"the message carries {unused} frames that nothing refers to")
    return obj


def omitted_digests(header: memoryview) -> list[str]:
    """The digests of the media that a message omits, from its first frame alone; needs none of its types."""
    _, (_, media_rows) = _read_header(header)
    return [digest for digest, omitted in media_rows if omitted]


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
    # Of two values of one key a reader would see one, and another reader the other.
    if len(built) != len(pairs):
        raise MalformedError("dict with one key twice")
    return built


def _read_header(header: memoryview) -> tuple[memoryview, list[list[list[Any]]]]:
    """The bytes of the body, which are complete and the last of the header, and the type table and media table."""
    check_version("message", header[0] if header else 0, wire_format.FORMAT_VERSION)
    values = header[1:]
    skipping, unpacker = _unpacker(values), _unpacker(values)
    try:
        for _ in range(3):
            skipping.skip()
        tables = [unpacker.unpack(), unpacker.unpack()]
    except _MSGPACK_ERRORS as error:
        raise MalformedError(f"message header breaks off or is not msgpack: {error!r}") from error
    if skipping.tell() != values.nbytes:
        raise MalformedError(f"message header has {values.nbytes - skipping.tell()} bytes after its object")
    for name, table, types in zip(("type table", "media table"), tables, (_TYPE_ROW, _MEDIA_ROW), strict=True):
        if type(table) is not list or any(type(row) is not list or [*map(type, row)] != types for row in table):
            raise MalformedError(f"{name} is not a list of rows of {', '.join(kind.__name__ for kind in types)}")
    return values[unpacker.tell() :], tables


def _unpacker(values: memoryview, **hooks: Any) -> msgpack.Unpacker:
    # Never 0, which is msgpack's largest size. Keys are checked by `build_dict`.
    unpacker = msgpack.Unpacker(strict_map_key=False, max_buffer_size=max(values.nbytes, 1), **hooks)
    unpacker.feed(values)
    return unpacker


def _next_frame(frames_left: Iterator[memoryview], what: str) -> memoryview:
    frame = next(frames_left, None)
    if frame is None:
        raise MalformedError(f"the message carries no frame for {what}")
    return frame


def _read_kinds(types: list[list[Any]], frames_left: Iterator[memoryview]) -> dict[bytes, Build]:
    """The function that makes an object of its parts, by the data of `OBJECT`."""

    def array_parts(parts: list[Any]) -> list[Any]:
        if len(parts) == 2:
            return [*parts, _next_frame(frames_left, "an array")]
        if len(parts) != 3 or type(parts[2]) is not bytes:
            raise MalformedError(f"array of {len(parts)} parts is not a dtype, a shape and bytes")
        return parts

    kinds = {
        **BUILDERS,
        wire_format.KIND_SCALAR: build_scalar,
        wire_format.KIND_ARRAY: lambda parts: build_array(*array_parts(parts)),
        wire_format.KIND_TENSOR: lambda parts: build_tensor(*array_parts(parts)),
    }
    for row, (name, version, fields, declared_in) in enumerate(types):
        registered = registry.registration_of_name(name, declared_in)
        kinds[wire_format.FIRST_TYPE + row] = registered.builder(version, fields)
    return {wire_format.number_data(number): build for number, build in kinds.items()}


def _hooks(
    kinds: Mapping[bytes, Build], media: Sequence[MediaSource], limits: DecodeLimits
) -> tuple[Callable[[int, bytes], object], Callable[[list[Any]], object], Callable[[], None]]:
    """What msgpack calls for each extension value and for each list of the body, and the check of its end.

    Closures, because they are called for the smallest parts, and attributes take longer than variables.
    """
    max_objects = limits.max_objects
    objects: list[object] = []  # by number
    ending: Build | None = None  # of the list that ends next, which stands for an object

    def extension(code: int, data: bytes) -> object:
        nonlocal ending
        dtype = _VECTOR_DTYPES.get(code)
        if dtype is not None:
            vector = build_vector(dtype, data)
            objects.append(vector)
            return vector
        if code == wire_format.OBJECT and ending is None:
            ending = kinds.get(data)
            if ending is not None:
                return ending
        elif code == wire_format.SHARED or code == wire_format.MEDIUM:
            number, found = int.from_bytes(data), media if code == wire_format.MEDIUM else objects
            if number < len(found):
                return found[number]
        raise MalformedError(f"extension value {code}:{data[:8].hex()} means nothing at its place")

    def end_list(values: list[Any]) -> object:
        nonlocal ending
        if ending is None:
            return values
        # By identity: only `extension` returns this function, so that no other value passes for it.
        if not values or values.pop() is not ending:
            raise MalformedError(_MISPLACED)
        build, ending = ending, None
        obj = build(values)
        objects.append(obj)
        # Compared here first: no further call for each of the smallest parts.
        if len(objects) > max_objects:
            limits.check("max_objects", len(objects))
        return obj

    def check_ended() -> None:
        if ending is not None:
            raise MalformedError(_MISPLACED)
        limits.check("max_objects", len(objects))

    return extension, end_list, check_ended
