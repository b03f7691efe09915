"""Which failures of an episode another attempt may not have, and which of them last as long as an outage."""

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
_NO_SERVER_BEHIND = (502, 503)  # from a proxy or a router; a server that is starting says 503, too
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


def is_outage(error: BaseException) -> bool:
    """Whether an episode failed because its engine cannot be reached at all, as while a server is started again."""
    if isinstance(error, RemoteFailureError):
        return error.is_outage
    if isinstance(error, EnvironmentFailedError):
        return error.__cause__ is not None and is_outage(error.__cause__)
    if isinstance(error, ServerError):
        return error.status in _NO_SERVER_BEHIND
    if isinstance(error, EngineFailedError):
        return isinstance(error.__cause__, ConnectionError)
    return isinstance(error, ServerUnreachableError)
