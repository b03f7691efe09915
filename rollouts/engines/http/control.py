"""What the control calls of vLLM's and SGLang's servers share."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

from rollouts.engines.http.connection import ServerConnection
from rollouts.engines.http.responses import HttpResponse
from rollouts.errors import (
    CapabilityError,
    InvalidRequestError,
    ServerError,
    ServerTimeoutError,
    ServerUnreachableError,
)

MemoryTag = Literal["weights", "kv_cache"]


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
        content = self._checked(response, "/v1/models", "listing the adapters").json()
        cards = content.get("data") if isinstance(content, dict) else None
        return {
            card["id"]: str(card.get("root"))
            for card in (cards if isinstance(cards, list) else ())
            if isinstance(card, dict) and isinstance(card.get("id"), str) and card.get("parent") is not None
        }

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


def check_tags(tags: Sequence[MemoryTag] | None) -> None:
    """Raise `InvalidRequestError` for tags of `wake_up` that no server has."""
    known = get_args(MemoryTag)
    if unknown := [tag for tag in tags or () if tag not in known]:
        raise InvalidRequestError("wake_up", f"tag {unknown[0]!r} is not one of {', '.join(known)}")


def call_name(path: str) -> str:
    """The name of a call in errors."""
    return path.partition("?")[0].strip("/")
