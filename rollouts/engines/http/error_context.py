"""Errors of a call name its server and its request."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from inspect import getmembers, iscoroutinefunction
from typing import Any, TypeVar

from rollouts.engines.http.connection import ServerConnection
from rollouts.errors import EngineError, ServerRelatedError

C = TypeVar("C", bound=type)


@contextmanager
def error_context(connection: ServerConnection, request_id: str | None = None) -> Iterator[None]:
    """Let each error of the block concern the server, and each `EngineError` name this request where one is given.

    No error has the key of the connection, whatever the server repeats.

    An error of another request that this one needed (the probe of a server, whether it is paused) becomes the
    cause of a new error, because several requests may wait for the same result.
    """
    try:
        yield
    except ServerRelatedError as error:
        server = connection.base_url
        error.redact(connection.without_key)
        error.concern(server)
        if not isinstance(error, EngineError):
            raise
        error.server = server
        if request_id is None or error.request_id == request_id:
            raise
        raise error.for_request(request_id) from error


def name_errors_after_methods(cls: C) -> C:
    """Let errors of a class's public coroutine methods name the method and the server (`_connection`)."""
    for name, method in getmembers(cls, iscoroutinefunction):
        if not name.startswith("_"):
            setattr(cls, name, _in_error_context(method, name))
    return cls


def _in_error_context(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    @wraps(method)
    async def wrapper(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        with error_context(self._connection, name):
            return await method(self, *args, **kwargs)

    return wrapper
