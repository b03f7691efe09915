"""Decoding frames. Every part of a message is checked before it is used, and no large buffer is copied.

The header is parsed twice: first with msgpack's `skip`, which builds no objects and proves that the message holds as
many bytes as its lengths announce; then to build the objects. A message of a few bytes can therefore not allocate a
list of gigabytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeAlias

import msgpack

from renderers.errors import MediaError
from renderers.media.item import MediaSource
from transport.errors import ChecksumError, DecodeError, MalformedError, MissingMediaError, quoted
from transport.wire import registry, wire_format
from transport.wire.arrays import build_array, build_scalar, build_tensor, build_vector
from transport.wire.builtin_values import BUILDERS, build_builtin
from transport.wire.limits import DecodeLimits

FindMedia: TypeAlias = Callable[[str], MediaSource | None]

_TYPE_ROW: Final = [str, int, list, str]
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
    entries, body = _read_prelude(views[0])
    building = _Building(limits, find_media)
    limits.check("max_objects", entries)  # before they are built: the defaults of a class may take any memory
    unpacker = _unpacker(body, ext_hook=building.resolve, object_pairs_hook=build_dict)
    try:
        building.read_types(unpacker.unpack())
        building.read_blobs(unpacker.unpack(), views[1:])
        read, build = unpacker.unpack, building.build_entry
        for _ in range(entries):
            build(read())
    except _MSGPACK_ERRORS as error:
        raise MalformedError(f"message header is not valid: {error}") from error
    if len(building.roots) != 1:
        raise MalformedError(f"message has {len(building.roots)} roots instead of one")
    return building.roots[0]


def omitted_digests(header: memoryview) -> list[str]:
    """The digests of the media that a message omits, from its first frame alone; needs none of its types."""
    _, body = _read_prelude(header)
    unpacker = _unpacker(body)
    try:
        unpacker.skip()
        table = unpacker.unpack()
    except _MSGPACK_ERRORS as error:
        raise MalformedError(f"message header is not valid: {error}") from error
    rows = table if type(table) is list else []
    return [row[1] for row in rows if type(row) is list and len(row) == 2 and row[0] == wire_format.BLOB_OMITTED]


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


def _read_prelude(header: memoryview) -> tuple[int, memoryview]:
    """The number of entries, and what follows the prelude: the two tables and the entries, complete."""
    if header.nbytes < wire_format.PRELUDE.size:
        raise MalformedError(f"the message header needs {wire_format.PRELUDE.size} bytes and has {header.nbytes}")
    magic, version, entries = wire_format.PRELUDE.unpack_from(header)
    if magic != wire_format.PRELUDE_MAGIC:
        raise MalformedError(f"message header starts with {magic!r}, not {wire_format.PRELUDE_MAGIC!r}")
    check_version("message", version, wire_format.FORMAT_VERSION)
    body = header[wire_format.PRELUDE.size :]
    unpacker = _unpacker(body)
    try:
        for _ in range(2 + entries):
            unpacker.skip()
    except _MSGPACK_ERRORS as error:
        raise MalformedError(f"message header breaks off or is not msgpack: {error!r}") from error
    if unpacker.tell() != body.nbytes:
        raise MalformedError(f"message header has {body.nbytes - unpacker.tell()} bytes after its last entry")
    return entries, body


def _unpacker(body: memoryview, **hooks: Any) -> msgpack.Unpacker:
    unpacker = msgpack.Unpacker(strict_map_key=False, max_buffer_size=max(body.nbytes, 1), **hooks)
    unpacker.feed(body)
    return unpacker


def build_dict(pairs: list[tuple[Any, object]]) -> dict[Any, object]:
    """A dict whose keys are distinct and safe to hash (see `wire_format.KEY_TYPES`)."""
    for key, _ in pairs:
        if type(key) is not str and not _is_safe_key(key):
            raise MalformedError(f"dict key of type {type(key).__name__}", "Use str keys, or int keys of 64 bits.")
    built = dict(pairs)
    if len(built) != len(pairs):
        raise MalformedError("dict with one key twice")
    return built


def _is_safe_key(value: object) -> bool:
    """Whether a message may have this value as a key of a dict or in a set: it is hashed."""
    if type(value) is int:
        return value.bit_length() <= wire_format.KEY_BITS
    return type(value) in wire_format.KEY_TYPES


class _Building:
    """The state of one message that is being decoded."""

    def __init__(self, limits: DecodeLimits, find_media: FindMedia) -> None:
        self.limits = limits
        self.find_media = find_media
        self.types: list[registry.SentType] = []
        self.blobs: list[object] = []
        self.built: dict[int, tuple[object, int]] = {}  # object and depth of each entry, by number
        self.depth = 0  # of the current entry, as far as its references have been resolved
        self.roots: list[object] = []

    def resolve(self, code: int, data: bytes) -> object:
        """The object of a reference; msgpack calls this for each extension value."""
        number = int.from_bytes(data)
        if code == wire_format.REF_ENTRY:
            built = self.built.get(number)
            if built is not None:
                obj, depth = built
                if self.depth <= depth:
                    self.depth = depth + 1
                return obj
        elif code == wire_format.REF_BLOB:
            if number < len(self.blobs):
                return self.blobs[number]
        elif code == wire_format.EMPTY_TUPLE and not data:
            return ()
        raise MalformedError(f"reference {code}:{data[:8].hex()} to something that has not come before it")

    def read_types(self, table: object) -> None:
        if type(table) is not list or any(type(row) is not list or [*map(type, row)] != _TYPE_ROW for row in table):
            raise MalformedError("type table is not a list of [name, version, fields, module]")
        self.types = [
            registry.registration_of_name(name, declared_in).as_sent(version, fields)
            for name, version, fields, declared_in in table
        ]

    def read_blobs(self, table: object, frames: list[memoryview]) -> None:
        if type(table) is not list:
            raise MalformedError("blob table is not a list")
        # Nearly all rows are vectors; only the others are checked before the first blob is built.
        others = [row for row in table if type(row) is not list or len(row) != 2 or type(row[0]) is not int]
        if any(type(row) is not list or not row for row in others):
            raise MalformedError("blob table is not a list of descriptions")
        not_inline = [row for row in others if type(row[0]) is not int and len(row) != 4]
        self.limits.check("max_frames", len(not_inline))
        framed = sum(row[0] != wire_format.BLOB_OMITTED for row in not_inline)
        if framed != len(frames):
            raise MalformedError(f"message describes {framed} arrays and media and carries {len(frames)}")
        if not others:
            self.blobs = list(itertools.starmap(build_vector, table))
            return
        frames_left = iter(frames)
        self.blobs = [
            build_vector(*row) if type(row[0]) is int and len(row) == 2 else self.build_blob(row, frames_left)
            for row in table
        ]

    def build_blob(self, row: list[Any], frames_left: Iterator[memoryview]) -> object:
        kind, inline = row[0], type(row[0]) is int or len(row) == 4
        has_digest = len(row) == 2 and type(row[1]) is str
        if kind == wire_format.BLOB_OMITTED and has_digest:
            return self.omitted_media(row[1])
        data, description = (row[-1], row[1:-1]) if inline else (next(frames_left, memoryview(b"")), row[1:])
        if len(description) == 2 and (not inline or type(data) is bytes):
            if kind == wire_format.BLOB_ARRAY:
                return build_array(description[0], description[1], data)
            if kind == wire_format.BLOB_TENSOR:
                return build_tensor(description[0], description[1], data)
        if kind == wire_format.BLOB_MEDIA and has_digest:
            return build_media(row[1], data)
        raise MalformedError(f"blob of kind {quoted(kind)} with {len(row) - 1} values is unknown or has no bytes")

    def omitted_media(self, digest: str) -> MediaSource:
        source = self.find_media(digest)
        if source is None:
            raise MissingMediaError(digest)
        return source

    def build_entry(self, entry: object) -> None:
        if type(entry) is not list or len(entry) != 3 or not type(entry[0]) is type(entry[1]) is int:
            raise MalformedError("entry is not [id, tag, payload] with numbers for an id and a tag")
        number, tag, payload = entry
        if number in self.built:
            raise MalformedError(f"two entries have the id {quoted(number)}")
        depth = self.end_depth()
        if tag >= wire_format.TAG_TYPES:
            if tag >= wire_format.TAG_TYPES + len(self.types):
                raise MalformedError(f"entry tag {tag} is beyond the type table")
            self.built[number] = self.types[tag - wire_format.TAG_TYPES].build(payload), depth
        elif tag == wire_format.TAG_ROOT:
            self.roots.append(payload)
            self.built[number] = None, depth
        else:
            self.built[number] = _build_value(tag, payload), depth

    def end_depth(self) -> int:
        """The depth of the current entry, all of whose references are resolved; starts the next entry."""
        depth, self.depth = self.depth, 0
        if depth > self.limits.max_depth:
            self.limits.check("max_depth", depth)
        return depth


def build_media(digest: str, data: memoryview) -> MediaSource:
    """The source, after its bytes were verified against its digest. Raises `ChecksumError`."""
    source = MediaSource(digest, data)
    try:
        source.verify()
    except MediaError as error:
        raise ChecksumError(f"media source {digest} of {data.nbytes} bytes") from error
    return source


def _build_value(tag: int, payload: Any) -> object:
    if tag == wire_format.TAG_SCALAR:
        return build_scalar(payload)
    if tag in BUILDERS:
        return build_builtin(tag, payload)
    if type(payload) is not list:
        raise MalformedError(f"entry with tag {tag} is not a list")
    if tag == wire_format.TAG_TUPLE:
        return tuple(payload)
    if tag == wire_format.TAG_SET or tag == wire_format.TAG_FROZENSET:
        return _build_set(tag, payload)
    raise MalformedError(f"entry tag {tag} is unknown")


def _build_set(tag: int, members: list[Any]) -> object:
    if not all(map(_is_safe_key, members)):
        raise MalformedError("set with members that are not plain values of at most 64 bits")
    built = frozenset(members)
    if len(built) != len(members):
        raise MalformedError("set with one member twice")
    return built if tag == wire_format.TAG_FROZENSET else set(built)
