"""Server-sent events: bytes in, cut anywhere, and the `data` of each event out."""

from __future__ import annotations


class EventTooLongError(ValueError):
    """An event is longer than the decoder accepts."""


class EventDecoder:
    """Decodes one stream. `longest` bounds the bytes of an event that has not ended yet.

    Lines end in LF, CRLF or CR; an empty line ends an event; several `data` lines of one are joined by LF; comments and
    the fields `event`, `id` and `retry` are passed over. An event that the stream's end cuts off is dropped, for it may
    lack half of its data. The data stay bytes: nothing is decoded, so no cut can split a character.
    Source: https://html.spec.whatwg.org/multipage/server-sent-events.html#parsing-an-event-stream
    """

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._line: list[bytes] = []  # pieces of the line that has not ended yet
        self._line_bytes = 0
        self._data: list[bytes] = []  # of the event that has not ended yet
        self._data_bytes = 0
        self._after_cr = False
        self._at_start = True

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of each event that ended in this piece. Raises `EventTooLongError`."""
        if self._after_cr and piece:
            piece = piece.removeprefix(b"\n")  # the other half of a CRLF that was cut in two
            self._after_cr = False
        if b"\n" not in piece and b"\r" not in piece:
            self._begin_line(piece)
            return []
        self._after_cr = piece.endswith(b"\r")
        first, *rest = piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        lines = [b"".join((*self._line, first)), *rest]
        self._line.clear()
        self._line_bytes = 0
        if self._at_start:
            lines[0] = lines[0].removeprefix(b"\xef\xbb\xbf")
            self._at_start = False
        events = []
        for line in lines[:-1]:
            if not line:
                if self._data:
                    events.append(b"\n".join(self._data))
                    self._data.clear()
                    self._data_bytes = 0
            elif line.startswith(b"data:"):
                self._add(line[6:] if line.startswith(b"data: ") else line[5:])
            elif line == b"data":
                self._add(b"")
        self._begin_line(lines[-1])
        return events

    def _add(self, data: bytes) -> None:
        self._data.append(data)
        self._data_bytes += len(data) + 1
        self._check()

    def _begin_line(self, piece: bytes) -> None:
        if piece:
            self._line.append(piece)
            self._line_bytes += len(piece)
            self._check()

    def _check(self) -> None:
        if self._line_bytes + self._data_bytes > self._longest:
            raise EventTooLongError(f"an event is longer than {self._longest} bytes")
