"""Which failed episodes are run again, how often, and after how long."""

import random
from collections.abc import Collection
from dataclasses import dataclass

from rollouts.episodes.errors import ErrorKind, error_kind, is_outage
from rollouts.values import Bounded, check_choice, number_field, whole_field


@dataclass(frozen=True, slots=True)
class RetryPolicy(Bounded):
    """Runs a failed episode again, from its beginning, where its error is of one of `kinds`.

    - "engine": a server that is unreachable, too slow, overloaded (HTTP 429) or fails (HTTP 500 and above), an aborted
      completion, and an `OSError` (which includes `ConnectionError` and `TimeoutError`) of another engine.
    - "media": a URL from which a medium could not be fetched.
    - "environment": an exception that an environment raised, in `make_environment` too.

    All other errors would occur again: invalid arguments and requests, missing log-probabilities, values that an
    environment must not return, messages that cannot be rendered.

    An episode has at most `max_attempts`. The delay before attempt 2 is `first_delay` seconds, each further one twice
    as long as the one before it, up to `max_delay`, and all are shortened at random by up to a half, so that many
    episodes that failed together do not return together.

    A server that is started again takes minutes. So attempts that fail because the engine cannot be reached at all (no
    connection, or HTTP 502 and 503) do not count as long as the first of them in a row is less than `outage_seconds`
    ago; they need the kind "engine". Raises `ArgumentError`.
    """

    max_attempts: int = whole_field(3)
    kinds: Collection[ErrorKind] = ("engine", "media")
    first_delay: float = number_field(1.0, least=0)
    max_delay: float = number_field(30.0, least=0)
    outage_seconds: float = number_field(600.0, least=0)

    def __post_init__(self) -> None:
        Bounded.__post_init__(self)
        for kind in self.kinds:
            check_choice("kinds", kind, ErrorKind)

    def backoff(self, attempts: int) -> float:
        """The seconds before the next attempt, after `attempts` that failed."""
        # The exponent has a bound because 2.0 ** 1024 raises `OverflowError`.
        delay = min(self.max_delay, self.first_delay * 2.0 ** min(attempts - 1, 60))
        return delay * random.uniform(0.5, 1.0)  # noqa: S311  no secret depends on it


class FailedAttempts:
    """The attempts at one episode that failed, as its policy counts them. `attempts` were made in earlier processes."""

    def __init__(self, policy: RetryPolicy, attempts: int) -> None:
        self._policy = policy
        # Of earlier attempts it is not known which were made in an outage: as many as leave one.
        self._counted = min(attempts, policy.max_attempts - 1)
        self._in_outage = 0  # the latest attempts, all of which could not reach the engine
        self._outage_began = 0.0

    def delay(self, error: BaseException, now: float) -> float | None:
        """The seconds before the next attempt, after one that failed with `error`; None if there is no other.

        `now` is the time in seconds of a clock that does not go back.
        """
        if is_outage(error) and "engine" in self._policy.kinds:
            if not self._in_outage:
                self._outage_began = now
            self._in_outage += 1
            left = self._outage_began + self._policy.outage_seconds - now
            if left > 0:
                return min(left, self._policy.backoff(self._in_outage))
        else:
            self._in_outage = 0
        self._counted += 1
        if self._counted >= self._policy.max_attempts or error_kind(error) not in self._policy.kinds:
            return None
        return self._policy.backoff(self._counted)
