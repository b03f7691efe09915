"""Values of Python's own classes that msgpack cannot pack: large ints, dates and times.

Each becomes an entry: a tag and a payload of plain values. The zone of a datetime is an entry, too, so that datetimes
which share a zone object share it after decoding.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any, Final

from transport.errors import MalformedError, quoted
from transport.wire import wire_format


def _encode_time(time: datetime.time) -> list[object]:
    return [time.hour, time.minute, time.second, time.microsecond, time.fold, time.tzinfo]


def _build_time(hour: int, minute: int, second: int, microsecond: int, fold: int, zone: Any) -> datetime.time:
    return datetime.time(hour, minute, second, microsecond, zone, fold=fold)


def _encode_datetime(moment: datetime.datetime) -> list[object]:
    return [moment.year, moment.month, moment.day, *_encode_time(moment.timetz())]


def _build_datetime(year: int, month: int, day: int, *time: Any) -> datetime.datetime:
    return datetime.datetime.combine(datetime.date(year, month, day), _build_time(*time))


def _encode_timedelta(span: datetime.timedelta) -> list[object]:
    return [span.days, span.seconds, span.microseconds]


def _encode_offset(zone: datetime.timezone) -> list[object]:
    offset = zone.utcoffset(None)
    name = zone.tzname(None)
    named = name != datetime.timezone(offset).tzname(None)
    return [*_encode_timedelta(offset), name if named else None]


def _build_offset(days: int, seconds: int, microseconds: int, name: str | None) -> datetime.timezone:
    offset = datetime.timedelta(days, seconds, microseconds)
    return datetime.timezone(offset) if name is None else datetime.timezone(offset, name)


_INT, _ZONES = (int,), (type(None), datetime.timezone)
_TIME = (*[_INT] * 5, _ZONES)

# class -> tag, how an instance becomes a payload
ENCODERS: Final[dict[type, tuple[int, Callable[[Any], object]]]] = {
    int: (wire_format.TAG_INT, lambda value: value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True)),
    datetime.date: (wire_format.TAG_DATE, lambda value: [value.year, value.month, value.day]),
    datetime.time: (wire_format.TAG_TIME, _encode_time),
    datetime.datetime: (wire_format.TAG_DATETIME, _encode_datetime),
    datetime.timedelta: (wire_format.TAG_TIMEDELTA, _encode_timedelta),
    datetime.timezone: (wire_format.TAG_OFFSET, _encode_offset),
}

# tag -> name of the value for errors, the types of its parts, the constructor. The types are exact, because a
# constructor may accept others: datetime accepts bytes as a pickled state.
BUILDERS: Final[dict[int, tuple[str, tuple[tuple[type, ...], ...], Callable[..., object]]]] = {
    wire_format.TAG_INT: ("integer", ((bytes,),), lambda data: int.from_bytes(data, "big", signed=True)),
    wire_format.TAG_DATE: ("date", (_INT,) * 3, datetime.date),
    wire_format.TAG_TIME: ("time", _TIME, _build_time),
    wire_format.TAG_DATETIME: ("datetime", (*[_INT] * 3, *_TIME), _build_datetime),
    wire_format.TAG_TIMEDELTA: ("timedelta", (_INT,) * 3, datetime.timedelta),
    wire_format.TAG_OFFSET: ("time zone offset", (*[_INT] * 3, (str, type(None))), _build_offset),
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
    # What these constructors raise for wrong arguments.
    except (ArithmeticError, TypeError, ValueError) as error:
        raise MalformedError(f"{name} of {', '.join(map(quoted, parts))} does not exist: {error}") from error
