"""Parses turns written as several messages, each with a header: harmony (gpt-oss).

The prompt ends with `<|start|>assistant`, so a completion begins inside a header. Channel `analysis` is reasoning, a
message to a tool is a call, everything else is content.
"""

from __future__ import annotations

import re
from enum import Enum, auto

from renderers.parsing.grammar import Grammar
from renderers.parsing.markers import MARKER_CHARACTER, MarkerSearch, Role
from renderers.parsing.transcript import Transcript
from renderers.parsing.turn_parser import TurnParser

_RECIPIENT = re.compile(r"\bto=(\S+)")
_NOT_TOOLS = ("assistant", "user", "all")


class _Channel(Enum):
    HEADER = auto()
    REASONING = auto()
    CONTENT = auto()
    CALL = auto()


class MessageTurnParser(TurnParser):
    """Reads the messages of one turn. `reasoning_open`: the turn begins in the body of a reasoning message."""

    def __init__(self, grammar: Grammar, transcript: Transcript, *, reasoning_open: bool) -> None:
        super().__init__(grammar, transcript)
        assert grammar.channels is not None
        self._channel_character = grammar.encoding[grammar.channels.channel]
        self._parts: list[str] = []  # the text of the message: its header, and of a call its body
        self._message_at = 0
        self._header_length = 0
        self._recipient = ""
        self._needs_newline = False  # before the next text: the channel already holds an earlier message
        self._channel = _Channel.HEADER
        if reasoning_open:
            self._begin_body(_Channel.REASONING)

    def _markers(self) -> MarkerSearch:
        return self._grammar.in_header if self._channel is _Channel.HEADER else self._grammar.in_body

    def _read(self, text: str, at: int) -> None:
        if self._channel is _Channel.HEADER:
            self._parts.append(text)
        elif self._channel is _Channel.CALL:
            self._parts.append(text)
            self._out.add_call_text(text)
        else:
            text = "\n" + text if self._needs_newline else text
            self._needs_newline = False
            if self._channel is _Channel.REASONING:
                self._out.add_reasoning(text)
            else:
                self._out.add_content(text)

    def _handle_marker(self, marker: str, role: Role, at: int) -> None:
        if role is Role.BODY_START:
            self._parts.append(marker)
            self._read_header()
            return
        closes = role is Role.BODY_END
        if closes and self._channel is _Channel.CALL:
            self._read(marker, at)
        self._end_message(closed=closes)
        self._parts, self._message_at = ([], at + len(marker)) if closes else ([marker], at)

    def _finish(self, *, stopped: bool) -> None:
        # A call whose closing token is missing is not closed, whatever stopped the turn.
        self._out.reasoning_open = self._channel is _Channel.REASONING
        self._end_message(closed=False)

    def _read_header(self) -> None:
        header = "".join(self._parts)
        self._header_length = len(header)
        channel_words = MARKER_CHARACTER.sub(" ", header.partition(self._channel_character)[2]).split()
        recipient = _RECIPIENT.search(MARKER_CHARACTER.sub(" ", header))
        self._recipient = "" if recipient is None or recipient[1] in _NOT_TOOLS else recipient[1]
        if self._recipient:
            self._begin_body(_Channel.CALL)
            self._out.add_call_text(header)
        else:
            self._begin_body(_Channel.REASONING if channel_words[:1] == ["analysis"] else _Channel.CONTENT)

    def _begin_body(self, channel: _Channel) -> None:
        self._channel = channel
        if channel is _Channel.REASONING:
            self._out.reasoned = True
            self._needs_newline = self._out.reasoning.begun
        else:
            self._needs_newline = channel is _Channel.CONTENT and self._out.content.begun

    def _end_message(self, *, closed: bool) -> None:
        channel, self._channel = self._channel, _Channel.HEADER
        text = "".join(self._parts)
        if channel is _Channel.CALL:
            call = self._out.block(text, closed=closed)
            body_end = len(text) - 1 if closed and MARKER_CHARACTER.match(text[-1]) else len(text)
            arguments = call.plain_text(self._header_length, body_end)
            attempt = call.json_attempt(self._recipient.removeprefix("functions."), arguments)
            self._out.end_block(text, self._message_at, [attempt], closed=closed)
        elif channel is _Channel.HEADER:
            before_marker = MARKER_CHARACTER.split(text)[0]
            if before_marker.strip() and _RECIPIENT.search(before_marker) is None:
                self._out.add_content(before_marker)  # content without any header
        self._parts = []
