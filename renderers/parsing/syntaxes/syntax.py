"""What a tool-call syntax is: the markers around a block of calls, and a decoder of the block."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from renderers.parsing.json_text import MAX_DEPTH, InvalidJsonError, is_deeper_than, parse_json
from renderers.parsing.markers import MarkerEncoding
from renderers.parsing.response import ToolCallParseStatus as Status
from renderers.parsing.tool_schemas import ToolSchemas
from renderers.parsing.values import JSON_STRING, DelimiterSearch, Value, readings

_NOT_IN_A_NAME = re.compile(r"[<>(){}\[\]\"\r\n]")


class Attempt(NamedTuple):
    """An attempt at a call, characters `start:end` of the block; text behind calls has no status."""

    start: int
    end: int
    name: str | None
    arguments: dict[str, Any] | None
    status: Status | None
    id: str | None = None


class CallText(NamedTuple):
    """The characters `start:end` of an encoded text: one call, or a block of calls.

    `body` is the range between the markers; `closed` is False where the closing marker is missing. `values`
    says where values begin and end, in which delimiters are text.
    """

    text: str
    start: int
    end: int
    body: tuple[int, int]
    closed: bool
    encoding: MarkerEncoding
    tools: ToolSchemas
    values: tuple[Value, ...] = ()

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
        Delimiters inside values are text if the call is then well-formed, and count otherwise: its values
        have lost their ends.
        """
        text, (position, end) = self.text, self.body
        delimiters = f"{re.escape(opening)}|{re.escape(closing)}"
        searches = [DelimiterSearch(values, delimiters) for values in (*readings(self.values), ())]
        while position < end:
            begin = text.find(opening, position, end)
            if begin < 0:
                begin = end
            if text[position:begin].strip():
                yield Attempt(position, begin, None, None, Status.MALFORMED_STRUCTURE)
            if begin == end:
                return
            inner = begin + len(opening)
            tried: set[int | None] = set()
            for search in searches:
                delimiter = next(search.finditer(text, inner, end), None)
                at = None if delimiter is None else delimiter.start()
                if at in tried:
                    continue
                tried.add(at)
                call = self._until(delimiter, begin, inner, closing)
                attempt = read(call)
                if attempt.status is not None and attempt.status.is_well_formed:
                    break
                search.rereads += 1
            position = call.end
            yield attempt

    def _until(self, delimiter: re.Match[str] | None, begin: int, inner: int, closing: str) -> CallText:
        """The call that a delimiter ends, or the end of the block."""
        if delimiter is None:
            return self._replace(start=begin, end=self.body[1], body=(inner, self.body[1]), closed=False)
        closed = delimiter.group() == closing
        end = delimiter.end() if closed else delimiter.start()
        return self._replace(start=begin, end=end, body=(inner, delimiter.start()), closed=closed)

    def attempt(
        self,
        name: Any,
        arguments: Any,
        *,
        error: Status | None = None,
        id: str | None = None,
        canonical: bool = True,
    ) -> Attempt:
        """An attempt with the first status that applies: unclosed, `error`, missing name, malformed, unknown tool,
        noncanonical, ok.

        An `id` that is empty counts as absent. A name that contains a control token is malformed, and so is
        one that contains a bracket, a quote or a line break, unless it is that of an offered tool. With the
        error `INVALID_JSON`, arguments may be the text that is not JSON: it is kept, so that no caller
        takes the call for one without arguments.
        """
        status = error
        if not isinstance(name, str) or not name:
            name, arguments = None, None
            status = status or Status.MISSING_NAME
        elif self.encoding.has_control(name) or (_NOT_IN_A_NAME.search(name) and not self.tools.offers(name)):
            name, arguments = None, None
            status = status or Status.MALFORMED_STRUCTURE
        elif not isinstance(arguments, dict) or is_deeper_than(arguments, MAX_DEPTH):
            arguments = arguments if error is Status.INVALID_JSON and isinstance(arguments, str) else None
            status = status or Status.MALFORMED_STRUCTURE
        elif not self.tools.knows(name):
            status = status or Status.UNKNOWN_TOOL
        if not self.closed:
            status = Status.UNCLOSED_BLOCK
        status = status or (Status.OK if canonical else Status.NONCANONICAL)
        return Attempt(self.start, self.end, name, arguments, status, id or None)

    def failed(self, error: Status = Status.MALFORMED_STRUCTURE, name: str | None = None) -> Attempt:
        """An attempt without arguments."""
        return self.attempt(name, None, error=error)

    def json_attempt(self, name: str, arguments: str, *, id: str | None = None, canonical: bool = True) -> Attempt:
        """An attempt with arguments that are a JSON text."""
        try:
            return self.attempt(name, parse_json(arguments), id=id, canonical=canonical)
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
    count only as such. `unmarked_starts` has the characters, or the texts, with which a call without a start marker may
    begin: a turn's text that begins with one of them is a block as a whole if `decode` finds a call in it. `bare_calls`
    are the two markers of one call, if it may stand in content without those of the block: it is then a call, and not
    canonical, if it is well-formed, of an offered tool, and at the end of the turn or before another call.

    `values` says where values begin and end. An end marker inside a value is text of it if the block is then
    well-formed; without `values`, the first end marker ends a block.
    """

    start_markers: tuple[str, ...] = ()
    end_markers: tuple[str, ...] = ()
    inner_markers: tuple[str, ...] = ()
    unmarked_starts: str | tuple[str, ...] = ""
    bare_calls: tuple[str, ...] = ()

    def values(self, encoding: MarkerEncoding) -> tuple[Value, ...]:
        """How values are written, as patterns of encoded text."""
        return ()

    def decode(self, block: CallText) -> list[Attempt]:
        """Every attempt in the block, in order; `closed` says whether it has the end marker. Never raises."""
        text, encoded = block.text, block.encoding.__getitem__
        start = next((len(marker) for marker in map(encoded, self.start_markers) if text.startswith(marker)), 0)
        end_markers = self.end_markers if block.closed else ()
        end = len(text) - next((len(marker) for marker in map(encoded, end_markers) if text.endswith(marker)), 0)
        block = block._replace(body=(start, max(start, end)), values=self.values(block.encoding))
        return list(self.attempts(block))

    @abstractmethod
    def attempts(self, block: CallText) -> Iterable[Attempt]:
        """The attempts in a block whose `body` is the range between the markers, in order.

        Must not raise: text that is not a call is an attempt with a status (`block.failed`). The block may be any text
        that a model samples, cut off anywhere.
        """


@dataclass(frozen=True, slots=True)
class JsonStrings(ToolCallSyntax):
    """A syntax whose values are JSON, or have its strings: no marker inside a string ends a call."""

    def values(self, encoding: MarkerEncoding) -> tuple[Value, ...]:
        return (JSON_STRING,)
