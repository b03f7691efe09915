"""What a tool-call syntax is: markers that open and close a block, and a decoder of the block between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from renderers.parsing.errors import InvalidJsonError
from renderers.parsing.json_text import MAX_DEPTH, deeper_than, read_json
from renderers.parsing.markers import MarkerEncoding
from renderers.parsing.response import ToolCallParseStatus as Status
from renderers.parsing.schemas import ToolSchemas


class Attempt(NamedTuple):
    """One try at a call: the characters `start:end` of the block and what they say."""

    start: int
    end: int
    name: str | None
    arguments: dict[str, Any] | None
    status: Status
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Block:
    """The text of one block in the alphabet, opening and closing markers included; `closed` if it has the latter."""

    text: str
    closed: bool
    alphabet: MarkerEncoding
    tools: ToolSchemas

    def plain(self, start: int, end: int) -> str:
        """The characters `start:end` with marker characters spelled out."""
        return self.alphabet.plain(self.text[start:end])

    def inside(self, opens: Sequence[str], closes: Sequence[str]) -> tuple[int, int]:
        """Where the text between the opening and the closing marker begins and ends."""
        start = next((len(m) for m in map(self.alphabet.__getitem__, opens) if self.text.startswith(m)), 0)
        end = len(self.text)
        if self.closed:
            end -= next((len(m) for m in map(self.alphabet.__getitem__, closes) if self.text.endswith(m)), 0)
        return start, max(start, end)


class ToolCallSyntax(Protocol):
    """Frozen data of one way to write tool calls.

    A block runs from one of `opens` to the next of `closes`, or, where there are none, to the end of the turn. `inner`
    are the other markers that the decoder looks for; those that a tokenizer has as control tokens count only as such.
    `bare` lists the characters with which a call may begin that no marker opens: an answer that begins with one of them
    is a block as a whole if `decode` finds a call in it.
    """

    @property
    def opens(self) -> tuple[str, ...]: ...

    @property
    def closes(self) -> tuple[str, ...]: ...

    @property
    def inner(self) -> tuple[str, ...]: ...

    @property
    def bare(self) -> str: ...

    def decode(self, block: Block) -> list[Attempt]:
        """Every attempt in the block, in order. Never raises."""
        ...


class Item(NamedTuple):
    """A part of a block that one call occupies, or text that belongs to none (`body` None)."""

    start: int
    end: int
    body: tuple[int, int] | None
    closed: bool


def items(text: str, start: int, end: int, opening: str, closing: str) -> Iterator[Item]:
    """Cut `text[start:end]` into items from `opening` to `closing`, and what stands between them unless it is white.

    An item that the next one begins in, or the end, is not closed.
    """
    position = start
    while position < end:
        begin = text.find(opening, position, end)
        if begin < 0:
            begin = end
        if text[position:begin].strip():
            yield Item(position, begin, None, False)
        if begin == end:
            return
        inner = begin + len(opening)
        close = text.find(closing, inner, end)
        limit = end if close < 0 else close
        following = text.find(opening, inner, limit)
        if following >= 0:
            close, limit = -1, following
        position = limit if close < 0 else close + len(closing)
        yield Item(begin, position, (inner, limit), close >= 0)


def debris(item: Item) -> Attempt:
    """Text between calls, kept as an attempt that is none."""
    return Attempt(item.start, item.end, None, None, Status.MALFORMED)


def judged(
    block: Block,
    start: int,
    end: int,
    name: Any,
    arguments: Any,
    *,
    closed: bool = True,
    flaw: Status | None = None,
    id: str | None = None,
) -> Attempt:
    """An attempt with the first status that applies: unclosed, `flaw`, missing name, malformed, unknown tool, ok."""
    status = flaw
    if not isinstance(name, str) or not name:
        name, arguments = None, None
        status = status or Status.MISSING_NAME
    elif not isinstance(arguments, dict) or deeper_than(arguments, MAX_DEPTH):
        arguments = None
        status = status or Status.MALFORMED
    elif not block.tools.knows(name):
        status = status or Status.UNKNOWN_TOOL
    if not closed:
        status = Status.UNCLOSED
    return Attempt(start, end, name, arguments, status or Status.OK, id)


def judged_json(
    block: Block, start: int, end: int, name: str, arguments: str, *, closed: bool = True, id: str | None = None
) -> Attempt:
    """As `judged`, with arguments that are a JSON text."""
    try:
        value = read_json(arguments)
    except InvalidJsonError:
        return judged(block, start, end, name, None, closed=closed, flaw=Status.INVALID_JSON, id=id)
    return judged(block, start, end, name, value, closed=closed, id=id)
