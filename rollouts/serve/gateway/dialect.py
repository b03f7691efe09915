"""A dialect of the gateway: how a body becomes a request, and how completions are written, whole or as events.

Everything between, from the session to the recorded turn, is the same for all dialects.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar, NamedTuple

import numpy as np

from rollouts.engines.protocol import SamplingParams, TopLogprobs
from rollouts.serve.bodies import event
from rollouts.serve.errors import RequestError
from rollouts.serve.gateway.history import History


class Place(NamedTuple):
    """Where a message stands in the body: its place, the place of the list of its parts, and its first part there."""

    message: str
    parts: str
    first: int = 0

    def part(self, index: int) -> str:
        return f"{self.parts}[{self.first + index}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """A checked request. `place` tells where a message of its history stands in the body.

    `stop` are stop strings; `calls_tools` is False where the model may call no tool.
    """

    model: str | None
    history: History
    place: Callable[[int], Place]
    tools: list[dict[str, Any]] | None
    sampling: SamplingParams
    stop: tuple[str, ...] = ()
    calls_tools: bool = True
    stream: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """A completion for the client. `turn` is its turn's index, `stop` the stop string that ended it."""

    index: int
    turn: int
    message: dict[str, Any]
    is_cut: bool
    stop: str | None
    token_ids: list[int]
    logprobs: np.ndarray
    top_logprobs: TopLogprobs | None


class TurnCompletion(NamedTuple):
    """The completions of one request."""

    prompt_ids: list[int]
    choices: list[Choice]

    @property
    def num_sampled(self) -> int:
        return sum(len(choice.token_ids) for choice in self.choices)


class Head(NamedTuple):
    """What is known of an answer before its completion: a random id, and `created` in seconds since the epoch."""

    id: str
    created: int
    model: str
    session_id: str


#: The text and the bytes of each token; the bytes are None where only a text is known, which is not whole
#: characters.
TokenTexts = Callable[[Sequence[int]], list[tuple[str, bytes | None]]]

Event = dict[str, Any]


class Writer(ABC):
    """Writes the completions of one request as events: `begin`, then each choice, then `end`.

    A `key` is `reasoning_content` or `content`: the texts of a choice, joined by key, are those of its message.
    `request` is what the dialect has read.
    """

    #: What follows the last event.
    last: ClassVar[bytes] = b""
    answer: dict[str, Any]

    def __init__(self, request: Any, head: Head, texts: TokenTexts | None) -> None:
        self.request = request
        self.head = head
        self.texts = texts

    def whole(self, completion: TurnCompletion) -> dict[str, Any]:
        """The answer to a request without a stream: what `answer` is after all events."""
        for _ in chain(self.begin(completion.prompt_ids), self.rest(completion, {})):
            pass
        return self.answer

    @abstractmethod
    def begin(self, prompt_ids: list[int]) -> Iterable[Event]: ...

    def begin_choice(self, index: int) -> Iterable[Event]:
        return ()

    @abstractmethod
    def text(self, index: int, key: str, text: str) -> Iterable[Event]: ...

    @abstractmethod
    def call(self, index: int, number: int, call: Mapping[str, Any]) -> Iterable[Event]: ...

    @abstractmethod
    def end_choice(self, choice: Choice) -> Iterable[Event]: ...

    @abstractmethod
    def end(self, completion: TurnCompletion) -> Iterable[Event]: ...

    @abstractmethod
    def failed(self, error: RequestError) -> Event:
        """The event of an error after the first event."""

    def encoded(self, content: Event) -> bytes:
        """An event as it is sent."""
        return event(content, content["type"])

    def rest(self, completion: TurnCompletion, sent: Mapping[int, Mapping[str, str]]) -> Iterator[Event]:
        """The events after `begin`, without the text that was `sent` of each choice, by key."""
        for choice in completion.choices:
            index, message = choice.index, choice.message
            if index not in sent:
                yield from self.begin_choice(index)
            for key in ("reasoning_content", "content"):
                before = sent.get(index, {}).get(key, "")
                if text := (message.get(key) or "")[len(before) :]:
                    yield from self.text(index, key, text)
            for number, call in enumerate(message.get("tool_calls") or ()):
                yield from self.call(index, number, call)
            yield from self.end_choice(choice)
        yield from self.end(completion)


class Dialect(NamedTuple):
    """`path` is that of its requests, below `/v1`.

    `read(body, defaults, allow_urls=..., max_choices=..., max_parts=...)` reads a body; `defaults` are the
    sampling options that it does not name. It raises `RequestError`, and `InvalidRequestError` for sampling
    options out of range.
    """

    path: str
    read: Callable[..., TurnRequest]
    writer: type[Writer]
