"""Errors of a server and their responses, in the forms of OpenAI's and Anthropic's APIs."""

import logging
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match

from renderers import RendererError
from renderers.errors import MediaError, MessageError, MissingExtraError, TemplateError
from rollouts.episodes.limits import OVERLONG_ERRORS
from rollouts.errors import (
    ApiKeyError,
    CapabilityError,
    EngineClosedError,
    EngineError,
    EngineStartError,
    GenerationInterruptedError,
    InvalidRequestError,
    RolloutsError,
    ServerError,
    ServerTimeoutError,
    ServerUnreachableError,
    TrajectoryError,
    TrajectoryFinishedError,
    UnknownAdapterError,
    as_unicode,
    describe_exception,
)

log = logging.getLogger("rollouts.serve")


class RequestError(RolloutsError):
    """The response to a request is an error. `status` is that of HTTP, and `param` names the field that is the reason.

    `code` is OpenAI's name of the reason.

    Cure: correct the field of the request that the response names.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        *,
        code: str | None = None,
    ) -> None:
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        super().__init__(message)


def invalid_field(message: str, param: str | None = None) -> RequestError:
    """A field of a request has a wrong type or value, or is unknown."""
    return RequestError(400, message, param)


def unsupported_field(message: str, param: str) -> RequestError:
    """A field of a request has a value that this server cannot honour."""
    return RequestError(400, message, param, code="unsupported_parameter")


def invalid_message(message: str, param: str) -> RequestError:
    """A message of a request, or a medium in it, cannot be rendered."""
    return RequestError(400, message, param, code="invalid_message")


def session_gone(session_id: str, reason: str) -> RequestError:
    """The session was removed; `reason` says why."""
    message = f"the session {session_id!r} is gone: {reason}. Begin another one, with another id"
    return RequestError(410, message, code="session_gone")


class SessionNotDeliveredError(RequestError):
    """`on_session_end` did not accept the trajectories of the sessions `session_ids`, which are kept.

    Cure: remove the cause that the text names, and end the sessions again.
    """

    def __init__(self, session_ids: Sequence[str], error: BaseException) -> None:
        self.session_ids = tuple(session_ids)
        self.reason = describe_exception(error)
        shown = ", ".join(self.session_ids[:5]) + (" and others" if len(self.session_ids) > 5 else "")
        count = f"the trajectories of {len(self.session_ids)} sessions" if len(self.session_ids) > 1 else "a trajectory"
        message = (
            f"{count} ({shown}) could not be handed over: {self.reason}. Nothing of it is lost yet: "
            "remove the cause, and end the session again"
        )
        super().__init__(500, message, code="session_not_delivered")


#: What a client receives about a defect of this server; the reason is only in the log.
_INTERNAL_ERROR = "Internal server error"

#: How errors of engines and renderers are answered: the first row that has the class of an error.
_ROWS: Final[tuple[tuple[tuple[type[Exception], ...], int, str | None], ...]] = (
    (OVERLONG_ERRORS, 400, "context_length_exceeded"),
    ((ApiKeyError,), 502, "engine_error"),  # of the server behind this one
    ((InvalidRequestError, CapabilityError), 400, None),
    ((MissingExtraError,), 501, "missing_extra"),
    ((MessageError, MediaError, TemplateError), 400, "invalid_message"),
    ((TrajectoryError,), 400, None),
    ((ServerTimeoutError,), 504, "timeout"),
    (
        (ServerUnreachableError, EngineClosedError, EngineStartError, GenerationInterruptedError),
        503,
        "engine_unavailable",
    ),
    ((EngineError,), 502, "engine_error"),
    ((RolloutsError, RendererError), 500, "internal_error"),
    ((ClientDisconnect,), 499, "client_disconnected"),  # nginx's status; nobody receives it
)


def request_error(error: Exception) -> RequestError:
    """The error that the client of a request gets for an exception of the engine or the renderer."""
    match error:
        case RequestError():
            return error
        case ServerError(status=status, reason=reason):  # of the server behind this one
            status = status if 400 <= status < 600 else 502
            return RequestError(status, reason, code="engine_error")
        case UnknownAdapterError():
            message = f"The model `{error.adapter[:200]}` does not exist. {error.reason}"
            return RequestError(404, message, "model", code="model_not_found")
        case TrajectoryFinishedError():
            message = f"the session {error.episode_id!r} has ended, and takes nothing more. Begin one with another id"
            return RequestError(409, message, code="session_ended")
    message = error.reason if isinstance(error, EngineError) else str(error)
    row = next((row for row in _ROWS if isinstance(error, row[0])), None)
    return RequestError(500, _INTERNAL_ERROR) if row is None else RequestError(row[1], message, code=row[2])


def error_fields(error: RequestError) -> dict[str, Any]:
    """`{"error": {message, type, param, code}}`, as clients of OpenAI's API read it."""
    fields = {
        "message": as_unicode(error.message),
        "type": "invalid_request_error" if error.status < 500 else "server_error",
        "param": error.param and as_unicode(error.param),
        "code": error.code,
    }
    return {"error": fields}


