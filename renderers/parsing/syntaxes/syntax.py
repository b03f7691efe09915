"""What a tool-call syntax is: the markers around a block of calls, and a decoder of the block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from renderers.parsing.literals import MAX_DEPTH, InvalidJsonError, is_deeper_than, parse_json
from renderers.parsing.markers import MarkerEncoding
from renderers.parsing.response import ToolCallParseStatus as Status
from renderers.parsing.schemas import ToolSchemas


class Attempt(NamedTuple):
    """One attempt at a call: the characters `start:end` of the block, and what was read there."""

    start: int
    end: int
    name: str | None
    arguments: dict[str, Any] | None
    status: Status
    id: str | None = None


class CallText(NamedTuple):
    """The characters `start:end` of an encoded text: one call, or a block of calls.

    `body` is the range between the markers; `closed` is False where the closing marker is missing.
    """

    text: str
    start: int
    end: int
    body: tuple[int, int]
    closed: bool
    encoding: MarkerEncoding
    tools: ToolSchemas

    @property
    def body_text(self) -> str:
        """The encoded text between the markers."""
        return self.text[slice(*self.body)]

    def plain_text(self, start: int, end: int) -> str:
        """The characters `start:end` with marker characters replaced by the markers' texts."""
        return self.encoding.decode(self.text[start:end])

    def read_calls(self, opening: str, closing: str, read: Callable[[CallText], Attempt]) -> Iterator[Attempt]:
        """Read each call from `opening` to `closing`. Other text than white space between them is malformed.

        A call in which the next one begins, or which reaches the end of the block, is not closed.
        """
        text, (position, end) = self.text, self.body
        while position < end:
            begin = text.find(opening, position, end)
            if begin < 0:
                begin = end
            if text[position:begin].strip():
                yield Attempt(position, begin, None, None, Status.MALFORMED_STRUCTURE)
            if begin == end:
                return
            inner = begin + len(opening)
            close = text.find(closing, inner, end)
            limit = end if close < 0 else close
            following = text.find(opening, inner, limit)
            if following >= 0:
                close, limit = -1, following
            position = limit if close < 0 else close + len(closing)
            yield read(self._replace(start=begin, end=position, body=(inner, limit), closed=close >= 0))

    def attempt(self, name: Any, arguments: Any, *, error: Status | None = None, id: str | None = None) -> Attempt:
        """An attempt with the first status that applies: unclosed, `error`, missing name, malformed, unknown tool, ok.

        An `id` that is empty counts as absent. With the error `INVALID_JSON`, arguments may be the text that is not
        JSON: it is kept, so that no caller takes the call for one without arguments.
        """
        status = error
        if not isinstance(name, str) or not name:
            name, arguments = None, None
            status = status or Status.MISSING_NAME
        elif not isinstance(arguments, dict) or is_deeper_than(arguments, MAX_DEPTH):
            arguments = arguments if error is Status.INVALID_JSON and isinstance(arguments, str) else None
            status = status or Status.MALFORMED_STRUCTURE
        elif not self.tools.knows(name):
            status = status or Status.UNKNOWN_TOOL
        if not self.closed:
            status = Status.UNCLOSED_BLOCK
        return Attempt(self.start, self.end, name, arguments, status or Status.OK, id or None)

    def failed(self, error: Status = Status.MALFORMED_STRUCTURE, name: str | None = None) -> Attempt:
        """An attempt without arguments."""
        return self.attempt(name, None, error=error)

    def json_attempt(self, name: str, arguments: str, *, id: str | None = None) -> Attempt:
        """An attempt with arguments that are a JSON text."""
        try:
            return self.attempt(name, parse_json(arguments), id=id)
        except InvalidJsonError:
            return self.attempt(name, arguments, error=Status.INVALID_JSON, id=id)


@dataclass(frozen=True, slots=True)
class ToolCallSyntax(ABC):
    """Frozen data that describes one way to write tool calls; a subclass, a frozen dataclass, reads another one.

        @dataclass(frozen=True, slots=True)
        class LineCalls(ToolCallSyntax):
            start_markers: tuple[str, ...] = ("<call>",)
            end_markers: tuple[str, ...] = ("</call>",)

            def attempts(self, block):
                name, _, arguments = block.plain_text(*block.body).strip().partition("\\n")
                return [block.json_attempt(name, arguments)]

    A block runs from one of `start_markers` to the next of `end_markers`, or, where there are none, to the end of the
    turn. `inner_markers` are the other markers that the decoder looks for; those that a tokenizer has as control tokens
    count only as such. `unmarked_starts` lists the characters with which a call without a start marker may begin: a
    turn's text that begins with one of them is a block as a whole if `decode` finds a call in it.
    """

    start_markers: tuple[str, ...] = ()
    end_markers: tuple[str, ...] = ()
    inner_markers: tuple[str, ...] = ()
    unmarked_starts: str = ""

    def decode(self, block: CallText) -> list[Attempt]:
        """Every attempt in the block, in order; `closed` says whether it has the end marker. Never raises."""
        text, encoded = block.text, block.encoding.__getitem__
        start = next((len(marker) for marker in map(encoded, self.start_markers) if text.startswith(marker)), 0)
        end_markers = self.end_markers if block.closed else ()
        end = len(text) - next((len(marker) for marker in map(encoded, end_markers) if text.endswith(marker)), 0)
        return list(self.attempts(block._replace(body=(start, max(start, end)))))

    @abstractmethod
    def attempts(self, block: CallText) -> Iterable[Attempt]:
        """The attempts in a block whose `body` is the range between the markers, in order.

        Must not raise: text that is not a call is an attempt with a status (`block.failed`). The block may be any text
        that a model samples, cut off anywhere.
        """
