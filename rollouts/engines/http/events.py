"""Server-sent events of a streamed response."""


class EventDecoder:
    """Decodes one stream, whose size the caller bounds.

    Lines end in LF or CRLF (in CR alone at no server); an empty line ends an event; several `data` lines of one event
    are joined by LF; comments and other fields are ignored. An event that is cut off by the end of the stream is
    dropped. The data stay bytes, so that no cut can split a character. Source:
    https://html.spec.whatwg.org/multipage/server-sent-events.html#parsing-an-event-stream
    """

    def __init__(self) -> None:
        self._line: list[bytes] = []  # pieces of the line that has not ended yet
        self._data: list[bytes] = []  # of the event that has not ended yet

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of each event that ends in this piece."""
        first, *rest = piece.split(b"\n")
        self._line.append(first)
        if not rest:
            return []
        lines = [b"".join(self._line), *rest]
        self._line = [lines.pop()]
        events: list[bytes] = []
        for line in lines:
            text = line.removesuffix(b"\r")
            if not text and self._data:
                events.append(b"\n".join(self._data))
                self._data.clear()
            elif text.startswith(b"data:"):
                self._data.append(text[5:].removeprefix(b" "))
        return events
