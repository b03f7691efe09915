"""What both parsers of a turn share: cutting the text at markers while it is still growing."""

from __future__ import annotations

from abc import ABC, abstractmethod

from renderers.parsing.grammar import Grammar
from renderers.parsing.markers import MarkerSearch, Role
from renderers.parsing.transcript import Transcript


class TurnParser(ABC):
    """Reads the encoded text of one turn into a transcript. Positions count the characters of the turn."""

    def __init__(self, grammar: Grammar, transcript: Transcript) -> None:
        self._grammar = grammar
        self._out = transcript
        self._pending = ""  # the end of the text so far, if it may be the beginning of a marker
        self._pending_at = 0

    def feed(self, text: str) -> None:
        text = self._pending + text
        position = 0
        while True:
            markers = self._markers()
            found = markers.find(text, position)
            end = markers.settled(text, position) if found is None else found.start()
            if end > position:
                self._read(text[position:end], self._pending_at + position)
            if found is None:
                break
            position = found.end()
            self._handle_marker(found.group(), markers.roles[found.group()], self._pending_at + found.start())
        self._pending = text[end:]
        self._pending_at += end

    def finish(self, *, stopped: bool) -> None:
        """Read the end of the turn; `stopped` says whether a stop token ended it."""
        if self._pending:
            self._read(self._pending, self._pending_at)
        self._finish(stopped=stopped)

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
