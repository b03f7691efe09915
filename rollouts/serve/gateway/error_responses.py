"""Errors as HTTP responses in OpenAI's form."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any, Final, NamedTuple

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from renderers import RendererError
from renderers.errors import MediaError, MessageError, PlaceholderCountError, TemplateError, TokenizerError
from rollouts.episodes.limits import OVERLONG_ERRORS
from rollouts.error_texts import as_unicode
from rollouts.errors import (
    EngineClosedError,
    EngineError,
    EngineStartError,
    GenerationInterruptedError,
    InvalidRequestError,
    RolloutsError,
    ServerTimeoutError,
    ServerUnreachableError,
    TrajectoryError,
    TrajectoryFinishedError,
    UnknownAdapterError,
)
from rollouts.serve.errors import RequestError
from rollouts.serve.gateway.errors import GatewayError

_log = logging.getLogger("rollouts")

Handler = Callable[[Any, Request], Awaitable[Response]]


class _Answer(NamedTuple):
    status: int
    type: str
    code: str | None


_INVALID: Final = "invalid_request_error"
_SERVER: Final = "server_error"

#: The first row that has the class of an error says how it is answered.
_ANSWERS: Final[tuple[tuple[tuple[type[Exception], ...], _Answer], ...]] = (
    (OVERLONG_ERRORS, _Answer(400, _INVALID, "context_length_exceeded")),
    ((UnknownAdapterError,), _Answer(404, _INVALID, "model_not_found")),
    ((InvalidRequestError,), _Answer(400, _INVALID, None)),
    (
        (MessageError, MediaError, TemplateError, PlaceholderCountError, TokenizerError),
        _Answer(400, _INVALID, "invalid_message"),
    ),
    ((TrajectoryFinishedError,), _Answer(409, _INVALID, "session_ended")),
    ((TrajectoryError,), _Answer(400, _INVALID, None)),
    ((ServerTimeoutError,), _Answer(504, _SERVER, "timeout")),
    (
        (ServerUnreachableError, EngineClosedError, EngineStartError, GenerationInterruptedError),
        _Answer(503, _SERVER, "engine_unavailable"),
    ),
    ((EngineError,), _Answer(502, _SERVER, "engine_error")),
    ((RolloutsError, RendererError), _Answer(500, _SERVER, "internal_error")),
)


def error_response(error: GatewayError | RolloutsError | RendererError) -> JSONResponse:
    """The response for an error: `{"error": {"message", "type", "param", "code"}}` with its HTTP status."""
    if isinstance(error, GatewayError):
        answer, param = _Answer(error.status, error.type, error.code), error.param
    elif isinstance(error, RequestError):  # of a middleware of the application
        answer, param = _Answer(error.status, _INVALID if error.status < 500 else _SERVER, None), error.param
    else:
        answer, param = next(answer for kinds, answer in _ANSWERS if isinstance(error, kinds)), None
    if answer.status >= 500:
        _log.error("the gateway answers HTTP %d: %s", answer.status, error, exc_info=answer.status == 500)
    texts = {"message": as_unicode(str(error)), "param": param and as_unicode(param)}
    body = {**texts, "type": answer.type, "code": answer.code}
    headers = {"Retry-After": "1"} if answer.status == 503 else None
    return JSONResponse({"error": body}, answer.status, headers)


def answering_errors(handler: Handler) -> Handler:
    """A handler whose known errors become responses."""

    @wraps(handler)
    async def answering(owner: Any, request: Request) -> Response:
        try:
            return await handler(owner, request)
        except (RolloutsError, RendererError) as error:
            return error_response(error)

    return answering
