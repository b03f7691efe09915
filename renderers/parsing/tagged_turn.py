"""Parses turns that mark reasoning and tool calls by tags within one stream of text.

A turn begins as content. The start marker of reasoning, or a prompt that ends behind it, makes it reasoning
until the end marker; after that, markers of reasoning are literal content. The start marker of tool calls
makes it a block until the end marker.

A tool-call marker inside open reasoning is ambiguous: models draft calls while they reason, and models forget to close
their reasoning before they call. It is a draft if the reasoning is closed later or continues behind the block, and if
the completion was cut off. If the turn *ends* (a stop token was sampled) with complete blocks and nothing but white
space behind them, they are calls, and the first of them ended the reasoning. A format with `calls_end_reasoning`
decides as inference servers do: it is a draft only if the reasoning is closed later.

An end marker inside a value of a block is passed over. If the block then ends well-formed, the marker was
text of the value; if not, the value has lost its end, the first marker passed over has ended the block, and
what follows is read again.
"""

from dataclasses import dataclass, field
from enum import Enum, auto

from renderers.parsing.grammar import Grammar
from renderers.parsing.markers import MarkerSearch, Role
from renderers.parsing.response import ToolCallParseStatus
from renderers.parsing.syntaxes.syntax import Attempt
from renderers.parsing.transcript import Transcript
from renderers.parsing.turn_parser import TurnParser
from renderers.parsing.values import OpenBlock


class _State(Enum):
    REASONING = auto()
    CONTENT = auto()
    BLOCK = auto()  # between the markers of tool calls
    UNMARKED_CALL = auto()  # text that may as a whole be a call without a start marker
    BARE_CALL = auto()  # text that may be a call without the markers of a block
    BEHIND_BARE_CALL = auto()  # white space behind such a call, before what may be the end marker of a block


