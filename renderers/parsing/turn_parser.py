"""What both parsers of a turn share: cutting the text at markers while it is still growing, and blocks of calls."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from renderers.parsing.grammar import Grammar
from renderers.parsing.markers import MarkerSearch, Role
from renderers.parsing.syntaxes.syntax import Attempt
from renderers.parsing.transcript import Transcript
from renderers.parsing.values import MAX_REREADS, Readings, readings


class TurnParser(ABC):
    """Reads the encoded text of one turn into a transcript. Positions count the characters of the turn."""

    def __init__(self, grammar: Grammar, transcript: Transcript) -> None:
        self._grammar = grammar
        self._out = transcript
        self._pending = ""  # the end of the text so far, if it may be the beginning of a marker
        self._pending_at = 0
        self._again = ""  # text directly before the current position, to be read once more
        self._rereads = 0  # how often a block was cut at a marker inside a value that has lost its end

    def feed(self, text: str) -> None:
        text = self._pending + text
        position = 0
        while True:
            markers = self._markers()
            found = markers.find(text, position)
            end = markers.settled(text, position) if found is None else found.start()
            if end > position:
                self._read(text[position:end], self._pending_at + position)
            if self._again:
                position = end
            elif found is None:
                break
            else:
                position = found.end()
                role = markers.roles[found.group()]
                self._handle_marker(found.group(), role, self._pending_at + found.start())
            position -= len(self._again)
            if position < 0:  # some of it came with an earlier piece
                self._pending_at += position
                text, position = self._again[:-position] + text, 0
            self._again = ""
        self._pending = text[end:]
        self._pending_at += end

    def finish(self, *, stopped: bool) -> None:
        """Read the end of the turn; `stopped` says whether a stop token ended it."""
        self._read_to_end("")
        self._finish(stopped=stopped)

    def _read_to_end(self, again: str) -> None:
        """Read the end of the turn: the text that was held back, or text to be read again."""
        if again:
            self._pending, self._pending_at = "", self._pending_at + len(self._pending) - len(again)
            self.feed(again)
        pending, self._pending = self._pending, ""
        if pending:
            self._read(pending, self._pending_at)
            self._pending_at += len(pending)
        if self._again:
            again, self._again = self._again, ""
            self._read_to_end(again)

    def _is_well_formed(self, attempts: Sequence[Attempt]) -> bool:
        return bool(attempts) and all(a.status is not None and a.status.is_well_formed for a in attempts)

    def _readings(self) -> Readings:
        """The ways to read values in the next block. JSON is given up first: texts may begin like it."""
        return readings(self._grammar.values)[self._rereads // MAX_REREADS :]

    @abstractmethod
    def _markers(self) -> MarkerSearch:
        """The markers that count in the current state."""

    @abstractmethod
    def _read(self, text: str, at: int) -> None:
        """Take text without markers that begins at position `at`."""

    @abstractmethod
    def _handle_marker(self, marker: str, role: Role, at: int) -> None:
        """Take a marker that begins at position `at`."""

    @abstractmethod
    def _finish(self, *, stopped: bool) -> None:
        """Complete what the end of the turn leaves open."""
