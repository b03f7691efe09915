"""Errors of a server as responses: OpenAI's form, a row an error."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import wraps
from typing import Any, ClassVar, Final, NamedTuple

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Match, Route

from renderers import RendererError
from renderers.errors import MediaError, MessageError, PlaceholderCountError, TemplateError, TokenizerError
from rollouts.episodes.deadlines import OVERLONG_ERRORS
from rollouts.errors import (
    ApiKeyError,
    CapabilityError,
    EngineClosedError,
    EngineError,
    EngineStartError,
    GenerationInterruptedError,
    InvalidRequestError,
    MissingExtraError,
    RolloutsError,
    ServerError,
    ServerTimeoutError,
    ServerUnreachableError,
    TrajectoryError,
    TrajectoryFinishedError,
    UnknownAdapterError,
    WeightUpdateError,
    as_unicode,
    describe_exception,
)

# Errors of `rollouts serve`: of starting the server, and of requests that it refuses.


class ServeError(RolloutsError):
    """Root of the errors of `rollouts serve`.

    Cure: that of the class that was raised.
    """


class PortUnavailableError(ServeError):
    """The server cannot listen on this address.

    Cure: pass another port, or `--port 0` for any that is free.
    """

    def __init__(self, host: str, port: int, reason: str) -> None:
        self.host = host
        self.port = port
        super().__init__(f"cannot listen on {host} port {port}: {reason}. Pass --port 0 for any free port, or another")


class UnprotectedAddressError(ServeError):
    """Other machines would reach a server without an API key.

    Cure: pass `--api-key-file`, or `--host 127.0.0.1`.
    """

    def __init__(self, host: str) -> None:
        self.host = host
        super().__init__(
            f"{host} is not an address of this machine alone, and there is no API key: anyone who reaches the port "
            "could use the model and replace its weights. Pass --api-key-file, or --host 127.0.0.1"
        )


class ApiKeyFileError(ServeError):
    """The file with the API key cannot be used. `path` is the file.

    Cure: pass a readable file that holds the key alone.
    """

    def __init__(self, path: object, reason: str) -> None:
        self.path = path
        super().__init__(f"--api-key-file {path}: {reason}")


class RequestError(ServeError):
    """The response to a request is an error. `status` is that of HTTP; `kind` and `param` as in vLLM's errors.

    Cure: correct the field of the request that the response names.
    """

    def __init__(self, status: int, message: str, kind: str = "BadRequestError", param: str | None = None) -> None:
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        super().__init__(f"HTTP {status} {kind}: {message}")


log = logging.getLogger("rollouts.serve")

#: Paths of OpenAI's API, whose clients read errors in its form.
_OPENAI_PATHS = ("/v1/", "/sessions/")

#: What vLLM tells a client about an error of its own; the reason is only in the log.
INTERNAL_ERROR = "Internal server error"


def error_response(status: int, message: str, kind: str, param: str | None = None) -> JSONResponse:
    """vLLM's form of an error."""
    return JSONResponse({"error": {"message": message, "type": kind, "param": param, "code": status}}, status)


def is_openai_path(path: str) -> bool:
    """Whether clients of OpenAI's API request this path."""
    return f"{path}/".startswith(_OPENAI_PATHS)


def openai_error_response(status: int, message: str, code: str) -> JSONResponse:
    """OpenAI's form of an error that is due to the request."""
    fields = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return JSONResponse({"error": fields}, status)


def request_error(error: Exception) -> RequestError:
    """The error that the client of a request gets for an exception of the engine or the renderer."""
    match error:
        case RequestError():
            return error
        case ServerError(status=status, reason=reason):  # of the server behind this one
            return RequestError(status if 400 <= status < 600 else 502, reason, "UpstreamError")
        case ApiKeyError():
            return RequestError(502, error.reason, "UpstreamError")
        case UnknownAdapterError():
            return RequestError(404, f"The model `{error.adapter[:200]}` does not exist.", "NotFoundError", "model")
        case MissingExtraError():
            return RequestError(501, str(error), "NotImplementedError")
        case InvalidRequestError() | CapabilityError():
            return RequestError(400, error.reason)
        case EngineClosedError() | ServerUnreachableError():
            return RequestError(503, error.reason, "ServiceUnavailableError")
        case ServerTimeoutError():
            return RequestError(504, error.reason, "TimeoutError")
        case RendererError():
            return RequestError(400, str(error))
        case WeightUpdateError():
            return RequestError(500, str(error), "InternalServerError")
        case EngineError():
            return RequestError(500, error.reason, "InternalServerError")
        case _:
            return RequestError(500, INTERNAL_ERROR, "InternalServerError")


