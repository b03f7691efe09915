"""The reasoning, content and calls read from a turn so far, and the deltas since the last look."""

from __future__ import annotations

from collections.abc import Sequence

from renderers.parsing.format import Format
from renderers.parsing.markers import Lexer, MarkerEncoding
from renderers.parsing.response import (
    ContentDelta,
    Delta,
    ParsedToolCall,
    ReasoningDelta,
    ToolCallDelta,
    ToolCallParseStatus,
)
from renderers.parsing.syntaxes.syntax import Attempt, CallText
from renderers.parsing.tool_schemas import ToolSchemas


class TextBuffer:
    """Text that grows piece by piece, without the newlines at its edges that belong to the layout of the template.

    Of the newlines before the first other text, `layout_newlines` are dropped, or all of them if
    `strip_leading`; of those at the end, `layout_newlines_at_end`.
    """

    def __init__(
        self, *, layout_newlines: int = 0, layout_newlines_at_end: int = 0, strip_leading: bool = False
    ) -> None:
        self.layout_newlines, self.strip_leading = layout_newlines, strip_leading
        self._layout_newlines_at_end = layout_newlines_at_end
        self.begun = False
        self._parts: list[str] = []
        self._newlines = 0  # at the end of the text so far, held back

    @classmethod
    def of_content(cls, format: Format) -> TextBuffer:
        """A buffer for the content of a turn of a format."""
        newlines, newlines_at_end = len(format.leading_newlines), len(format.trailing_newlines)
        return cls(layout_newlines=newlines, layout_newlines_at_end=newlines_at_end)

    def add(self, text: str) -> str:
        """Append `text`; return the text that is now certain to be part of the result."""
        body = text.rstrip("\n")
        if not body:
            self._newlines += len(text)
            return ""
        before = self._newlines
        self._newlines = len(text) - len(body)
        if not self.begun:
            stripped = body.lstrip("\n")
            before = self._leading_newlines(before + len(body) - len(stripped))
            body, self.begun = stripped, True
        return self._append("\n" * before + body)

    def finish(self, *, strip_trailing: bool) -> str:
        """Append and return the newlines at the end, unless `strip_trailing`."""
        newlines, self._newlines = max(0, self._newlines - self._layout_newlines_at_end), 0
        if strip_trailing:
            return ""
        return self._append("\n" * (newlines if self.begun else self._leading_newlines(newlines)))

    def _leading_newlines(self, count: int) -> int:
        return 0 if self.strip_leading else max(0, count - self.layout_newlines)

    def _append(self, text: str) -> str:
        self._parts.append(text)
        return text

    @property
    def text(self) -> str:
        return "".join(self._parts)


class Transcript:
    """Collects what a `TurnParser` reads. Texts come encoded; positions count their characters."""

    def __init__(self, lexer: Lexer, encoding: MarkerEncoding, tools: ToolSchemas, format: Format) -> None:
        self._lexer, self._encoding, self._tools = lexer, encoding, tools
        self._one_call, self._reports_noncanonical = format.one_call, format.reports_noncanonical
        self._strips_reasoning = format.reasoning is None or not format.reasoning.verbatim
        self.reasoning = TextBuffer(strip_leading=self._strips_reasoning)
        self.content = TextBuffer.of_content(format)
        self.calls: list[ParsedToolCall] = []
        self._has_call = False  # a well-formed one
        self.reasoned = False  # whether reasoning was opened, even if it is empty
        self.reasoning_open = False
        self._deltas: list[Delta] = []

    def add_reasoning(self, text: str) -> None:
        if certain := self.reasoning.add(self._encoding.decode(text)):
            self._deltas.append(ReasoningDelta(certain))

    def end_reasoning(self, *, by_call: bool = False) -> None:
        """Settle the newlines behind reasoning. Those before a call that ended it are layout."""
        if certain := self.reasoning.finish(strip_trailing=self._strips_reasoning or by_call):
            self._deltas.append(ReasoningDelta(certain))

    def add_content(self, text: str) -> None:
        if certain := self.content.add(self._encoding.decode(text)):
            self._deltas.append(ContentDelta(certain))

    def add_call_text(self, text: str) -> None:
        """Add text to the open block."""
        self._deltas.append(ToolCallDelta(len(self.calls), self._encoding.decode(text)))

    def block(self, text: str, *, closed: bool) -> CallText:
        """A block for a `ToolCallSyntax` to decode."""
        return CallText(text, 0, len(text), (0, len(text)), closed, self._encoding, self._tools)

    def end_block(self, text: str, start: int, attempts: Sequence[Attempt], *, closed: bool) -> None:
        """Add the calls of a block at `start`; attempts without a status are content behind them."""
        attempts = [attempt for attempt in attempts if attempt.start < attempt.end]
        behind = [attempt for attempt in attempts if attempt.status is None]
        if behind:
            self.end_block(text[: behind[0].start], start, attempts[: -len(behind)], closed=closed)
            self.add_content(text[behind[0].start :])
            return
        if not attempts:
            status = ToolCallParseStatus.MALFORMED_STRUCTURE if closed else ToolCallParseStatus.UNCLOSED_BLOCK
            attempts = [Attempt(0, len(text), None, None, status)]
        elif len(attempts) == 1:
            attempts = [attempts[0]._replace(start=0, end=len(text))]
        for attempt in attempts:
            call = ParsedToolCall(
                raw=self._encoding.decode(text[attempt.start : attempt.end]),
                name=attempt.name,
                arguments=attempt.arguments,
                token_span=self._lexer.span(start + attempt.start, start + attempt.end),
                status=self._status(attempt.status),
                id=attempt.id,
            )
            self._deltas.append(ToolCallDelta(len(self.calls), "", call))
            self.calls.append(call)

    def _status(self, status: ToolCallParseStatus | None) -> ToolCallParseStatus:
        assert status is not None
        if self._one_call and status.is_well_formed and self._has_call:
            return ToolCallParseStatus.SURPLUS_CALL
        self._has_call = self._has_call or status.is_well_formed
        if status is ToolCallParseStatus.NONCANONICAL and not self._reports_noncanonical:
            return ToolCallParseStatus.OK
        return status

    def finish(self) -> None:
        """Settle the newlines at the ends: those behind content belong to it unless calls follow."""
        self.end_reasoning()
        if certain := self.content.finish(strip_trailing=bool(self.calls)):
            self._deltas.append(ContentDelta(certain))

    def take_deltas(self) -> list[Delta]:
        """Return the deltas since the last call."""
        deltas, self._deltas = self._deltas, []
        return deltas
