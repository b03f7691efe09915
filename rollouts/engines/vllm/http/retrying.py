"""How long to wait before a retry: exponential backoff with full jitter, and the server's Retry-After header."""

from __future__ import annotations

import math
import random
import time
from email.utils import parsedate_to_datetime

from rollouts.engines.vllm.http.limits import HttpLimits


def retry_delay(attempt: int, limits: HttpLimits, retry_after: str | None) -> float:
    """Seconds to wait after failed attempt number `attempt` (from 1).

    Full jitter: between 0 and a bound that doubles from `backoff_seconds` to `longest_backoff_seconds`, so that
    requests which failed together do not return together. Where the server's Retry-After header gave a time, the wait
    is that time, at most `longest_backoff_seconds`, plus the jitter of a first attempt: not earlier than demanded, and
    spread.
    Source: M. Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015.
    """
    demanded = _retry_after_seconds(retry_after) if retry_after is not None else None
    chance = random.random()  # noqa: S311 not a secret
    if demanded is not None:
        return min(demanded, limits.longest_backoff_seconds) + chance * limits.backoff_seconds
    return chance * min(limits.longest_backoff_seconds, limits.backoff_seconds * 2.0 ** min(attempt - 1, 62))


def _retry_after_seconds(value: str) -> float | None:
    """Seconds from now, for both forms of RFC 9110 section 10.2.3 (a number, a date); None for anything else."""
    try:
        seconds = float(value)
        return seconds if math.isfinite(seconds) and seconds >= 0 else None
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None