async def on_error(request: Request, error: Exception) -> Response:
    """Starlette's handler of the exceptions of routes."""
    refusal = request_error(error)
    if refusal.status >= 500 and not isinstance(error, RequestError):
        log.error("%s %s: %s", request.method, request.url.path, error, exc_info=error)
    return error_response(refusal.status, refusal.message, refusal.kind, refusal.param)


class GatewayError(RolloutsError):
    """A request is refused. `param` names the field of the request that is the reason; None where there is none.

    Cure: correct the request; `param` names the field.
    """

    status: ClassVar[int] = 400
    type: ClassVar[str] = "invalid_request_error"
    code: ClassVar[str | None] = None

    def __init__(self, message: str, param: str | None = None) -> None:
        self.param = param
        super().__init__(message)


class InvalidChatRequestError(GatewayError):
    """A field of a request has a wrong type or value, or is unknown.

    Cure: correct the field that the text names.
    """


class UnsupportedFieldError(GatewayError):
    """A field of a request has a value that this server cannot honour.

    Cure: leave the field out, or give it the value that the text names.
    """

    code = "unsupported_parameter"


class InvalidMessageError(GatewayError):
    """A message of a request, or an image in it, cannot be rendered.

    Cure: correct the message or the image at the place that the text names.
    """

    code = "invalid_message"


class UnknownModelError(GatewayError):
    """A request names a model that is not served. `models` are the names of the model that is.

    Cure: request one of the listed models, or start the server with `--any-model`.
    """

    status = 404
    code = "model_not_found"

    def __init__(self, model: str, models: tuple[str, ...]) -> None:
        self.models = models
        super().__init__(f"the model {model[:200]!r} does not exist; this server has {', '.join(models)}", "model")


class UnknownSessionError(GatewayError):
    """There is no session of this id.

    Cure: send a chat completion with this id first, or correct the id.
    """

    status = 404
    code = "session_not_found"

    def __init__(self, session_id: str) -> None:
        self.session_id = session_id
        super().__init__(f"there is no session {session_id!r}; a chat completion with this id begins it")


class EvictedSessionError(GatewayError):
    """The session was removed. `reason` says why.

    Cure: begin another session, with another id; fetch trajectories before they are evicted, or raise the limits of the
    gateway.
    """

    status = 410
    code = "session_gone"

    def __init__(self, session_id: str, reason: str) -> None:
        self.session_id = session_id
        self.reason = reason
        super().__init__(f"the session {session_id!r} is gone: {reason}. Begin another one, with another id")


class EndedSessionError(GatewayError):
    """The session has ended: its trajectory can be read, and does not change any more.

    Cure: begin another session, with another id.
    """

    status = 409
    code = "session_ended"

    def __init__(self, session_id: str) -> None:
        self.session_id = session_id
        super().__init__(f"the session {session_id!r} has ended; begin another one, with another id")


class ExistingSessionError(GatewayError):
    """A session of this id exists.

    Cure: use another id.
    """

    status = 409
    code = "session_exists"

    def __init__(self, session_id: str) -> None:
        self.session_id = session_id
        super().__init__(f"there is a session {session_id!r} already; use another id")


class SessionNotDeliveredError(GatewayError):
    """`on_session_end` did not accept the trajectories of the sessions `session_ids`, which are kept.

    Cure: remove the cause that the text names, and end the sessions again.
    """

    status = 500
    type = "server_error"
    code = "session_not_delivered"

    def __init__(self, session_ids: Sequence[str], error: BaseException) -> None:
        self.session_ids = tuple(session_ids)
        self.reason = describe_exception(error)
        shown = ", ".join(self.session_ids[:5]) + (" and others" if len(self.session_ids) > 5 else "")
        count = f"the trajectories of {len(self.session_ids)} sessions" if len(self.session_ids) > 1 else "a trajectory"
        super().__init__(
            f"{count} ({shown}) could not be handed over: {self.reason}. Nothing of it is lost yet: "
            "remove the cause, and end the session again"
        )


