"""Exceptions as responses, with the status codes and bodies of vLLM."""

from __future__ import annotations

import logging

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from renderers import RendererError
from rollouts.errors import (
    ApiKeyError,
    CapabilityError,
    EngineClosedError,
    EngineError,
    InvalidRequestError,
    MissingExtraError,
    ServerError,
    ServerTimeoutError,
    ServerUnreachableError,
    UnknownAdapterError,
    WeightUpdateError,
)
from rollouts.serve.errors import RequestError

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
