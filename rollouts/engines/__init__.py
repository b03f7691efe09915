"""An engine samples completions for prompts of token ids; a chat endpoint returns messages."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollouts.engines.endpoint import ChatEndpoint

__all__ = ["ChatEndpoint"]


def __getattr__(name: str) -> Any:
    if name != "ChatEndpoint":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rollouts.engines.endpoint import ChatEndpoint  # loaded when it is first used: it needs pydantic and aiohttp

    return ChatEndpoint
