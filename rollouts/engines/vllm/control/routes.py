"""Requests to a server's control routes, and what their answers mean."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from rollouts.engines.vllm.capabilities import ServerCapabilities
from rollouts.engines.vllm.http.connection import ServerConnection
from rollouts.engines.vllm.http.response import HttpResponse, response_error
from rollouts.errors import CapabilityError, MalformedResultError


class ControlRoutes:
    """Asks a server's control routes, outside of the places that generating requests wait for."""

    def __init__(self, connection: ServerConnection, capabilities: Callable[[], Awaitable[ServerCapabilities]]) -> None:
        self._connection = connection
        self._capabilities = capabilities

    async def call(
        self,
        method: str,
        path: str,
        doing: str,
        *,
        content: Mapping[str, Any] | None = None,
        params: Mapping[str, str | int | bool] | None = None,
    ) -> HttpResponse:
        """The answer of a route of development mode. Raises as `require` and `checked` do."""
        await self.require(path)
        return self.checked(await self.request(method, path, content=content, params=params), path, doing)

    async def request(
        self,
        method: str,
        path: str,
        *,
        content: Mapping[str, Any] | None = None,
        params: Mapping[str, str | int | bool] | None = None,
    ) -> HttpResponse:
        """The answer of any route, whatever its status."""
        body = None if content is None else [json.dumps(content).encode()]
        return await self._connection.request(method, path, name=_name_of(path), body=body, params=params, slot=False)

    def checked(self, reply: HttpResponse, path: str, doing: str) -> HttpResponse:
        """The reply, if it is a success. Raises `CapabilityError` where there is no such route, else `ServerError`."""
        if reply.status in (404, 405):
            raise CapabilityError(
                _name_of(path),
                f"{self._connection.base_url} has no {_route_of(path)}: this vLLM is older than the route",
            )
        if reply.status != 200:
            raise response_error(_name_of(path), reply, doing)
        return reply

    async def require(self, path: str) -> None:
        """Raise `CapabilityError` unless the server runs in development mode, as `path` needs."""
        if not (await self._capabilities()).control:
            raise CapabilityError(
                _name_of(path),
                f"{self._connection.base_url} has no {_route_of(path)}: start it with VLLM_SERVER_DEV_MODE=1 in its "
                "environment, and let nobody but the trainer reach it",
            )


def object_of(reply: HttpResponse) -> Mapping[str, Any]:
    """The JSON object of a reply, {} where it is empty or something else."""
    content = reply.json() if reply.body else {}
    return content if isinstance(content, dict) else {}


def member_of(reply: HttpResponse, key: str) -> Any:
    """One member of the JSON object of a reply. Raises `MalformedResultError` where it is missing."""
    content = object_of(reply)
    if key not in content:
        raise MalformedResultError(reply.name, f"the answer has no `{key}`: {reply.body[:200]!r}")
    return content[key]


def flag_of(reply: HttpResponse, key: str) -> bool:
    """One true or false of a reply. Raises `MalformedResultError` where it is neither."""
    value = member_of(reply, key)
    if not isinstance(value, bool):
        raise MalformedResultError(reply.name, f"`{key}` is {value!r}, not true or false")
    return value


def _route_of(path: str) -> str:
    return path.partition("?")[0]


def _name_of(path: str) -> str:
    return _route_of(path).strip("/")
