"""Responses for requests that no route takes: HTTP 404 for another path, 405 for another method."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Match, Route

from rollouts.serve.error_responses import is_openai_path, openai_error_response

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
