"""What the control calls of vLLM's and SGLang's servers share."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from rollouts.engines.http.connection import ServerConnection
from rollouts.engines.http.responses import HttpResponse
from rollouts.engines.lora import listed_adapters
from rollouts.errors import CapabilityError, ServerError, ServerTimeoutError, ServerUnreachableError


class HttpControl(ABC):
    """The control calls of one server. `on_weight_version` is called with each new label."""

    def __init__(
        self, connection: ServerConnection, *, on_weight_version: Callable[[str], None] = lambda version: None
    ) -> None:
        self._connection = connection
        self._on_weight_version = on_weight_version

    @property
    def base_url(self) -> str:
        return self._connection.base_url

    async def health(self) -> bool:
        """Whether `check_health` raises nothing. A paused SGLang is not healthy."""
        try:
            await self.check_health()
        except (ServerUnreachableError, ServerTimeoutError, ServerError, CapabilityError):
            return False
        return True

    async def check_health(self) -> None:
        """Raise why `health` would be False.

        Raises `ServerUnreachableError`, `ServerTimeoutError`, `ServerError`, `CapabilityError`.
        """
        response = await self._request("GET", "/health", seconds=10.0, retry=False)
        self._checked(response, "/health", "checking its health")

    async def adapters(self) -> Mapping[str, str]:
        """The loaded LoRA adapters: the directory of each by its name."""
        response = await self._request("GET", "/v1/models")
        return listed_adapters(self._checked(response, "/v1/models", "listing the adapters").json())

    async def _request(
        self,
        method: str,
        path: str,
        *,
        content: Mapping[str, Any] | None = None,
        params: Mapping[str, str | int | bool] | None = None,
        **options: Any,
    ) -> HttpResponse:
        """Call a route; a response of any status is returned. The call does not wait behind generations."""
        body = None if content is None else [json.dumps(content).encode()]
        return await self._connection.request(
            method, path, name=call_name(path), body=body, params=params, slot=False, **options
        )

    @abstractmethod
    def _checked(self, response: HttpResponse, path: str, action: str) -> HttpResponse:
        """The response if it is a success. Raises `CapabilityError` where the route is missing, else `ServerError`."""


def call_name(path: str) -> str:
    """The name of a call in errors."""
    return path.partition("?")[0].strip("/")
