"""Requests to the control routes of a vLLM server, and the fields of their responses."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from rollouts.engines.vllm.capabilities import ServerCapabilities
from rollouts.engines.vllm.control.metrics import ServerMetrics
from rollouts.engines.vllm.http.connection import ServerConnection
from rollouts.engines.vllm.http.response import HttpResponse, excerpt, response_error
from rollouts.engines.vllm.server_probe import json_object
from rollouts.errors import CapabilityError, MalformedResultError


class ControlRoutes:
    """Sends control requests. They do not count against the number of requests that may run at once."""

    def __init__(self, connection: ServerConnection, capabilities: Callable[[], Awaitable[ServerCapabilities]]) -> None:
        self._connection = connection
        self.capabilities = capabilities

    async def call(
        self,
        method: str,
        path: str,
        action: str,
        *,
        content: Mapping[str, Any] | None = None,
        params: Mapping[str, str | int | bool] | None = None,
    ) -> HttpResponse:
        """Call a route of development mode. `action` names the call in errors. Raises as `require` and `checked` do."""
        await self.require(path)
        return self.checked(await self.request(method, path, content=content, params=params), path, action)

    async def request(
        self,
        method: str,
        path: str,
        *,
        content: Mapping[str, Any] | None = None,
        params: Mapping[str, str | int | bool] | None = None,
    ) -> HttpResponse:
        """Call any route; a response of any status is returned."""
        body = None if content is None else [json.dumps(content).encode()]
        return await self._connection.request(method, path, name=_call_name(path), body=body, params=params, slot=False)

    def checked(self, response: HttpResponse, path: str, action: str) -> HttpResponse:
        """The response if it is a success. Raises `CapabilityError` where the route is missing, else `ServerError`."""
        if response.status in (404, 405):
            raise CapabilityError(
                _call_name(path),
                f"{self._connection.base_url} has no /{_call_name(path)}: this vLLM is older than the route",
            )
        if response.status != 200:
            error = response_error(_call_name(path), response, action)
            if response.status == 501:  # vLLM's Rust frontend, which names the cure
                raise CapabilityError(_call_name(path), error.reason)
            if b"object has no attribute" in response.body:
                raise CapabilityError(
                    _call_name(path),
                    f"{error.reason}. The engine of this vLLM is not of the release of its Rust frontend: start both "
                    "from one release, or set VLLM_USE_RUST_FRONTEND=0",
                )
            raise error
        return response

    async def require(self, path: str) -> None:
        """Raise `CapabilityError` unless the server runs in development mode, as `path` needs."""
        if not (await self.capabilities()).control:
            name = _call_name(path)
            raise CapabilityError(
                name,
                f"{self._connection.base_url} has no /{name}: start it with VLLM_SERVER_DEV_MODE=1 in its environment, "
                "and let nobody but the trainer reach it",
            )

    async def metrics(self) -> ServerMetrics:
        """The counters and gauges that the server reports now."""
        body = self.checked(await self.request("GET", "/metrics"), "/metrics", "reading metrics").body
        return ServerMetrics.parse(body.decode("utf-8", errors="replace"))

    async def takes_media(self) -> bool:
        """Whether the server was started to take images; assumed of the Rust frontend, which does not tell."""
        capabilities = await self.capabilities()
        return capabilities.pixel_dtype is not None or capabilities.rust_frontend is not None


def required_field(response: HttpResponse, key: str) -> Any:
    """One field of the JSON object of a response. Raises `MalformedResultError` where it is missing."""
    content = json_object(response)
    if key not in content:
        raise MalformedResultError(response.name, f"the response has no `{key}`: {excerpt(response.body)[:200]!r}")
    return content[key]


def _call_name(path: str) -> str:
    return path.partition("?")[0].strip("/")
