"""Limits on the memory that decoding a message may take."""

from dataclasses import dataclass
from typing import Final

from transport.errors import LimitError, quoted


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """Limits that are checked before memory is allocated.

    `max_frames` (omitted media count, too) and `max_total_bytes` limit the whole message. Its large arrays
    and media are views on the received bytes and take no further memory.

    `max_header_bytes` limits the part that becomes Python objects, small arrays included; each byte of it can
    take about 100 bytes of memory. `max_objects` limits the number of arrays, tuples, sets and registered
    objects; the default values of a class take memory in addition (about 500 bytes for a `Trajectory` without
    any field). Lists, dicts and objects nest at most 1024 deep, a fixed limit of msgpack.

    Raises `ValueError` for a limit that is not an integer of at least 0 (a NaN would be no limit, because no
    number is greater than NaN).
    """

    max_frames: int = 1 << 16
    max_header_bytes: int = 64 << 20
    max_objects: int = 1 << 22
    max_total_bytes: int = 4 << 30

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                raise ValueError(f"DecodeLimits.{name} is {quoted(value)} and must be an integer of at least 0.")

    def check(self, limit: str, actual: int) -> None:
        """Raise `LimitError` if `actual` is above the field called `limit`."""
        allowed: int = getattr(self, limit)
        if actual > allowed:
            raise LimitError(limit, allowed, actual)


DEFAULT_LIMITS: Final = DecodeLimits()
