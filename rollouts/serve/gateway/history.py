"""When messages of a request are those of a recorded conversation: equality by a digest of each prefix.

Clients do not send back messages as they received them: they drop the reasoning, write the arguments of tool
calls again, send missing content as null or an empty text, and text as one part or several. None of that is a
change. The digest of a prefix covers what is left: role, text, images, names, tool calls without their ids, and
which call a tool result answers.

Two things are compared where the client sends them, and are ignored where it does not: reasoning, and the ids
of tool calls (`rollouts.serve.gateway.session` compares both).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from hashlib import blake2b
from itertools import count, groupby
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from rollouts.serve.gateway.session import RecordedTurn

_SIZE: Final = 16  # bytes of a digest


class History:
    """The checked messages, the digest of each one, and `digests[k]` of the tools and the first k messages.

    `identities` are passed where they are known. `turn` is that which the client names to be continued.
    """

    def __init__(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None,
        identities: Sequence[bytes] | None = None,
        turn: RecordedTurn | None = None,
    ) -> None:
        self.messages = messages
        self.identities = list(map(identity, messages)) if identities is None else identities
        self._hash = blake2b(json.dumps(tools or None, sort_keys=True).encode(), digest_size=_SIZE)
        self.digests = [self._hash.digest()]
        numbers: dict[str | None, bytes] = {}  # of the calls so far, by their ids in this request
        counter = count()
        for message, each in zip(messages, self.identities, strict=True):
            self._hash.update(each)
            for call in message.get("tool_calls") or ():
                numbers[call.get("id")] = next(counter).to_bytes(_SIZE)
            if message["role"] == "tool":
                answered = message.get("tool_call_id")
                self._hash.update(numbers.get(answered) or _digest(answered))
            self.digests.append(self._hash.digest())
        self.turn = turn

    def extended_digest(self, message: Mapping[str, Any]) -> bytes:
        """The digest of the conversation with one more message."""
        extended = self._hash.copy()
        extended.update(identity(message))
        return extended.digest()

    @cached_property
    def turn_ends(self) -> list[int]:
        """The lengths of the prefixes that end with an assistant message, the longest first."""
        ends = [end for end, message in enumerate(self.messages, 1) if message["role"] == "assistant"]
        return ends[::-1]


def reasoning_of(message: Mapping[str, Any]) -> str | None:
    """The reasoning of a message without white space around it; None where it has none."""
    return (message.get("reasoning_content") or "").strip() or None


def _digest(value: Any) -> bytes:
    return blake2b(repr(value).encode("utf-8", "surrogatepass"), digest_size=_SIZE).digest()


def identity(message: Mapping[str, Any]) -> bytes:
    """The digest of what must be equal for two messages to be the same."""
    role, content = message["role"], message.get("content")
    parts: Any = content if isinstance(content, str) else _joined_parts(content or ())
    if role != "assistant":
        return _digest((role, parts, message.get("name")))
    # Some clients remove white space around what the model wrote, and some add the name of the agent.
    if isinstance(parts, str):
        parts = parts.strip()
    calls = [
        (call["function"]["name"], _argument_identity(call["function"]["arguments"]))
        for call in message.get("tool_calls") or ()
    ]
    return _digest((role, parts, calls))


def _joined_parts(content: Sequence[Mapping[str, Any]]) -> Any:
    """Text for parts of text alone; otherwise texts, adjacent ones joined, and (modality, digest) of media."""
    joined: list[Any] = []
    for is_text, parts in groupby(content, lambda part: part["type"] == "text"):
        if is_text:
            joined.append("".join(part["text"] for part in parts))
        else:
            joined += [(part["type"], _digest(part[part["type"]])) for part in parts]
    if not joined:
        return ""
    return joined[0] if len(joined) == 1 and isinstance(joined[0], str) else joined


def _argument_identity(arguments: str | Mapping[str, Any]) -> str:
    """A text that is equal for arguments of equal value, whatever the order of their keys."""
    try:
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        return _ENCODER.encode(_DECODER.decode(text))
    except (ValueError, RecursionError):  # no JSON
        return str(arguments).strip()


def _number(text: str) -> float:
    value = float(text)
    return int(value) if value.is_integer() else value  # JavaScript writes 1.0 as 1


_DECODER: Final = json.JSONDecoder(parse_float=_number)
_ENCODER: Final = json.JSONEncoder(sort_keys=True)
