"""Adds the failed request and the server to errors."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import wraps
from inspect import iscoroutinefunction
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from rollouts.errors import EngineError, ServerRelatedError

P = ParamSpec("P")
R = TypeVar("R")


class HasBaseUrl(Protocol):
    """A client of one server. `base_url` is the server's address without credentials."""

    @property
    def base_url(self) -> str: ...


S = TypeVar("S", bound=HasBaseUrl)
C = TypeVar("C", bound=type)


@contextmanager
def error_context(server: str, request_id: str | None = None) -> Iterator[None]:
    """Let each error of the block concern the server, and each `EngineError` name this request where one is given.

    An error of another request that this one needed (the probe of a server, whether it is paused) becomes the cause of
    a new error, because several requests may wait for the same result.
    """
    try:
        yield
    except ServerRelatedError as error:
        error.concern(server)
        if not isinstance(error, EngineError):
            raise
        error.server = server
        if request_id is None or error.request_id == request_id:
            raise
        raise error.for_request(request_id) from error


def name_errors_after_methods(cls: C) -> C:
    """Let the errors of each public coroutine method of a class name the method (as their request) and the server."""
    for name, method in list(vars(cls).items()):
        if iscoroutinefunction(method) and not name.startswith("_"):
            setattr(cls, name, _in_error_context(method, name))
    return cls


def name_server_in_errors(
    method: Callable[Concatenate[S, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, R]]:
    """Let the errors of a method name the server."""
    return _in_error_context(method, None)


def _in_error_context(
    method: Callable[Concatenate[S, P], Coroutine[Any, Any, R]], request_id: str | None
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, R]]:
    @wraps(method)
    async def wrapper(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with error_context(self.base_url, request_id):
            return await method(self, *args, **kwargs)

    return wrapper