@dataclass(slots=True)
class _Draft:
    """Complete blocks inside open reasoning, their positions, and all text since the first of them."""

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
        self._block = OpenBlock((), 0)
        self._bare_attempts: list[Attempt] = []
        self._space: list[str] = []  # behind a bare call
        self._leading_at = 0
        self._draft: _Draft | None = None
        # With `calls_end_reasoning`: all text since the first marker of a call inside open reasoning.
        self._undecided: list[str] | None = None
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
        if self._state is _State.BARE_CALL:
            return grammar.in_bare_call
        if self._state is _State.BEHIND_BARE_CALL:
            return grammar.behind_bare_call[self._may_reason]
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
        elif self._state is _State.BEHIND_BARE_CALL:
            self._space.append(text)
            if not text.isspace():
                self._block.add("".join(self._space))
                self._space = []
                self._reject_bare_call()
        else:
            self._extend_block(text)

    def _handle_marker(self, marker: str, role: Role, at: int) -> None:
        if self._state is _State.UNMARKED_CALL:  # the text before the marker has just begun an unmarked call
            self._extend_block(marker)
        elif self._state is _State.BARE_CALL:
            self._handle_in_bare_call(marker, role)
        elif self._state is _State.BEHIND_BARE_CALL:
            if role is Role.BLOCK_END:
                self._block.add("".join([*self._space, marker]))
                self._space = []
            self._end_bare_call()
            if role is not Role.BLOCK_END:
                self._handle_marker(marker, role, at)
        elif role is Role.BARE_CALL_START:
            self._flush_leading()
            self._state = _State.BARE_CALL
            self._block = OpenBlock(self._readings(), at, marker)
        elif role is Role.BLOCK_START and self._state is _State.REASONING and self._grammar.calls_end_reasoning:
            self._undecided = [marker]
        elif role is Role.BLOCK_START:
            self._open_block(marker, at)
        elif role is Role.BLOCK_END:
            self._handle_block_end(marker)
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
            self._read_to_end(text)
        while self._state in (_State.BLOCK, _State.BARE_CALL):
            if self._state is _State.BLOCK:
                self._end_block(closed=stopped and not self._grammar.block_ends)
            else:
                self._reject_bare_call()
            again, self._again = self._again, ""
            self._read_to_end(again)
        if self._state is _State.BEHIND_BARE_CALL:
            self._end_bare_call()
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
            draft.texts.append(self._block.text)
            self._state = _State.REASONING
        self._out.add_reasoning("".join(draft.texts))

    # Content, and calls without a start marker.

    def _add_content(self, text: str, at: int) -> None:
        if self._leading is None:
            self._out.add_content(text)
            return
        if not self._leading:
            self._leading_at = at
        self._leading.append(text)
        if not text.lstrip():
            return
        leading = "".join(self._leading)
        begun, starts = leading.lstrip(), self._grammar.unmarked_starts
        if begun.startswith(starts):
            self._leading = None
            self._state, self._block = _State.UNMARKED_CALL, OpenBlock((), self._leading_at, leading)
        elif not any(start.startswith(begun) for start in starts):
            self._leading = None
            self._out.add_content(leading)

    def _flush_leading(self) -> None:
        if self._leading:
            leading = "".join(self._leading)
            self._out.add_content(leading)
            self._leading = [] if leading.isspace() else None

    def _end_unmarked_call(self, stopped: bool) -> None:
        text = self._block.text
        assert self._grammar.syntax is not None
        call = text.strip()
        attempts = self._grammar.syntax.decode(self._out.block(call, closed=stopped))
        if attempts:
            self._out.add_call_text(call[: _end_of_calls(attempts, call)])
            self._out.end_block(call, self._block.at + text.index(call), attempts, closed=stopped)
        else:
            self._out.add_content(text)

    # Calls without the markers of a block.

    def _handle_in_bare_call(self, marker: str, role: Role) -> None:
        inside = self._block.ends_inside_value()
        if inside and role is Role.BARE_CALL_END:
            self._block.pass_marker(marker, closes=True)
            return
        self._block.add(marker)
        is_ended = role is Role.BARE_CALL_END and self._read_bare_call()
        if not is_ended and (not inside or role is Role.BARE_CALL_START):
            self._reject_bare_call()

    def _read_bare_call(self) -> bool:
        """Whether the text of the block is a call of an offered tool, which the text behind it may undo."""
        assert self._grammar.syntax is not None
        attempts = self._grammar.syntax.decode(self._out.block(self._block.text, closed=True))
        is_call = bool(attempts) and all(attempt.status is not None and attempt.status.is_call for attempt in attempts)
        if is_call:
            self._bare_attempts = [attempt._replace(status=ToolCallParseStatus.NONCANONICAL) for attempt in attempts]
            self._state = _State.BEHIND_BARE_CALL
        return is_call

    def _reject_bare_call(self) -> None:
        """The call ends at the first end marker that it has passed over, or its start marker is content. What follows
        is read again.
        """
        text, passed, start = self._block.text, self._block.passed, len(self._grammar.bare_call_start)
        if passed is not None:
            self._block = OpenBlock((), self._block.at, text[:passed])
            if self._read_bare_call():
                self._again = text[passed:]
                return
        self._state = _State.CONTENT
        self._out.add_content(text[:start])
        self._again = text[start:]

    def _end_bare_call(self) -> None:
        text = self._block.text
        self._out.add_call_text(text)
        self._out.end_block(text, self._block.at, self._bare_attempts, closed=True)
        self._state = _State.CONTENT
        self._out.add_content("".join(self._space))
        self._space = []

    # Blocks.

    def _open_block(self, marker: str, at: int) -> None:
        if self._state is _State.REASONING:
            self._draft = self._draft or _Draft()
        self._flush_leading()
        self._state = _State.BLOCK
        self._block = OpenBlock(self._readings(), at, marker, self._grammar.stray)
        self._show(marker)

    def _extend_block(self, text: str) -> None:
        self._block.add(text)
        if self._state is _State.BLOCK and self._block.passed is None:
            self._show(text)

    def _show(self, text: str) -> None:
        # Text behind a call is content, not text of the call, where nothing else than the turn ends a block.
        if self._draft is None and (self._grammar.block_ends or not self._grammar.unmarked_starts):
            self._out.add_call_text(text)

    def _handle_block_end(self, marker: str) -> None:
        if self._block.ends_inside_value():
            shown = self._block.passed is None
            self._block.pass_marker(marker, closes=True)
            if shown:
                self._show(marker)
        else:
            self._extend_block(marker)
            self._end_block(closed=True)

    def _end_block(self, *, closed: bool) -> None:
        """End the block here, or at the first end marker passed over: then `_again` is the rest."""
        text, passed = self._block.text, self._block.passed
        assert self._grammar.syntax is not None
        if passed is not None:
            if self._is_well_formed(self._grammar.syntax.decode(self._out.block(text, closed=closed))):
                self._show(text[passed:])
            else:
                text, self._again, closed = text[:passed], text[passed:], True
                self._rereads += 1
        if self._draft is None:
            self._state = _State.CONTENT
            self._decode(text, self._block.at, closed=closed)
        elif closed:
            self._state = _State.REASONING
            self._draft.blocks.append((text, self._block.at))
            self._draft.texts.append(text)
        else:
            self._reject_draft()

    def _decode(self, text: str, at: int, *, closed: bool) -> None:
        assert self._grammar.syntax is not None
        attempts = self._grammar.syntax.decode(self._out.block(text, closed=closed))
        if not self._grammar.block_ends and self._grammar.unmarked_starts:
            self._out.add_call_text(text[: _end_of_calls(attempts, text)])
        self._out.end_block(text, at, attempts, closed=closed)


def _end_of_calls(attempts: list[Attempt], text: str) -> int:
    """Where text behind the calls begins that is content."""
    return next((attempt.start for attempt in attempts if attempt.status is None), len(text))
