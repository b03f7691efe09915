"""Every error of a request says which request failed and at which server, also where another request was the cause."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from rollouts.errors import EngineError

P = ParamSpec("P")
R = TypeVar("R")


class HasBaseUrl(Protocol):
    """What talks to one server. `base_url` is its address without credentials."""

    @property
    def base_url(self) -> str: ...


S = TypeVar("S", bound=HasBaseUrl)


@contextmanager
def error_context(server: str, request_id: str | None = None) -> Iterator[None]:
    """Let each `EngineError` of the block name the server, and this request where one is given.

    An error of another request, which this one needed (the first question to a server, whether it is paused), becomes
    the cause of a new error: several requests may wait for the same answer.
    """
    try:
        yield
    except EngineError as error:
        error.server = server
        if request_id is None or error.request_id == request_id:
            raise
        raise error.for_request(request_id) from error


def name_errors_after_method(
    method: Callable[Concatenate[S, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, R]]:
    """A method whose errors are named after it and the server, whatever the requests that it consists of are named."""

    @wraps(method)
    async def named(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with error_context(self.base_url, method.__name__):
            return await method(self, *args, **kwargs)

    return named


def name_server_in_errors(
    method: Callable[Concatenate[S, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, R]]:
    """A method whose errors name the server."""

    @wraps(method)
    async def named(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with error_context(self.base_url):
            return await method(self, *args, **kwargs)

    return named
