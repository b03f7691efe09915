"""How much a message may cost the process that decodes it."""

from __future__ import annotations

import dataclasses
import operator
from dataclasses import dataclass

from transport.errors import LimitError

MAX_DEPTH = 1000
"""Objects inside each other that the encoder writes, and the decoder accepts by default."""


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """Bounds checked before anything is allocated.

    `max_frames` (media left out as held count, too) and `max_total_bytes` bound the message with its large arrays and
    media, which are views and cost no memory of their own. In a compressed record file they do: there `max_total_bytes`
    bounds what all that one reader decompressed and that is still in use takes together.

    `max_header_bytes` bounds the part that becomes Python objects, small arrays among them: up to about 100 bytes of
    memory for each byte of it. `max_objects` counts tuples, sets and registered objects; each may take what the
    defaults of its class make in addition (a `Trajectory` of which nothing was sent some 500 bytes). `max_depth` counts
    the same inside each other; lists and dicts between two of those may nest 1024 deep (a fixed limit of msgpack).

    Raises `ValueError` for a limit that is not an integer from 0: nothing is above a NaN, which would be no limit.
    """

    max_frames: int = 1 << 16
    max_header_bytes: int = 64 << 20
    max_objects: int = 1 << 22
    max_total_bytes: int = 4 << 30
    max_depth: int = MAX_DEPTH

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            object.__setattr__(self, each.name, checked_limit(f"DecodeLimits.{each.name}", getattr(self, each.name), 0))

    def check(self, limit: str, actual: int) -> None:
        """Raise `LimitError` if `actual` is above the field called `limit`."""
        allowed: int = getattr(self, limit)
        if actual > allowed:
            raise LimitError(limit, allowed, actual)


def checked_limit(name: str, value: object, least: int) -> int:
    """An integer from `least`, numpy's among them, as an int. Raises `ValueError`."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None:
        raise ValueError(f"{name} is {value!r:.80} and must be an integer.")
    if number < least:
        raise ValueError(f"{name} is {number} and must be at least {least}.")
    return number
