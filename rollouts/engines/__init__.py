"""Inference engines: the protocol and its implementations, and chat endpoints, which return messages without tokens."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollouts.engines.endpoint import ChatEndpoint
    from rollouts.engines.protocol import ChatAnswer

__all__ = ["ChatAnswer", "ChatEndpoint"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rollouts.engines import endpoint, protocol  # loaded when first used: they need pydantic and aiohttp

    return endpoint.ChatEndpoint if name == "ChatEndpoint" else protocol.ChatAnswer
