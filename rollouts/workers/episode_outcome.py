"""How an attempt at an episode ended, as a value that crosses processes."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import Final, Self, get_args

from rollouts.episodes.error_kinds import error_kind, is_outage
from rollouts.episodes.errors import (
    EnvironmentFailedError,
    EpisodeError,
    ErrorKind,
    RemoteFailureError,
    RendererFailedError,
)
from rollouts.error_texts import as_unicode
from rollouts.errors import ArgumentError
from rollouts.trajectory.tree import Trajectory
from transport import wire_type

#: Characters of a traceback that are sent: its end, where the exception was raised.
_MOST_TRACE: Final = 16_000
# The code of a user, in which the traceback of an exception shows the line to correct.
_WITH_TRACE: Final = (EnvironmentFailedError, RendererFailedError)


@wire_type("rollouts.EpisodeFailure")
@dataclass(frozen=True, slots=True)
class EpisodeFailure:
    """Why an attempt failed: the class of the exception, its text, its kind for `RetryPolicy`, and a traceback.

    `trace` is empty for exceptions that no code of a user raised. `is_outage`: the engine could not be reached.
    Raises `ArgumentError` for values of other types, also when decoded.
    """

    error_type: str
    reason: str
    kind: ErrorKind | None
    trace: str = ""
    is_outage: bool = False

    def __post_init__(self) -> None:
        for name in ("error_type", "reason", "trace"):
            if not isinstance(getattr(self, name), str):
                raise ArgumentError(f"EpisodeFailure.{name}", getattr(self, name), "pass text")
        if not isinstance(self.is_outage, bool):
            raise ArgumentError("EpisodeFailure.is_outage", self.is_outage, "pass True or False")
        if self.kind is not None and self.kind not in get_args(ErrorKind):
            raise ArgumentError("EpisodeFailure.kind", self.kind, f"pass one of {', '.join(get_args(ErrorKind))}, None")


@wire_type("rollouts.EpisodeOutcome")
@dataclass(frozen=True, slots=True, eq=False)
class EpisodeOutcome:
    """A finished trajectory and, if the attempt failed, the reason. A failed one holds the completed turns.

    Raises `ArgumentError` for values of other types, also when decoded.
    """

    episode: Trajectory
    failure: EpisodeFailure | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.episode, Trajectory):
            raise ArgumentError("EpisodeOutcome.episode", self.episode, "pass a Trajectory")
        if not isinstance(self.failure, EpisodeFailure | None):
            raise ArgumentError("EpisodeOutcome.failure", self.failure, "pass an EpisodeFailure or None")

    @classmethod
    def of_error(cls, error: EpisodeError) -> Self:
        """The outcome of an attempt that failed with `error`."""
        cause = error.__cause__ or error
        failure = EpisodeFailure(
            type(cause).__name__, as_unicode(error.reason), error_kind(cause), _trace(cause), is_outage(cause)
        )
        return cls(error.trajectory, failure)

    def result(self) -> Trajectory:
        """The trajectory. Raises `EpisodeError`, with a `RemoteFailureError` as its cause, if the attempt failed."""
        failure = self.failure
        if failure is None:
            return self.episode
        cause = RemoteFailureError(
            failure.error_type, failure.reason, failure.kind, failure.trace, is_outage=failure.is_outage
        )
        raise EpisodeError(failure.reason, self.episode) from cause


def _trace(error: BaseException) -> str:
    if not isinstance(error, _WITH_TRACE) or error.__cause__ is None:
        return ""
    return as_unicode("".join(traceback.format_exception(error.__cause__)))[-_MOST_TRACE:]
