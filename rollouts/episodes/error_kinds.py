"""Which failures of an episode another attempt may not have."""

from __future__ import annotations

from renderers.errors import MediaFetchError
from rollouts.episodes.errors import EnvironmentFailedError, ErrorKind, RemoteFailureError
from rollouts.errors import (
    EngineError,
    EngineFailedError,
    GenerationInterruptedError,
    ServerError,
    ServerTimeoutError,
    ServerUnreachableError,
)

_ENGINE = (ServerUnreachableError, ServerTimeoutError, GenerationInterruptedError)
_TOO_MANY_REQUESTS = 429
_OF_OTHER_PARTS = (EngineError, EnvironmentFailedError, MediaFetchError)


def error_kind(error: BaseException) -> ErrorKind | None:
    """The kind of the error of an episode; None for one that another attempt would have, too."""
    if isinstance(error, RemoteFailureError):
        return error.kind
    if isinstance(error, EnvironmentFailedError):
        # An environment may call engines: the policy's for a sub-agent, or that of a simulated user.
        cause = error.__cause__
        return error_kind(cause) if isinstance(cause, _OF_OTHER_PARTS) else "environment"
    if isinstance(error, MediaFetchError):
        return "media"
    if isinstance(error, ServerError):
        return "engine" if error.status == _TOO_MANY_REQUESTS or error.status >= 500 else None
    is_io_error = isinstance(error, EngineFailedError) and isinstance(error.__cause__, OSError)
    return "engine" if is_io_error or isinstance(error, _ENGINE) else None
