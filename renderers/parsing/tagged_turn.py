"""Parses turns that mark reasoning and tool calls by tags within one stream of text.

A turn begins as content. The start marker of reasoning, or a prompt that ends behind it, makes it reasoning until the
end marker; after that, markers of reasoning are literal content. The start marker of tool calls makes it a block until
the end marker.

A tool-call marker inside open reasoning is ambiguous: models draft calls while they reason, and models forget to close
their reasoning before they call. It is a draft if the reasoning is closed later or continues behind the block, and if
the completion was cut off. If the turn *ends* (a stop token was sampled) with complete blocks and nothing but white
space behind them, they are calls, and the first of them ended the reasoning. A format with `calls_end_reasoning`
decides as inference servers do: it is a draft only if the reasoning is closed later.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from renderers.parsing.grammar import Grammar
from renderers.parsing.markers import MarkerSearch, Role
from renderers.parsing.transcript import Transcript
from renderers.parsing.turn_parser import TurnParser


class _State(Enum):
    REASONING = auto()
    CONTENT = auto()
    BLOCK = auto()  # between the markers of tool calls
    UNMARKED_CALL = auto()  # text that may as a whole be a call without a start marker


@dataclass(slots=True)
class _Draft:
    """Complete blocks inside open reasoning, with their positions, and all the text since the first of them."""

    blocks: list[tuple[str, int]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)


class TaggedTurnParser(TurnParser):
    """Reads the text of one turn. `reasoning_open`: the prompt has opened reasoning."""

    def __init__(self, grammar: Grammar, transcript: Transcript, *, reasoning_open: bool) -> None:
        super().__init__(grammar, transcript)
        self._state = _State.CONTENT
        self._may_reason = True  # False once reasoning was closed
        # White space before text that may be a call without a start marker; None once other text has come.
        self._leading: list[str] | None = [] if grammar.unmarked_starts else None
        self._block: list[str] = []
        self._block_at = 0
        self._draft: _Draft | None = None
        # With `calls_end_reasoning`: all text since the first marker of a call inside open reasoning.
        self._undecided: list[str] | None = None
        self._undecided_at = 0
        self._may_repeat_start = reasoning_open and grammar.drops_repeated_start
        if reasoning_open and grammar.has_reasoning:
            self._open_reasoning()

    def _markers(self) -> MarkerSearch:
        grammar = self._grammar
        if self._state is _State.REASONING:
            if self._undecided is not None:
                return grammar.behind_call_in_reasoning
            return grammar.at_start_of_reasoning if self._may_repeat_start else grammar.in_reasoning
        if self._state is _State.BLOCK:
            return grammar.in_block if self._draft is None else grammar.in_draft
        if self._state is _State.UNMARKED_CALL:
            return grammar.no_markers
        return grammar.before_reasoning if self._may_reason else grammar.after_reasoning

    def _read(self, text: str, at: int) -> None:
        if self._state is _State.REASONING:
            self._may_repeat_start = self._may_repeat_start and text.isspace()
            if self._undecided is not None:
                self._undecided.append(text)
            elif self._draft is not None and text.isspace():
                self._draft.texts.append(text)
            else:
                self._reject_draft()
                self._out.add_reasoning(text)
        elif self._state is _State.CONTENT:
            self._add_content(text, at)
        else:
            self._extend_block(text)

    def _handle_marker(self, marker: str, role: Role, at: int) -> None:
        if self._state is _State.UNMARKED_CALL:  # the text before the marker has just begun an unmarked call
            self._extend_block(marker)
        elif role is Role.BLOCK_START and self._state is _State.REASONING and self._grammar.calls_end_reasoning:
            self._undecided, self._undecided_at = [marker], at
        elif role is Role.BLOCK_START:
            self._open_block(marker, at)
        elif role is Role.BLOCK_END:
            self._extend_block(marker)
            self._end_block(closed=True)
        elif role is Role.REASONING_START and self._state is _State.REASONING:
            if not self._may_repeat_start:
                self._out.add_reasoning(marker)
            self._may_repeat_start = False
        elif role is Role.REASONING_START:
            self._open_reasoning()
        elif self._state is _State.CONTENT and (self._out.content.begun or self._out.calls):
            self._add_content(marker, at)
        else:
            self._close_reasoning()

    def _finish(self, *, stopped: bool) -> None:
        if self._undecided is not None:
            text, self._undecided = "".join(self._undecided), None
            self._close_reasoning(by_call=True)
            self._pending_at = self._undecided_at
            self._pending = ""
            self.feed(text)
            self._read(self._pending, self._pending_at)
        if self._state is _State.BLOCK:
            self._end_block(closed=stopped and not self._grammar.block_ends)
        elif self._state is _State.UNMARKED_CALL:
            self._end_unmarked_call(stopped)
        self._flush_leading()
        if stopped and self._draft is not None:
            draft, self._draft = self._draft, None
            self._state = _State.CONTENT
            for text, at in draft.blocks:
                self._out.add_call_text(text)
                self._decode(text, at, closed=True)
        self._reject_draft()
        self._out.reasoning_open = self._state is _State.REASONING

    # Reasoning.

    def _open_reasoning(self) -> None:
        self._flush_leading()
        self._state = _State.REASONING
        self._out.reasoned = True
        self._out.content.strip_leading = True

    def _close_reasoning(self, *, by_call: bool = False) -> None:
        """Close reasoning, also where none was open: some prompts and templates print an end marker alone."""
        self._reject_draft()
        if self._undecided is not None:
            self._out.add_reasoning("".join(self._undecided))
            self._undecided = None
        self._out.end_reasoning(by_call=by_call)
        self._state = _State.CONTENT
        self._may_reason = False
        self._out.content.strip_leading = True

    def _reject_draft(self) -> None:
        if self._draft is None:
            return
        draft, self._draft = self._draft, None
        if self._state is _State.BLOCK:
            draft.texts += self._block
            self._state = _State.REASONING
        self._out.add_reasoning("".join(draft.texts))

    # Content, and calls without a start marker.

    def _add_content(self, text: str, at: int) -> None:
        if self._leading is None:
            self._out.add_content(text)
            return
        if not self._leading:
            self._block_at = at
        self._leading.append(text)
        stripped = text.lstrip()
        if stripped:
            leading, self._leading = "".join(self._leading), None
            if stripped[0] in self._grammar.unmarked_starts:
                self._state, self._block = _State.UNMARKED_CALL, [leading]
            else:
                self._out.add_content(leading)

    def _flush_leading(self) -> None:
        if self._leading:
            self._out.add_content("".join(self._leading))
            self._leading = []

    def _end_unmarked_call(self, stopped: bool) -> None:
        text = "".join(self._block)
        assert self._grammar.syntax is not None
        call = text.strip()
        attempts = self._grammar.syntax.decode(self._out.block(call, closed=stopped))
        if attempts:
            self._out.add_call_text(call)
            self._out.end_block(call, self._block_at + text.index(call), attempts, closed=stopped)
        else:
            self._out.add_content(text)

    # Blocks.

    def _open_block(self, marker: str, at: int) -> None:
        if self._state is _State.REASONING:
            self._draft = self._draft or _Draft()
        self._flush_leading()
        self._state = _State.BLOCK
        self._block, self._block_at = [], at
        self._extend_block(marker)

    def _extend_block(self, text: str) -> None:
        self._block.append(text)
        if self._draft is None and self._state is _State.BLOCK:
            self._out.add_call_text(text)

    def _end_block(self, *, closed: bool) -> None:
        text = "".join(self._block)
        if self._draft is None:
            self._state = _State.CONTENT
            self._decode(text, self._block_at, closed=closed)
        elif closed:
            self._state = _State.REASONING
            self._draft.blocks.append((text, self._block_at))
            self._draft.texts.append(text)
        else:
            self._reject_draft()

    def _decode(self, text: str, at: int, *, closed: bool) -> None:
        assert self._grammar.syntax is not None
        attempts = self._grammar.syntax.decode(self._out.block(text, closed=closed))
        self._out.end_block(text, at, attempts, closed=closed)
