"""What was read of a turn so far: reasoning, content and calls, and the deltas that nobody has taken yet."""

from __future__ import annotations

from collections.abc import Sequence

from renderers.parsing.deltas import ContentDelta, Delta, ReasoningDelta, ToolCallDelta
from renderers.parsing.lexer import Lexer
from renderers.parsing.markers import MarkerEncoding
from renderers.parsing.response import ParsedToolCall, ToolCallParseStatus
from renderers.parsing.schemas import ToolSchemas
from renderers.parsing.syntaxes.syntax import Attempt, Block


class TextBuffer:
    """Text as it comes, but for the line breaks at its edges that may turn out to be layout.

    Of the breaks before the first word the first `opening` are dropped, or all of them if `strip_leading`.
    """

    def __init__(self, *, opening: int = 0, strip_leading: bool = False) -> None:
        self.opening, self.strip_leading = opening, strip_leading
        self.begun = False
        self._parts: list[str] = []
        self._breaks = 0  # line breaks that are held back

    def add(self, text: str) -> str:
        """What is certain now that `text` has come."""
        body = text.rstrip("\n")
        if not body:
            self._breaks += len(text)
            return ""
        before = self._breaks
        self._breaks = len(text) - len(body)
        if not self.begun:
            words = body.lstrip("\n")
            before = self._shown(before + len(body) - len(words))
            body, self.begun = words, True
        return self._keep("\n" * before + body)

    def finish(self, *, strip_trailing: bool) -> str:
        """The line breaks at the end, unless they are layout."""
        breaks, self._breaks = self._breaks, 0
        if strip_trailing:
            return ""
        return self._keep("\n" * (breaks if self.begun else self._shown(breaks)))

    def _shown(self, leading: int) -> int:
        return 0 if self.strip_leading else max(0, leading - self.opening)

    def _keep(self, text: str) -> str:
        self._parts.append(text)
        return text

    @property
    def text(self) -> str:
        return "".join(self._parts)


class Transcript:
    """Collects what a machine reads. Texts come in the encoding; positions count its characters."""

    def __init__(self, lexer: Lexer, encoding: MarkerEncoding, tools: ToolSchemas, opening: str) -> None:
        self._lexer, self._encoding, self._tools = lexer, encoding, tools
        self.reasoning = TextBuffer(strip_leading=True)
        self.content = TextBuffer(opening=len(opening))
        self.calls: list[ParsedToolCall] = []
        self.reasoned = False  # whether there was reasoning, however short
        self.reasoning_open = False
        self._deltas: list[Delta] = []

    def add_reasoning(self, text: str) -> None:
        if certain := self.reasoning.add(self._encoding.decode(text)):
            self._deltas.append(ReasoningDelta(certain))

    def add_content(self, text: str) -> None:
        if certain := self.content.add(self._encoding.decode(text)):
            self._deltas.append(ContentDelta(certain))

    def write_call(self, text: str) -> None:
        """More text of the block that is open."""
        self._deltas.append(ToolCallDelta(len(self.calls), self._encoding.decode(text)))

    def block(self, text: str, *, closed: bool) -> Block:
        """A block to be decoded."""
        return Block(text, closed, self._encoding, self._tools)

    def end_block(self, text: str, start: int, attempts: Sequence[Attempt], *, closed: bool) -> None:
        """The calls of a block whose `text` begins at `start`. One that is alone in its block is the whole of it."""
        attempts = [attempt for attempt in attempts if attempt.start < attempt.end]
        if not attempts:
            status = ToolCallParseStatus.MALFORMED if closed else ToolCallParseStatus.UNCLOSED
            attempts = [Attempt(0, len(text), None, None, status)]
        elif len(attempts) == 1:
            attempts = [attempts[0]._replace(start=0, end=len(text))]
        for attempt in attempts:
            call = ParsedToolCall(
                raw=self._encoding.decode(text[attempt.start : attempt.end]),
                name=attempt.name,
                arguments=attempt.arguments,
                token_span=self._lexer.span(start + attempt.start, start + attempt.end),
                status=attempt.status,
                id=attempt.id,
            )
            self._deltas.append(ToolCallDelta(len(self.calls), "", call))
            self.calls.append(call)

    def finish(self) -> None:
        """Settle the line breaks at the ends: behind content they are words unless calls were made."""
        self.reasoning.finish(strip_trailing=True)
        if certain := self.content.finish(strip_trailing=bool(self.calls)):
            self._deltas.append(ContentDelta(certain))

    def take_deltas(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas
