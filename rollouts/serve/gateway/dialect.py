"""A dialect of the gateway: how a body becomes a request, and how completions are written, whole or as events.

Everything between, from the session to the recorded turn, is the same for all dialects.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar, NamedTuple

from rollouts.engines.protocol import Completion, FinishReason, SamplingParams
from rollouts.serve.bodies import Strict, event
from rollouts.serve.errors import RequestError
from rollouts.serve.gateway.history import History
from rollouts.serve.gateway.limits import GatewayLimits
from rollouts.serve.gateway.session import RecordedTurn


class Place(NamedTuple):
    """Where a message stands in the body: its place, the place of the list of its parts, and its first part there.

    `calls` are the places of its calls, `arguments` where those have their arguments, and `answered` is the name of its
    field with the id of the call that it answers.
    """

    message: str
    parts: str
    first: int = 0
    calls: Sequence[str] = ()
    arguments: str = "arguments"
    answered: str = "call_id"

    def field(self, name: str) -> str:
        """The place of `content`, of `content[1]` or of `tool_calls`."""
        if name.startswith("content["):
            return f"{self.parts}[{self.first + int(name[8:-1])}]"
        return self.parts if name == "content" else next(iter(self.calls), self.message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How bodies are read. `sampling` has the options that they do not name; `ignored_tools` are left out, by type."""

    sampling: SamplingParams
    limits: GatewayLimits
    allow_urls: bool = False
    ignored_tools: Collection[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """A checked request. `place` tells where a message of its history stands in the body.

    `body` has the fields, `stop` are stop strings, `ignored_tools` the types of tools that were left out.
    """

    body: Any
    history: History
    place: Callable[[int], Place]
    tools: list[dict[str, Any]] | None
    sampling: SamplingParams
    stop: Sequence[str] = ()
    ignored_tools: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """A completion of at most `max_tokens` tokens. `stop` is the stop string that ended it."""

    index: int
    turn: RecordedTurn
    message: dict[str, Any]
    completion: Completion
    stop: str | None
    max_tokens: int

    @property
    def is_cut(self) -> bool:
        return self.completion.finish_reason is FinishReason.LENGTH

    @property
    def is_at_context(self) -> bool:
        """Whether it has fewer tokens than asked for, because the context of the model has no more."""
        return self.is_cut and len(self.completion.token_ids) < self.max_tokens


class TurnCompletion(NamedTuple):
    """The completions of one request."""

    prompt_ids: list[int]
    choices: list[Choice]

    @property
    def num_sampled(self) -> int:
        return sum(len(choice.completion.token_ids) for choice in self.choices)


class Head(NamedTuple):
    """What is known of an answer before its completion: a random id, and `created` in seconds since the epoch."""

    id: str
    created: int
    model: str
    session_id: str


#: The text and the bytes of each token; the bytes are None where only a part of a character is known.
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
        self.sent: dict[int, Counter[str]] = {}  # characters, by choice and key

    def whole(self, completion: TurnCompletion) -> dict[str, Any]:
        """The answer to a request without a stream: what `answer` is after all events."""
        for _ in chain(self.begin(completion.prompt_ids), self.rest(completion)):
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
        return event(content, content.get("type"))

    def send(self, index: int, key: str, text: str) -> Iterator[Event]:
        """The events of the next piece of a text, which may be empty."""
        if index not in self.sent:
            self.sent[index] = Counter()
            yield from self.begin_choice(index)
        if text:
            self.sent[index][key] += len(text)
            yield from self.text(index, key, text)

    def rest(self, completion: TurnCompletion) -> Iterator[Event]:
        """The events after `begin`, without the text that was sent."""
        for choice in completion.choices:
            index, message = choice.index, choice.message
            for key in ("reasoning_content", "content"):
                sent = self.sent.get(index, Counter())[key]
                yield from self.send(index, key, (message.get(key) or "")[sent:])
            for number, call in enumerate(message.get("tool_calls") or ()):
                yield from self.call(index, number, call)
            yield from self.end_choice(choice)
        yield from self.end(completion)


class Dialect(NamedTuple):
    """`path` is that of its requests, below `/v1`; `tool_types` are the types of the tools that `body` has.

    `read(body, fields, reading)` makes a request of the validated body and its raw fields. It raises `RequestError`,
    and `InvalidRequestError` for sampling options out of range.
    """

    path: str
    tool_types: Collection[str]
    body: type[Strict]
    read: Callable[[Any, dict[str, Any], Reading], TurnRequest]
    writer: type[Writer]
