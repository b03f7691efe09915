"""Decoding of server-sent events."""

from __future__ import annotations


class EventTooLongError(ValueError):
    """An event is longer than the decoder accepts."""


class EventDecoder:
    """Decodes one stream. `longest` bounds the bytes of an event that has not ended yet.

    Lines end in LF, CRLF or CR; an empty line ends an event; several `data` lines of one event are joined by LF;
    comments and the fields `event`, `id` and `retry` are ignored. An event that is cut off by the end of the stream is
    dropped. The data stay bytes, so that no cut can split a character.
    Source: https://html.spec.whatwg.org/multipage/server-sent-events.html#parsing-an-event-stream
    """

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._line: list[bytes] = []  # pieces of the line that has not ended yet
        self._data: list[bytes] = []  # of the event that has not ended yet
        self._line_size = 0
        self._data_size = 0
        self._after_cr = False
        self._at_start = True

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of each event that ends in this piece. Raises `EventTooLongError`."""
        if self._after_cr and piece:
            piece = piece.removeprefix(b"\n")  # the second half of a CRLF
            self._after_cr = False
        self._line_size += len(piece)
        events: list[bytes] = []
        if b"\n" in piece or b"\r" in piece:
            self._after_cr = piece.endswith(b"\r")
            first, *rest = piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
            lines = [b"".join((*self._line, first)), *rest]
            if self._at_start:
                lines[0] = lines[0].removeprefix(b"\xef\xbb\xbf")
                self._at_start = False
            for line in lines[:-1]:
                if not line and self._data:
                    events.append(b"\n".join(self._data))
                    self._data.clear()
                    self._data_size = 0
                elif line == b"data" or line.startswith(b"data:"):
                    self._data.append(line[5:].removeprefix(b" "))
                    self._data_size += len(self._data[-1]) + 1
            self._line = [lines[-1]]
            self._line_size = len(lines[-1])
        else:
            self._line.append(piece)
        if self._line_size + self._data_size > self._longest:
            raise EventTooLongError(f"an event is longer than {self._longest} bytes")
        return events
