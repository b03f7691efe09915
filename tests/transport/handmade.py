"""Messages made without the encoder, which say whatever a test wants."""

import dataclasses
from typing import Any

import msgpack

from transport import wire_type
from transport.wire.wire_format import FORMAT_VERSION

TUPLE, SET, FROZENSET, SCALAR, ARRAY, TENSOR, INT, DATE, TIME, DATETIME, TIMEDELTA, OFFSET = range(12)
ITEM = 16  # the first row of the type table


@wire_type("tests.hostile.Item")
@dataclasses.dataclass(frozen=True)
class Item:
    a: Any
    b: Any = None


def message(
    body: Any,
    media: Any = (),
    frames: tuple[bytes, ...] = (),
    types: Any = (["tests.hostile.Item", 1, ["a", "b"]],),
) -> list[Any]:
    """Frames whose header is valid in form and says whatever the test wants. A type of three values gets a module."""
    if isinstance(types, list | tuple):
        types = [[*row, __name__] if isinstance(row, list) and len(row) == 3 else row for row in types]
    tables = [list(table) if isinstance(table, tuple) else table for table in (types, media)]
    packed = [msgpack.packb(value, strict_types=False) for value in (*tables, body)]
    return [bytes([FORMAT_VERSION]) + b"".join(packed), *frames]


def raw(body: bytes) -> list[Any]:
    return [bytes([FORMAT_VERSION]) + b"\x90\x90" + body]


def kind(number: int) -> msgpack.ExtType:
    return msgpack.ExtType(1, bytes([number]))


def obj(number: int, *parts: Any) -> list[Any]:
    """An object of a kind."""
    return [*parts, kind(number)]


def shared(number: int) -> msgpack.ExtType:
    """What came before as number so and so."""
    return msgpack.ExtType(2, number.to_bytes(4, "big"))


def medium(row: int) -> msgpack.ExtType:
    return msgpack.ExtType(3, bytes([row]))


def vector(dtype: int, data: bytes) -> msgpack.ExtType:
    return msgpack.ExtType(16 + dtype, data)
