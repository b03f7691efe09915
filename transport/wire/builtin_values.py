"""Values of Python's own classes that msgpack cannot pack: tuples, sets, large ints, dates and times.

`PARTS` takes a value apart, `BUILDERS` makes it of its parts again.
"""

import datetime
from collections.abc import Callable, Sequence
from typing import Any, Final

from transport.errors import EncodeError, MalformedError, quoted
from transport.wire import wire_format

Parts = Callable[[Any], Sequence[object]]
Build = Callable[[list[Any]], object]


def is_safe_key(value: object) -> bool:
    """Whether a message may have this value as a key of a dict or in a set: it is hashed."""
    if type(value) is int:
        return value.bit_length() <= wire_format.KEY_BITS
    return type(value) in wire_format.KEY_TYPES


def _set_parts(members: set[Any] | frozenset[Any]) -> Sequence[object]:
    unsafe = next((member for member in members if not is_safe_key(member)), None)
    if unsafe is not None:
        what = "an integer of more than 64 bits" if type(unsafe) is int else f"members of type {type(unsafe).__name__}"
        raise EncodeError("value", f"set with {what}", "Send a list.")
    return list(members)


def _build_frozenset(members: list[Any]) -> frozenset[Any]:
    if not all(map(is_safe_key, members)):
        raise MalformedError("set with members that are not plain values of at most 64 bits")
    built = frozenset(members)
    if len(built) != len(members):
        raise MalformedError("set with one member twice")
    return built


def _time_parts(moment: datetime.time | datetime.datetime) -> tuple[object, ...]:
    return moment.replace(tzinfo=None).isoformat(), moment.fold, moment.tzinfo


def _offset_parts(zone: datetime.timezone) -> tuple[object, ...]:
    offset, name = zone.utcoffset(None), zone.tzname(None)
    return offset, None if name == datetime.timezone(offset).tzname(None) else name


PARTS: Final[dict[type, tuple[int, Parts]]] = {
    tuple: (wire_format.KIND_TUPLE, lambda members: members),
    set: (wire_format.KIND_SET, _set_parts),
    frozenset: (wire_format.KIND_FROZENSET, _set_parts),
    int: (wire_format.KIND_INT, lambda n: (n.to_bytes(n.bit_length() // 8 + 1, "big", signed=True),)),
    datetime.date: (wire_format.KIND_DATE, lambda day: (day.isoformat(),)),
    datetime.time: (wire_format.KIND_TIME, _time_parts),
    datetime.datetime: (wire_format.KIND_DATETIME, _time_parts),
    datetime.timedelta: (wire_format.KIND_TIMEDELTA, lambda span: (span.days, span.seconds, span.microseconds)),
    datetime.timezone: (wire_format.KIND_OFFSET, _offset_parts),
}


def _builder(name: str, types: tuple[type | tuple[type, ...], ...], construct: Callable[..., object]) -> Build:
    """The function that makes a value of its parts, which have these types, exactly: bool is an int, too."""
    allowed = [kind if isinstance(kind, tuple) else (kind,) for kind in types]

    def build(parts: list[Any]) -> object:
        if len(parts) != len(allowed) or any(
            type(part) not in kinds for part, kinds in zip(parts, allowed, strict=True)
        ):
            raise MalformedError(f"{name} of {_printed(parts)} has parts of other types or another number")
        try:
            return construct(*parts)
        except (ArithmeticError, TypeError, ValueError) as error:  # what these constructors raise for wrong parts
            raise MalformedError(f"{name} of {_printed(parts)} does not exist: {error}") from error

    return build


def _printed(parts: list[Any]) -> str:
    return ", ".join(map(quoted, parts[:10]))


def _moment(kind: type[datetime.time | datetime.datetime]) -> Callable[..., object]:
    return lambda text, fold, zone: kind.fromisoformat(text).replace(fold=fold, tzinfo=zone)


_MOMENT_TYPES: Final = (str, int, (type(None), datetime.timezone))

BUILDERS: Final[dict[int, Build]] = {
    wire_format.KIND_TUPLE: tuple,
    wire_format.KIND_SET: lambda members: set(_build_frozenset(members)),
    wire_format.KIND_FROZENSET: _build_frozenset,
    wire_format.KIND_INT: _builder("integer", (bytes,), lambda data: int.from_bytes(data, "big", signed=True)),
    wire_format.KIND_DATE: _builder("date", (str,), datetime.date.fromisoformat),
    wire_format.KIND_TIME: _builder("time", _MOMENT_TYPES, _moment(datetime.time)),
    wire_format.KIND_DATETIME: _builder("datetime", _MOMENT_TYPES, _moment(datetime.datetime)),
    wire_format.KIND_TIMEDELTA: _builder("timedelta", (int, int, int), datetime.timedelta),
    wire_format.KIND_OFFSET: _builder(
        "time zone offset",
        (datetime.timedelta, (str, type(None))),
        lambda offset, name: datetime.timezone(offset) if name is None else datetime.timezone(offset, name),
    ),
}
