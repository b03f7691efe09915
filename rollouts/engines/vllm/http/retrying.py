"""When to try again: exponential backoff with full jitter, and what a server's Retry-After says."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime


@dataclass(frozen=True, slots=True)
class Timing:
    """Where waiting, time and chance come from. `monotonic` and `wall` are in seconds, `chance` is in [0, 1)."""

    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    chance: Callable[[], float] = random.random


def backoff_seconds(attempt: int, chance: float, *, first: float, longest: float, retry_after: float | None) -> float:
    """How long to wait after failed attempt number `attempt` (from 1).

    Full jitter: anything between nothing and the bound, which doubles from `first` to `longest`, so that requests which
    failed together do not come back together. A server that named a time gets that time, up to `longest`, and the
    jitter of a first attempt on top: never earlier than asked (unless it asked for more than `longest`), yet spread.
    Source: M. Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015.
    """
    if retry_after is not None:
        return min(retry_after, longest) + chance * first
    return chance * min(longest, first * 2.0 ** min(attempt - 1, 62))


def retry_after_seconds(value: str | None, now: float) -> float | None:
    """Seconds that a Retry-After header asks for, `now` being Unix time; None if there is none or it says nothing.

    Both forms of RFC 9110 section 10.2.3, a number and a date. A date that has passed is 0.
    """
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        pass
    else:
        return seconds if math.isfinite(seconds) and seconds >= 0 else None
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - now)
    except (ValueError, OverflowError):
        return None