class GatewayFullError(GatewayError):
    """The sessions have reached a limit of the gateway.

    Cure: fetch and delete sessions that have ended, or raise `max_sessions` and `max_bytes`.
    """

    status = 503
    type = "server_error"
    code = "gateway_full"


class BodyTooLargeError(GatewayError):
    """The body of a request is longer than `limit` bytes.

    Cure: send less or smaller images, or raise `max_body_bytes` of the gateway.
    """

    status = 413
    code = "body_too_large"

    def __init__(self, limit: int) -> None:
        self.limit = limit
        super().__init__(f"the body of the request is longer than max_body_bytes={limit}; send less, or smaller images")


class BodyTimeoutError(GatewayError):
    """The body of a request did not arrive in time.

    Cure: send the body without pauses, or over a faster connection.
    """

    status = 408
    code = "body_timeout"

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        super().__init__(f"the body of the request did not arrive within {seconds:g} s")


class ContentTypeError(GatewayError):
    """The body of a request is not declared as JSON.

    Cure: send `Content-Type: application/json`.
    """

    status = 415
    code = "unsupported_media_type"

    def __init__(self, content_type: str) -> None:
        self.content_type = content_type
        super().__init__(f"the content type is {content_type[:100]!r}; send application/json")


class GenerationTimeoutError(GatewayError):
    """The engine did not finish a completion in time.

    Cure: raise `request_seconds`, lower `max_tokens`, or send fewer requests at once.
    """

    status = 504
    type = "server_error"
    code = "timeout"

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        super().__init__(f"no completion within request_seconds={seconds:g}; nothing of it is recorded")


class ClientDisconnectedError(GatewayError):
    """The client closed the connection before its completion was finished.

    Cure: none is needed: the request was aborted. A client that gives up too early needs a longer timeout.
    """

    status = 499
    code = "client_disconnected"

    def __init__(self, session_id: str) -> None:
        self.session_id = session_id
        super().__init__(f"the client of session {session_id!r} closed the connection; the request was aborted")


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


def gateway_error_response(error: GatewayError | RolloutsError | RendererError) -> JSONResponse:
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
            return gateway_error_response(error)

    return answering


# Responses for requests that no route takes: HTTP 404 for another path, 405 for another method.


_NOT_ALLOWED = 405


async def on_unrouted(request: Request, error: Exception) -> Response:
    """Starlette's handler of the error with which its router refuses a request.

    The response has OpenAI's form for paths of its API, and names the routes or methods that there are; else vLLM's.
    """
    assert isinstance(error, HTTPException)  # the only one that it is registered for
    methods = _methods(request) if error.status_code == _NOT_ALLOWED else []
    if not is_openai_path(request.url.path):
        response = JSONResponse({"detail": error.detail}, error.status_code)
    elif methods:
        message = f"{_quoted(request)}: this path takes {' and '.join(methods)}"
        response = openai_error_response(error.status_code, message, "method_not_supported")
    else:
        routes = ", ".join(_openai_routes(request.app.routes))
        message = f"{_quoted(request)}: there is no such route. The routes of OpenAI's API are {routes}"
        response = openai_error_response(error.status_code, message, "unknown_url")
    if methods:
        response.headers["Allow"] = ", ".join(methods)
    return response


def _methods(request: Request) -> list[str]:
    """The methods of all routes with the path of the request."""
    routes = [route for route in request.app.routes if route.matches(request.scope)[0] is Match.PARTIAL]
    return sorted({method for route in routes for method in route.methods or ()})


def _openai_routes(routes: Iterable[BaseRoute]) -> list[str]:
    """Method and path of the routes whose path a client of OpenAI's API makes of its base URL."""
    found = [route for route in routes if isinstance(route, Route) and route.path.startswith("/v1/")]
    return sorted(f"{'GET' if 'GET' in (route.methods or ()) else 'POST'} {route.path}" for route in found)


def _quoted(request: Request) -> str:
    return f"{request.method[:20]} {request.url.path[:200]}"
