"""Bounds of requests to one server."""

from __future__ import annotations

import math
from dataclasses import dataclass


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
            if isinstance(count, bool) or not isinstance(count, int) or count < least:
                raise ValueError(f"HttpLimits.{name} is {count!r} and must be a whole number, at least {least}")
        for name in ("connect_seconds", "total_seconds", "read_seconds"):
            seconds = getattr(self, name)
            if seconds is not None and not 0 < seconds < math.inf:
                raise ValueError(f"HttpLimits.{name} is {seconds!r} and must be a finite time above 0 s")
        for name in ("keepalive_seconds", "backoff_seconds", "longest_backoff_seconds"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"HttpLimits.{name} is {getattr(self, name)!r} and must be 0 s or more, and finite")
