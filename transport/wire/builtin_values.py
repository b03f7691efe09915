"""Values of Python's own classes that msgpack cannot pack: large ints, complex, Decimal, UUID, paths, dates, times.

Each becomes an entry: a tag and a payload of plain values. The zone of a datetime is an entry, too, so that datetimes
which share a zone object share it after decoding.
"""

from __future__ import annotations

import datetime
import decimal
import pathlib
import re
import uuid
import zoneinfo
from collections.abc import Callable
from typing import Any, Final

from transport.errors import MalformedError, NotEncodableError
from transport.wire import wire_format
from transport.wire.error_texts import quoted

_POSIX: Final = "posix"
_WINDOWS: Final = "windows"

# The zone names that are passed to ZoneInfo, which reads files and imports packages by this name: a message is
# untrusted.
_ZONE: Final = re.compile(r"[A-Za-z0-9_+-]{1,32}(?:/[A-Za-z0-9_+-]{1,32}){0,3}")

# What these constructors raise for wrong arguments: LookupError for a zone that does not exist, OSError for the name of
# a folder of zones.
_CONSTRUCTOR_ERRORS: Final = (ArithmeticError, LookupError, OSError, TypeError, ValueError)


def _pack_path(path: pathlib.PurePath) -> list[object]:
    flavour = _WINDOWS if isinstance(path, pathlib.PureWindowsPath) else _POSIX
    return [flavour, isinstance(path, pathlib.Path), str(path)]


def _build_path(flavour: str, concrete: bool, text: str) -> pathlib.PurePath:
    if flavour not in (_POSIX, _WINDOWS):
        raise ValueError(f"flavour {quoted(flavour)}")
    pure = pathlib.PurePosixPath if flavour == _POSIX else pathlib.PureWindowsPath
    # A concrete path of the other flavour names no file here; as a Path of this machine it might name a wrong one.
    return pathlib.Path(text) if concrete and issubclass(pathlib.Path().__class__, pure) else pure(text)


def _pack_time(time: datetime.time) -> list[object]:
    return [time.hour, time.minute, time.second, time.microsecond, time.fold, time.tzinfo]


def _build_time(hour: int, minute: int, second: int, microsecond: int, fold: int, zone: Any) -> datetime.time:
    return datetime.time(hour, minute, second, microsecond, zone, fold=fold)


def _pack_datetime(moment: datetime.datetime) -> list[object]:
    return [moment.year, moment.month, moment.day, *_pack_time(moment.timetz())]


def _build_datetime(year: int, month: int, day: int, *time: Any) -> datetime.datetime:
    return datetime.datetime.combine(datetime.date(year, month, day), _build_time(*time))


def _pack_timedelta(span: datetime.timedelta) -> list[object]:
    return [span.days, span.seconds, span.microseconds]


def _pack_offset(zone: datetime.timezone) -> list[object]:
    offset = zone.utcoffset(None)
    name = zone.tzname(None)
    named = name != datetime.timezone(offset).tzname(None)
    return [*_pack_timedelta(offset), name if named else None]


def _build_offset(days: int, seconds: int, microseconds: int, name: str | None) -> datetime.timezone:
    offset = datetime.timedelta(days, seconds, microseconds)
    return datetime.timezone(offset) if name is None else datetime.timezone(offset, name)


def _pack_zone(zone: zoneinfo.ZoneInfo) -> str:
    if zone.key is None or not _ZONE.fullmatch(zone.key):
        raise NotEncodableError(f"time zone with the key {zone.key!r:.80}", "Use a ZoneInfo made from a zone's name.")
    return zone.key


def _build_zone(key: str) -> zoneinfo.ZoneInfo:
    if not _ZONE.fullmatch(key):
        raise ValueError(f"time zone {quoted(key)}")
    return zoneinfo.ZoneInfo(key)


_INT, _TEXT, _ZONES = (int,), (str,), (type(None), datetime.timezone, zoneinfo.ZoneInfo)
_TIME = (*[_INT] * 5, _ZONES)

# class -> tag, how an instance becomes a payload
PACKERS: Final[dict[type, tuple[int, Callable[[Any], object]]]] = {
    int: (wire_format.TAG_INT, lambda value: value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True)),
    complex: (wire_format.TAG_COMPLEX, lambda value: [value.real, value.imag]),
    decimal.Decimal: (wire_format.TAG_DECIMAL, str),
    uuid.UUID: (wire_format.TAG_UUID, lambda value: value.bytes),
    datetime.date: (wire_format.TAG_DATE, lambda value: [value.year, value.month, value.day]),
    datetime.time: (wire_format.TAG_TIME, _pack_time),
    datetime.datetime: (wire_format.TAG_DATETIME, _pack_datetime),
    datetime.timedelta: (wire_format.TAG_TIMEDELTA, _pack_timedelta),
    datetime.timezone: (wire_format.TAG_OFFSET, _pack_offset),
    zoneinfo.ZoneInfo: (wire_format.TAG_ZONE, _pack_zone),
    **dict.fromkeys(
        (pathlib.PurePosixPath, pathlib.PureWindowsPath, pathlib.PosixPath, pathlib.WindowsPath),
        (wire_format.TAG_PATH, _pack_path),
    ),
}

# tag -> name of the value for errors, the types of its parts, the constructor. The types are exact, because a
# constructor may accept others: datetime accepts bytes as a pickled state.
BUILDERS: Final[dict[int, tuple[str, tuple[tuple[type, ...], ...], Callable[..., object]]]] = {
    wire_format.TAG_INT: ("integer", ((bytes,),), lambda data: int.from_bytes(data, "big", signed=True)),
    wire_format.TAG_COMPLEX: ("complex number", ((float,), (float,)), complex),
    wire_format.TAG_DECIMAL: ("decimal number", (_TEXT,), decimal.Decimal),
    wire_format.TAG_UUID: ("UUID", ((bytes,),), lambda data: uuid.UUID(bytes=data)),
    wire_format.TAG_PATH: ("path", (_TEXT, (bool,), _TEXT), _build_path),
    wire_format.TAG_DATE: ("date", (_INT,) * 3, datetime.date),
    wire_format.TAG_TIME: ("time", _TIME, _build_time),
    wire_format.TAG_DATETIME: ("datetime", (*[_INT] * 3, *_TIME), _build_datetime),
    wire_format.TAG_TIMEDELTA: ("timedelta", (_INT,) * 3, datetime.timedelta),
    wire_format.TAG_OFFSET: ("time zone offset", (*[_INT] * 3, (str, type(None))), _build_offset),
    wire_format.TAG_ZONE: ("time zone", (_TEXT,), _build_zone),
}


def build_builtin(tag: int, payload: object) -> object:
    """The value of a payload. Raises `MalformedError`."""
    name, kinds, build = BUILDERS[tag]
    parts = payload if type(payload) is list and len(kinds) > 1 else [payload]
    if len(parts) != len(kinds) or any(type(part) not in allowed for part, allowed in zip(parts, kinds, strict=True)):
        printed = ", ".join(map(quoted, parts[:10]))
        raise MalformedError(f"{name} of {printed} has parts of other types or another number")
    try:
        return build(*parts)
    except _CONSTRUCTOR_ERRORS as error:
        is_zone = tag == wire_format.TAG_ZONE
        cure = "Install the package tzdata here." if is_zone else "Ask the sender for the message again."
        printed = ", ".join(map(quoted, parts))
        raise MalformedError(f"{name} of {printed} does not exist here: {error}", cure) from error
