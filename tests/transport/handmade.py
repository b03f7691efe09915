"""Messages made without the encoder, which say whatever a test wants."""

from __future__ import annotations

import dataclasses
import struct
from typing import Any

import msgpack

from transport import wire_type
from transport.wire.wire_format import FORMAT_VERSION


@wire_type("tests.hostile.Item")
@dataclasses.dataclass(frozen=True)
class Item:
    a: Any
    b: Any = None


def message(
    entries: list[Any],
    blobs: Any = (),
    frames: tuple[bytes, ...] = (),
    count: int | None = None,
    types: Any = (["tests.hostile.Item", 1, ["a", "b"]],),
) -> list[Any]:
    """Frames whose header is valid in form and says whatever the test wants. A type of three values gets a module."""
    if isinstance(types, list | tuple):
        types = [[*row, __name__] if isinstance(row, list) and len(row) == 3 else row for row in types]
    header = struct.pack("<4sHxxI", b"MMRH", FORMAT_VERSION, len(entries) if count is None else count)
    tables = [list(table) if isinstance(table, tuple) else table for table in (types, blobs)]
    body = [msgpack.packb(value, strict_types=False) for value in (*tables, *entries)]
    return [header + b"".join(body), *frames]


def raw(body: bytes, count: int = 1) -> list[Any]:
    return [struct.pack("<4sHxxI", b"MMRH", FORMAT_VERSION, count) + b"\x90\x90" + body]


def ref(number: int) -> msgpack.ExtType:
    return msgpack.ExtType(1, number.to_bytes(4, "big"))


def blob(number: int = 0) -> msgpack.ExtType:
    return msgpack.ExtType(2, number.to_bytes(4, "big"))


def root(value: Any) -> list[Any]:
    return [0, 0, value]
