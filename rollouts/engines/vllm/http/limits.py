"""Bounds of requests to one server, and the wait before a retry."""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass
from email.utils import parsedate_to_datetime


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Bounds of requests to one server: seconds, bytes, counts.

    At most `concurrency` requests are in flight per engine and event loop, whatever their routes. `total_seconds`
    bounds a whole call, including the wait for a slot and the retries. `read_seconds` bounds the time between two
    pieces of a response; None sets no bound, because a long completion sends nothing until it is done. Idle connections
    are closed after `keepalive_seconds`, which must be less than the server's own time (5 s in vLLM), so that no
    request is sent on a connection that the server is closing. The wait before retry number n is at most
    `backoff_seconds` * 2**(n - 1) and at most `longest_backoff_seconds`, which also bounds what a server can demand
    with Retry-After. `response_bytes` bounds a response after decompression.
    """

    concurrency: int = 512
    connect_seconds: float = 10.0
    read_seconds: float | None = None
    total_seconds: float = 3600.0
    keepalive_seconds: float = 3.0
    retries: int = 8
    backoff_seconds: float = 0.25
    longest_backoff_seconds: float = 15.0
    response_bytes: int = 256 * 2**20

    def __post_init__(self) -> None:
        for name, least in (("concurrency", 1), ("retries", 0), ("response_bytes", 1)):
            count = getattr(self, name)
            if type(count) is not int or count < least:
                raise ValueError(f"HttpLimits.{name} is {count!r} and must be a whole number, at least {least}")
        for name in ("connect_seconds", "total_seconds", "read_seconds"):
            seconds = getattr(self, name)
            if seconds is not None and not 0 < seconds < math.inf:
                raise ValueError(f"HttpLimits.{name} is {seconds!r} and must be a finite time above 0 s")
        for name in ("keepalive_seconds", "backoff_seconds", "longest_backoff_seconds"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"HttpLimits.{name} is {getattr(self, name)!r} and must be 0 s or more, and finite")

    def retry_delay(self, attempt: int, retry_after: str | None) -> float:
        """Seconds to wait after failed attempt number `attempt` (from 1).

        Full jitter: between 0 and the bound of this retry, so that requests which failed together do not return
        together. Where the server's Retry-After header gave a time, the wait is that time and the jitter of a first
        attempt: not earlier than demanded, and spread.
        Source: M. Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015.
        """
        demanded = _retry_after_seconds(retry_after)
        chance = random.random()  # noqa: S311 not a secret
        if demanded is not None:
            return min(demanded, self.longest_backoff_seconds) + chance * self.backoff_seconds
        return chance * min(self.longest_backoff_seconds, self.backoff_seconds * 2.0 ** min(attempt - 1, 62))


def _retry_after_seconds(value: str | None) -> float | None:
    """Seconds from now, for both forms of RFC 9110 section 10.2.3 (a number, a date); None for anything else."""
    try:
        seconds = float(value or "")
        return seconds if 0 <= seconds < math.inf else None
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(value or "").timestamp() - time.time())
    except (ValueError, OverflowError):
        return None