#: Anthropic's code of a request for a conversation that the server holds.
NO_THREADS: Final = "thread_unsupported_request"
#: Anthropic's name of an error by its HTTP status; `api_error` for any other one.
_MESSAGES_TYPES: Final = {
    **dict.fromkeys((400, 408, 409, 410, 413, 415), "invalid_request_error"),
    401: "authentication_error",
    403: "permission_error",
    **dict.fromkeys((404, 405), "not_found_error"),
    503: "overloaded_error",
    504: "timeout_error",
}


def messages_error_fields(error: RequestError) -> dict[str, Any]:
    """`{"type": "error", "error": {...}}`, as clients of Anthropic's API read it, with its names of types."""
    fields = {**error_fields(error)["error"], "type": _MESSAGES_TYPES.get(error.status, "api_error")}
    if error.code == NO_THREADS:
        fields["details"] = {"error_code": NO_THREADS}
    return {"type": "error", "error": fields}


def error_response(error: RequestError, path: str) -> JSONResponse:
    """The response of an error, in the form of the API to which the path belongs."""
    headers = {"Retry-After": "1"} if error.status == 503 else None
    is_messages = "/v1/messages" in path or path == "/messages"
    fields = messages_error_fields(error) if is_messages else error_fields(error)
    return JSONResponse(fields, error.status, headers)


async def on_error(request: Request, error: Exception) -> Response:
    """Starlette's handler of the exceptions of routes."""
    refusal = logged_error(error, f"{request.method} {request.url.path}")
    return error_response(refusal, request.url.path)


def logged_error(error: Exception, name: str) -> RequestError:
    """The error for the client of the request `name`; one of the server or of its engine is logged."""
    refusal = request_error(error)
    if refusal.status >= 500:
        trace = error if refusal.status == 500 else None
        log.error("%s: HTTP %d: %s", name, refusal.status, error, exc_info=trace)
    return refusal


#: The exceptions that `on_error` answers.
ANSWERED: Final = (RolloutsError, RendererError, ClientDisconnect)

Handler = Callable[..., Awaitable[Response]]


def answering_errors(handler: Handler) -> Handler:
    """A handler that answers its errors itself, for routes in an application that has no `on_error`."""

    async def answering(request: Request) -> Response:
        try:
            return await handler(request)
        except ANSWERED as error:
            return await on_error(request, error)

    return answering


# Responses for requests that no route takes: HTTP 404 for another path, 405 for another method.


#: What clients look for below `/v1/responses`, beside ids of responses.
_NOT_BELOW_RESPONSES: Final = {
    "compact": "no conversation is shortened here; send the shorter one, which begins a branch",
    "input_tokens": "no tokens are counted here; /v1/messages/count_tokens counts those of its requests",
}
_SESSION_PATH: Final = re.compile(r"/sessions/[^/]{1,128}(?=/)")


async def on_unrouted(request: Request, error: Exception) -> Response:
    """Starlette's handler of its router's errors; the response names the routes or methods there are."""
    assert isinstance(error, HTTPException)  # the only one that it is registered for
    requested = f"{request.method[:20]} {request.url.path[:200]}"
    headers = {}
    if error.status_code == 405:
        routes = [route for route in request.app.routes if route.matches(request.scope)[0] is Match.PARTIAL]
        methods = sorted({method for route in routes for method in route.methods or ()})
        taken = f"this path takes {' and '.join(methods)}"
        name = request.url.path.rpartition("/responses/")[2]
        message = f"{requested}: {_NOT_BELOW_RESPONSES.get(name, taken)}"
        refusal = RequestError(error.status_code, message, code="method_not_supported")
        headers["Allow"] = ", ".join(methods)
    else:
        root = str(request.base_url)[:200].rstrip("/")
        if session := _SESSION_PATH.match(request.url.path):
            root += session[0]
        message = (
            f"{requested}: there is no such route. The routes of agents are POST /v1/chat/completions, "
            f"/v1/responses and /v1/messages, and GET /v1/models: the base URL is {root}/v1 for OpenAI's SDK, "
            f"and {root} for Anthropic's, which adds /v1 itself"
        )
        refusal = RequestError(error.status_code, message, code="unknown_url")
    response = error_response(refusal, request.url.path)
    response.headers.update(headers)
    return response
