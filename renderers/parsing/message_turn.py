"""Parses turns written as several messages, each with a header: harmony (gpt-oss).

The prompt ends with `<|start|>assistant`, so a completion begins inside a header. Channel `analysis` is
reasoning, a message to a tool is a call, everything else is content. Words that are no part of a header, as
where the model has left out `<|message|>`, are text of the message; they make a call malformed. A marker
inside a JSON string of a call is text of it if the call is then well-formed; if not, the first such marker
has ended the message.
"""

import re
from enum import Enum, auto

from renderers.parsing.grammar import Grammar
from renderers.parsing.markers import MARKER_CHARACTER, MarkerSearch, Role
from renderers.parsing.response import ToolCallParseStatus as Status
from renderers.parsing.syntaxes.syntax import Attempt
from renderers.parsing.transcript import Transcript
from renderers.parsing.turn_parser import TurnParser
from renderers.parsing.values import OpenBlock

_RECIPIENT = re.compile(r"\bto=([^\s<\ud800-\udfff]+)")
_NAMES = ("assistant", "analysis", "commentary", "final")
# What else a header may hold: the type of the content, `<|constrain|>json`.
_CONTENT_TYPE = re.compile(r"(?P<constrain><\|\w+\|>)?\s*[\w./+-]*")


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
        self._header: list[str] = []
        self._message_at = 0
        self._body = OpenBlock((), 0)  # of a call
        self._recipient = ""
        self._needs_newline = False  # before the next text: the channel already holds an earlier message
        self._channel = _Channel.HEADER
        if reasoning_open:
            self._begin_body(_Channel.REASONING)

    def _markers(self) -> MarkerSearch:
        return self._grammar.in_header if self._channel is _Channel.HEADER else self._grammar.in_body

    def _read(self, text: str, at: int) -> None:
        if self._channel is _Channel.HEADER:
            self._header.append(text)
        elif self._channel is _Channel.CALL:
            self._body.add(text)
            if self._body.passed is None:
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
            self._header.append(marker)
            self._read_header(at + len(marker))
            return
        closes = role is Role.BODY_END
        if self._channel is _Channel.CALL:
            if self._body.ends_inside_value():
                shown = self._body.passed is None
                self._body.pass_marker(marker, closes=closes)
                if shown and closes:
                    self._out.add_call_text(marker)
                return
            if closes:
                self._read(marker, at)
            self._end_call(closed=closes, marker="" if closes else marker)
            if self._again:
                return
        else:
            self._end_message()
        self._header, self._message_at = ([], at + len(marker)) if closes else ([marker], at)

    def _finish(self, *, stopped: bool) -> None:
        # A call whose closing token is missing is not closed, whatever stopped the turn.
        while self._channel is _Channel.CALL:
            self._end_call(closed=False)
            again, self._again = self._again, ""
            self._read_to_end(again)
        self._out.reasoning_open = self._channel is _Channel.REASONING
        self._end_message()

    def _read_header(self, body_at: int) -> None:
        header = "".join(self._header)
        self._recipient = _recipient(header)
        if self._recipient:
            self._begin_body(_Channel.CALL)
            self._body = OpenBlock(self._readings(), body_at)
            self._out.add_call_text(header)
        else:
            words = _words_in(header)
            self._begin_text(header, "" if _CONTENT_TYPE.fullmatch(words) else words)

    def _begin_text(self, header: str, words: str) -> None:
        """Begin a message that is no call with the words in its header."""
        self._out.add_content(_stray_text(header))
        channel_words = MARKER_CHARACTER.sub(" ", header.partition(self._channel_character)[2]).split()
        self._begin_body(_Channel.REASONING if channel_words[:1] == ["analysis"] else _Channel.CONTENT)
        if words:
            self._read(words, self._message_at)
            self._needs_newline = True

    def _begin_body(self, channel: _Channel) -> None:
        self._channel = channel
        if channel is _Channel.REASONING:
            self._out.reasoned = True
            self._needs_newline = self._out.reasoning.begun
        else:
            self._needs_newline = channel is _Channel.CONTENT and self._out.content.begun

    def _end_call(self, *, closed: bool, marker: str = "") -> None:
        """End the call, here or at the first marker that it has passed over: then `_again` is the rest."""
        self._channel = _Channel.HEADER
        header, body, passed = "".join(self._header), self._body.text, self._body.passed
        attempt = self._call(header, body, closed=closed)
        if passed is not None and self._is_well_formed([attempt]):
            self._out.add_call_text(body[passed:])
        elif passed is not None:
            body, self._again, closed = body[:passed], body[passed:] + marker, self._body.passed_closes
            self._rereads += 1
            attempt = self._call(header, body, closed=closed)
        self._out.end_block(header + body, self._message_at, [attempt], closed=closed)
        self._header, self._message_at = [], self._body.at + len(body)

    def _call(self, header: str, body: str, *, closed: bool) -> Attempt:
        call = self._out.block(header + body, closed=closed)
        ends = self._grammar.body_ends if closed else ()
        end = len(body) - next((len(marker) for marker in ends if body.endswith(marker)), 0)
        arguments = call.plain_text(len(header), len(header) + end)
        attempt = call.json_attempt(self._recipient.removeprefix("functions."), arguments)
        is_header = _CONTENT_TYPE.fullmatch(_words_in(header)) and not _stray_text(_RECIPIENT.sub("", header))
        if not is_header and attempt.status is not None and attempt.status.is_well_formed:
            return attempt._replace(status=Status.MALFORMED_STRUCTURE)
        return attempt

    def _end_message(self) -> None:
        channel, self._channel = self._channel, _Channel.HEADER
        header, self._header = "".join(self._header), []
        if channel is not _Channel.HEADER:
            return
        recipient = _recipient(header)
        if recipient and (MARKER_CHARACTER.search(header) or header.lstrip().startswith("to=")):  # a call, cut off
            call = self._out.block(header, closed=False)
            self._out.add_call_text(header)
            attempt = call.failed(name=recipient.removeprefix("functions."))
            self._out.end_block(header, self._message_at, [attempt], closed=False)
            return
        words = _words_in(header)
        found = _CONTENT_TYPE.fullmatch(words)
        if words and (found is None or found["constrain"] is None):
            self._begin_text(header, words)
            self._channel = _Channel.HEADER
        else:
            self._out.add_content(_stray_text(header))


def _recipient(header: str) -> str:
    """The tool that a header names; "" if the message is not a call."""
    found = _RECIPIENT.search(header)
    return "" if found is None or found[1] in ("assistant", "user", "all") else found[1]


def _stray_text(header: str) -> str:
    """The text before the first marker of a header, which is content; "" if it names a role."""
    stray = MARKER_CHARACTER.split(header)[0]
    return "" if stray.strip() in ("", "assistant") else stray


def _words_in(header: str) -> str:
    """The text behind the markers of a header without its recipient and its names, of which the last may be cut off."""
    words = []
    for part in map(str.strip, MARKER_CHARACTER.split(_RECIPIENT.sub("", header, count=1))[1:]):
        name = next((name for name in _NAMES if part.startswith(name)), "")
        words.append("" if any(each.startswith(part) for each in _NAMES) else part.removeprefix(name).strip())
    return " ".join(filter(None, words))
