"""The jobs of `render.py`: conversations and bridges, as plain JSON.

Texts are generated from a seed; those of different seeds share few words, so that no cache holds them.
"""

import random
from collections.abc import Callable
from typing import Any

Message = dict[str, Any]
Job = dict[str, Any]

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search the archive and return the passages that match best.",
            "parameters": {
                "type": "object",
                "properties": {"query": {"type": "string"}, "limit": {"type": "integer", "minimum": 1}},
                "required": ["query"],
            },
        },
    }
]

#: Short texts, so that printing them is the template's own work and not that of copying characters.
TOOL_CONVERSATION: list[Message] = [
    {"role": "system", "content": "You answer from the archive, briefly, and name the passage."},
    {"role": "user", "content": "When was the old harbour of Bergen rebuilt after the great fire?"},
    {
        "role": "assistant",
        "content": "I look it up.",
        "tool_calls": [
            {
                "id": "call00001",
                "type": "function",
                "function": {"name": "search", "arguments": {"query": "Bergen harbour rebuilt fire", "limit": 3}},
            }
        ],
    },
    {
        "role": "tool",
        "tool_call_id": "call00001",
        "name": "search",
        "content": "1702: the fire. 1707: rebuilt in wood.",
    },
    {"role": "assistant", "content": "It was rebuilt by 1707 (first passage)."},
    {"role": "user", "content": "And in stone?"},
]

_SYLLABLES = [first + vowel + last for first in "bdfgklmnprst" for vowel in "aeiou" for last in ("", "n", "r", "s")]
_COMMON = ["the", "of", "and", "to", "in", "is", "that", "for", "with", "on", "was", "by", "this", "from", "are"]

_RESULT_WORDS = 420


class Words:
    """A generator of text; the text depends on the seed only."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)

    def text(self, count: int) -> str:
        """The next `count` words; every second one is made of random syllables, every 40th is a number."""
        return " ".join(self._word(index) for index in range(count))

    def _word(self, index: int) -> str:
        if index % 40 == 39:
            return f"{self._random.random():.4f}.\n"
        if index % 2:
            return self._random.choice(_COMMON)
        return "".join(self._random.choices(_SYLLABLES, k=2))

    def question(self) -> Message:
        return {"role": "user", "content": self.text(60)}

    def call(self) -> Message:
        function = {"name": "search", "arguments": {"query": self.text(8), "limit": 5}}
        return {
            "role": "assistant",
            "content": self.text(12),
            "tool_calls": [{"type": "function", "function": function}],
        }

    def result(self) -> Message:
        return {"role": "tool", "content": self.text(_RESULT_WORDS)}

    def turns(self, count: int) -> list[Message]:
        """A system message, then `count` turns of question, tool call and tool result."""
        system = {"role": "system", "content": self.text(20)}
        return [system, *(message for _ in range(count) for message in (self.question(), self.call(), self.result()))]


def new_conversations(turns: int) -> Callable[[str], Job]:
    """A different conversation for every seed."""
    return lambda seed: {"messages": Words(seed).turns(turns), "tools": TOOLS}


def same_conversation(turns: int) -> Callable[[str], Job]:
    """The same conversation for every seed."""
    return always(new_conversations(turns)("the same"))


def always(job: Job) -> Callable[[str], Job]:
    """The same job for every seed."""
    return lambda _: job


class Bridges:
    """Bridges of one new message after `turns` earlier turns; the message depends on the seed, the prompt does not.

    `role` is "tool" (the result of a call in the last turn) or "user" (a message behind a turn of text); `words` is the
    length of the new message. The completion is the text that the template prints for the turn. `render` returns the
    ids of a conversation up to the generation prompt.
    """

    def __init__(
        self, render: Callable[[Job], list[int]], turn_end: int, turns: int, role: str, *, words: int = _RESULT_WORDS
    ) -> None:
        texts = Words(f"behind {turns} turns")
        self._role, self._words = role, words
        self._history = [*texts.turns(turns), texts.question()]
        self._turn = texts.call() if role == "tool" else {"role": "assistant", "content": texts.text(40)}
        self._prompt = render({"messages": self._history, "tools": TOOLS})
        later = render({"messages": [*self._history, self._turn, texts.question()], "tools": TOOLS})
        self._completion = later[len(self._prompt) : later.index(turn_end, len(self._prompt)) + 1]

    def __call__(self, seed: str) -> Job:
        new = {"role": self._role, "content": Words(seed).text(self._words)}
        return {
            "prompt": self._prompt,
            "completion": self._completion,
            "new": [new],
            "previous": self._history,
            "messages": [*self._history, self._turn, new],
            "tools": TOOLS,
        }
