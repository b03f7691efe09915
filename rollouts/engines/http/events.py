"""Server-sent events of a streamed response."""

from __future__ import annotations


class EventDecoder:
    """Decodes one stream, whose size the caller bounds.

    Lines end in LF, CRLF or CR; an empty line ends an event; several `data` lines of one event are joined by
    LF; comments and the fields `event`, `id` and `retry` are ignored. An event that is cut off by the end of
    the stream is dropped. The data stay bytes, so that no cut can split a character. Source:
    https://html.spec.whatwg.org/multipage/server-sent-events.html#parsing-an-event-stream
    """

    def __init__(self) -> None:
        self._line: list[bytes] = []  # pieces of the line that has not ended yet
        self._data: list[bytes] = []  # of the event that has not ended yet
        self._after_cr = False
        self._at_start = True

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of each event that ends in this piece."""
        if self._after_cr and piece:
            piece = piece.removeprefix(b"\n")  # the second half of a CRLF
            self._after_cr = False
        if b"\n" not in piece and b"\r" not in piece:
            self._line.append(piece)
            return []
        self._after_cr = piece.endswith(b"\r")
        first, *rest = piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        lines = [b"".join((*self._line, first)), *rest]
        self._line = [lines.pop()]
        if self._at_start:
            lines[0] = lines[0].removeprefix(b"\xef\xbb\xbf")
            self._at_start = False
        events: list[bytes] = []
        for line in lines:
            if not line and self._data:
                events.append(b"\n".join(self._data))
                self._data.clear()
            elif line == b"data" or line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
        return events
