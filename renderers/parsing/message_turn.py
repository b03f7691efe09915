"""The channel machine of formats that write a turn as several messages, each with a header: harmony (gpt-oss).

The prompt ends with `<|start|>assistant`, so a completion begins inside a header. Channel `analysis` is reasoning, a
message to a tool is a call, everything else is content.
"""

from __future__ import annotations

import re
from enum import Enum, auto

from renderers.parsing.grammar import Grammar, Role
from renderers.parsing.syntaxes.syntax import CallRegion, make_json_attempt
from renderers.parsing.transcript import TextBuffer, Transcript

_MARK = re.compile("[\ud800-\udfff]")
_RECIPIENT = re.compile(r"\bto=(\S+)")
_NOT_TOOLS = ("assistant", "user", "all")


class _Channel(Enum):
    HEADER = auto()
    REASONING = auto()
    CONTENT = auto()
    CALL = auto()


class MessageTurnParser:
    """Reads the text of one turn, in the encoding, into a transcript."""

    def __init__(self, grammar: Grammar, transcript: Transcript, *, reasoning_open: bool) -> None:
        assert grammar.channels is not None
        self._grammar = grammar
        self._out = transcript
        self._channel_mark = grammar.encoding[grammar.channels.channel]
        self._text = ""
        self._base = 0
        self._parts: list[str] = []  # the message from its start: header, and for a call its body
        self._message_at = 0
        self._header_length = 0
        self._recipient = ""
        self._follows = False  # whether the channel already holds a message, so that a line break comes between
        self._channel = _Channel.HEADER
        if reasoning_open:
            self._begin(_Channel.REASONING)

    def feed(self, text: str) -> None:
        self._text += text
        position = 0
        while True:
            markers = self._grammar.in_header if self._channel is _Channel.HEADER else self._grammar.in_body
            found = markers.find(self._text, position)
            end = markers.settled(self._text, position) if found is None else found.start()
            if end > position:
                self._read(self._text[position:end])
            if found is None:
                break
            position = found.end()
            self._handle_marker(
                found.group(), markers.roles[found.group()], self._base + found.start(), self._base + position
            )
        self._text = self._text[end:]
        self._base += end

    def finish(self, *, stopped: bool) -> None:
        """No more text comes. A message to a tool that its closing token did not end is not closed."""
        if self._text:
            self._read(self._text)
        self._out.reasoning_open = self._channel is _Channel.REASONING
        self._end(closed=False)

    def _read(self, text: str) -> None:
        if self._channel is _Channel.HEADER:
            self._parts.append(text)
        elif self._channel is _Channel.CALL:
            self._parts.append(text)
            self._out.write_call(text)
        elif self._channel is _Channel.REASONING:
            self._out.add_reasoning("\n" + text if self._follows else text)
            self._follows = False
        else:
            self._out.add_content("\n" + text if self._follows else text)
            self._follows = False

    def _handle_marker(self, marker: str, role: Role, at: int, behind: int) -> None:
        if role is Role.BODY_START:
            self._parts.append(marker)
            self._begin_by_header()
            return
        closes = role is Role.BODY_END
        if closes and self._channel is _Channel.CALL:
            self._read(marker)
        self._end(closed=closes)
        self._parts, self._message_at = ([], behind) if closes else ([marker], at)

    def _begin_by_header(self) -> None:
        header = "".join(self._parts)
        self._header_length = len(header)
        words = _MARK.sub(" ", header.partition(self._channel_mark)[2]).split()
        recipient = _RECIPIENT.search(_MARK.sub(" ", header))
        self._recipient = "" if recipient is None or recipient[1] in _NOT_TOOLS else recipient[1]
        if self._recipient:
            self._begin(_Channel.CALL)
            self._out.write_call(header)
        else:
            self._begin(_Channel.REASONING if words[:1] == ["analysis"] else _Channel.CONTENT)

    def _begin(self, channel: _Channel) -> None:
        self._channel = channel
        words: TextBuffer | None = {_Channel.REASONING: self._out.reasoning, _Channel.CONTENT: self._out.content}.get(
            channel
        )
        self._follows = words is not None and words.begun
        if channel is _Channel.REASONING:
            self._out.reasoned = True

    def _end(self, *, closed: bool) -> None:
        channel, self._channel = self._channel, _Channel.HEADER
        text = "".join(self._parts)
        if channel is _Channel.CALL:
            self._decode(text, closed=closed)
        elif channel is _Channel.HEADER:
            words = _MARK.split(text)[0]
            if words.strip() and _RECIPIENT.search(words) is None:
                self._out.add_content(words)  # an answer without any header
        self._parts = []

    def _decode(self, text: str, *, closed: bool) -> None:
        block = self._out.block(text, closed=closed)
        body_end = len(text) - 1 if closed and _MARK.match(text[-1]) else len(text)
        name, arguments = self._recipient.removeprefix("functions."), block.plain_text(self._header_length, body_end)
        region = CallRegion(0, len(text), (self._header_length, body_end), closed)
        attempt = make_json_attempt(block, region, name, arguments)
        self._out.end_block(text, self._message_at, [attempt], closed=closed)
