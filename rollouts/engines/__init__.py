"""An engine samples completions for prompts of token ids; a chat endpoint returns messages."""

from typing import TYPE_CHECKING, Any

from rollouts.engines.protocol import ChatAnswer, ChatEngine, ChatTokens

if TYPE_CHECKING:
    from rollouts.engines.endpoint import ChatEndpoint

__all__ = ["ChatAnswer", "ChatEndpoint", "ChatEngine", "ChatTokens"]


def __getattr__(name: str) -> Any:
    if name != "ChatEndpoint":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rollouts.engines.endpoint import ChatEndpoint  # loaded when it is first used: it needs pydantic and aiohttp

    return ChatEndpoint
