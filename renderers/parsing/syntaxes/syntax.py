"""What a tool-call syntax is: the markers around a block of calls, and a decoder of the block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from renderers.parsing.json_text import MAX_DEPTH, InvalidJsonError, is_deeper_than, parse_json
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


class CallRegion(NamedTuple):
    """The characters `start:end` of a block that one call occupies; `body` is the range between its markers.

    `closed` is False where the closing marker is missing.
    """

    start: int
    end: int
    body: tuple[int, int]
    closed: bool


@dataclass(frozen=True, slots=True)
class Block:
    """The encoded text of one block, its start and end markers included; `closed` if it has the end marker."""

    text: str
    closed: bool
    encoding: MarkerEncoding
    tools: ToolSchemas

    def plain_text(self, start: int, end: int) -> str:
        """The characters `start:end` with marker characters replaced by the markers' texts."""
        return self.encoding.decode(self.text[start:end])

    def region(self, syntax: ToolCallSyntax) -> CallRegion:
        """The whole block as the region of one call."""
        body = self._body(syntax)
        return CallRegion(0, len(self.text), body, self.closed)

    def read_calls(
        self, syntax: ToolCallSyntax, opening: str, closing: str, read: Callable[[CallRegion], Attempt]
    ) -> list[Attempt]:
        """Read each region from `opening` to `closing`. Other text than white space between them is malformed.

        A region in which the next one begins, or which reaches the end of the block, is not closed.
        """
        return list(self._read_calls(*self._body(syntax), opening, closing, read))

    def _read_calls(
        self, position: int, end: int, opening: str, closing: str, read: Callable[[CallRegion], Attempt]
    ) -> Iterator[Attempt]:
        text = self.text
        while position < end:
            begin = text.find(opening, position, end)
            if begin < 0:
                begin = end
            if text[position:begin].strip():
                yield stray_text(position, begin)
            if begin == end:
                return
            inner = begin + len(opening)
            close = text.find(closing, inner, end)
            limit = end if close < 0 else close
            following = text.find(opening, inner, limit)
            if following >= 0:
                close, limit = -1, following
            position = limit if close < 0 else close + len(closing)
            yield read(CallRegion(begin, position, (inner, limit), close >= 0))

    def _body(self, syntax: ToolCallSyntax) -> tuple[int, int]:
        """The range between the start and the end marker."""
        start = self._marker_length(syntax.start_markers, self.text.startswith)
        end = len(self.text) - (self._marker_length(syntax.end_markers, self.text.endswith) if self.closed else 0)
        return start, max(start, end)

    def _marker_length(self, markers: Sequence[str], is_at: Callable[[str], bool]) -> int:
        return next((len(marker) for marker in map(self.encoding.__getitem__, markers) if is_at(marker)), 0)


@dataclass(frozen=True, slots=True)
class ToolCallSyntax(ABC):
    """Frozen data that describes one way to write tool calls.

    A block runs from one of `start_markers` to the next of `end_markers`, or, where there are none, to the end of the
    turn. `inner_markers` are the other markers that the decoder looks for; those that a tokenizer has as control tokens
    count only as such. `unmarked_starts` lists the characters with which a call without a start marker may begin: a
    turn's text that begins with one of them is a block as a whole if `decode` finds a call in it.
    """

    start_markers: tuple[str, ...] = ()
    end_markers: tuple[str, ...] = ()
    inner_markers: tuple[str, ...] = ()
    unmarked_starts: str = ""

    @abstractmethod
    def decode(self, block: Block) -> list[Attempt]:
        """Every attempt in the block, in order. Never raises."""


def stray_text(start: int, end: int) -> Attempt:
    """Text between calls, kept as a malformed attempt."""
    return Attempt(start, end, None, None, Status.MALFORMED)


def make_attempt(
    block: Block, region: CallRegion, name: Any, arguments: Any, *, error: Status | None = None, id: str | None = None
) -> Attempt:
    """An attempt with the first status that applies: unclosed, `error`, missing name, malformed, unknown tool, ok."""
    status = error
    if not isinstance(name, str) or not name:
        name, arguments = None, None
        status = status or Status.MISSING_NAME
    elif not isinstance(arguments, dict) or is_deeper_than(arguments, MAX_DEPTH):
        arguments = None
        status = status or Status.MALFORMED
    elif not block.tools.knows(name):
        status = status or Status.UNKNOWN_TOOL
    if not region.closed:
        status = Status.UNCLOSED
    return Attempt(region.start, region.end, name, arguments, status or Status.OK, id)


def make_malformed_attempt(block: Block, region: CallRegion) -> Attempt:
    """An attempt without a name, malformed or unclosed."""
    return make_attempt(block, region, None, None, error=Status.MALFORMED)


def make_json_attempt(block: Block, region: CallRegion, name: str, arguments: str, *, id: str | None = None) -> Attempt:
    """`make_attempt` with arguments that are a JSON text."""
    try:
        value = parse_json(arguments)
    except InvalidJsonError:
        return make_attempt(block, region, name, None, error=Status.INVALID_JSON, id=id)
    return make_attempt(block, region, name, value, id=id)
