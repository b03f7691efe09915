"""Inference engines: the protocol and its implementations, and chat endpoints, which return messages without tokens."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollouts.engines.endpoint import ChatAnswer, ChatEndpoint

__all__ = ["ChatAnswer", "ChatEndpoint"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rollouts.engines import endpoint  # loaded when it is first used: it needs pydantic and aiohttp

    return getattr(endpoint, name)
