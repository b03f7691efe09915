"""New messages that repeat what the model has already read or written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from renderers import Message
from rollouts.episodes.errors import EnvironmentProtocolError
from rollouts.episodes.turns import SampledTurn


def check_only_new(messages: Sequence[Message], turn: SampledTurn, origin: str) -> None:
    """Raises `EnvironmentProtocolError` if messages for the prompt after `turn` begin with what that prompt has.

    That is the answer of the turn, or all messages of its conversation and then the answer: the model would read them,
    and their images, twice.
    """
    if not any(message.get("role") == "assistant" for message in messages):
        return  # the usual case
    conversation = turn.prompt.conversation
    for expected in ([turn.message], [*conversation, turn.message]):
        if len(messages) >= len(expected) and all(map(_look_equal, messages, expected)):
            raise EnvironmentProtocolError(
                f"{origin} returned for turn {turn.index} messages of which the first {len(expected)} are in the "
                "conversation already, the answer of the model included; return only the messages that come after it"
            )


def _look_equal(one: Message, other: Message) -> bool:
    """Whether role, texts and number of tool calls are equal: what can be compared without loading media."""
    return (
        one.get("role") == other.get("role")
        and _texts(one) == _texts(other)
        and len(one.get("tool_calls") or ()) == len(other.get("tool_calls") or ())
    )


def _texts(message: Message) -> list[Any]:
    content: Any = message.get("content")
    if isinstance(content, (list, tuple)):
        return [part.get("text") if isinstance(part, dict) else part for part in content]
    return [content or ""]
