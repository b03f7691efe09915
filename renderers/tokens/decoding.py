"""Decodes token ids as they arrive; the text is that which `tokenizers` decodes from a whole run.

A run is a sequence of ordinary tokens between two added tokens. Byte-level tokenizers and those with byte fallback are
decoded token by token, from a table that is filled on demand; for any other kind, a run is decoded when it ends.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from renderers.tokens.tokenizer import TemplateTokenizer

# UTF-8 is decoded in pieces of so many bytes: the error of a decoder copies all that it was given.
_WINDOW = 1024


class Decoded(NamedTuple):
    """Decoded text, and the positions of its tokens in it.

    `begun[i]` is the number of characters of this text that have begun once its i-th token is read, including one that
    earlier tokens left incomplete; `inside` lists the tokens whose first byte continues a character.
    """

    text: str
    begun: list[int]
    inside: list[int]


_NOTHING = Decoded("", [], [])


class TokenDecoder(dict[int, Any]):
    """id -> its piece of a run: bytes (byte-level), text or one byte (byte fallback), the id itself (any other kind).

    None for added tokens and for ids without a token. Filled on demand; safe to share between threads.
    """

    def __init__(self, tokenizer: TemplateTokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._kind = _decoder_kind(tokenizer.body)
        self._byte_of = _byte_of_character()

    def pieces(self, token_ids: Iterable[int]) -> list[Any]:
        """The piece of each id."""
        return list(map(self.__getitem__, token_ids))

    def text_of_run(self, token_ids: Iterable[int]) -> str | None:
        """The text of a whole run; None if there is an added token, or an id without a token, among the ids."""
        if self._kind == "bytes":
            try:
                return b"".join(map(self.__getitem__, token_ids)).decode(errors="replace")
            except TypeError:  # one of the pieces is None
                return None
        pieces = self.pieces(token_ids)
        if None in pieces:
            return None
        run = self.new_run()
        return run.feed(pieces).text + run.finish().text

    def bytes_of(self, token_ids: Sequence[int]) -> list[bytes]:
        """The bytes that each token adds to the text: joined, they are the UTF-8 of what the ids decode to.

        A token may be a part of a character. Bytes that are not UTF-8 are themselves, and not U+FFFD as in the text. A
        leading space that the tokenizer removes from a run is in no token. An id without a token is U+FFFD.
        """
        found: list[bytes] = []
        strip = run_strip = self._kind.strip if isinstance(self._kind, _ByteFallback) else 0
        before: list[int] = []  # the tokens of the run, where the text of one depends on the one before it
        for token_id in token_ids:
            piece = self[token_id]
            if piece is None:
                found.append((self._tokenizer.added_token(token_id) or "\ufffd").encode())
                strip, before = run_strip, []
                continue
            if isinstance(piece, int):
                context = self._tokenizer.decode(before)
                text = self._tokenizer.decode([*before, piece])
                piece = text.removeprefix(context) if text.startswith(context) else self._tokenizer.decode([piece])
                before = [*before[-1:], token_id]
            data = piece if isinstance(piece, bytes) else piece.encode("utf-8", "replace")
            spaces = min(strip, len(data) - len(data.lstrip(b" "))) if data else 0
            if data:
                strip = strip - spaces if spaces == len(data) else 0
            found.append(data[spaces:])
        return found

    def new_run(self) -> _Utf8Run | _ByteFallbackRun | _WholeRun:
        """A decoder of one run: `feed` takes the next pieces; `finish` ends the run and returns the rest.

        Its `whole` says whether `finish` returns the whole run at once, so that no token is known for a character.
        """
        if isinstance(self._kind, _ByteFallback):
            return _ByteFallbackRun(self._kind.strip)
        return _Utf8Run() if self._kind == "bytes" else _WholeRun(self._tokenizer.body)

    def __missing__(self, token_id: int) -> Any:
        if self._tokenizer.added_token(token_id) is not None or not 0 <= token_id < self._tokenizer.vocab_size:
            return None  # not cached: there are endlessly many ids without a token
        token = self._tokenizer.body.id_to_token(int(token_id)) or ""  # numpy's integers are ids too
        piece: Any = token_id
        if self._kind == "bytes":
            try:
                piece = bytes(map(self._byte_of.__getitem__, token))
            except KeyError:  # not written in byte characters; `tokenizers` decodes it as it is
                piece = token.encode()
        elif isinstance(self._kind, _ByteFallback):
            text = token.replace(self._kind.space, " ")
            byte = _fallback_byte(text)
            piece = text if byte is None else bytes([byte])
        self[token_id] = piece
        return piece


class _ByteFallback(NamedTuple):
    """The decoder Replace, ByteFallback, Fuse and possibly Strip, as in SentencePiece."""

    space: str
    strip: int


def _decoder_kind(body: Tokenizer) -> _ByteFallback | str:
    """How tokens are decoded one by one: as "bytes", or with byte fallback; "whole" runs are decoded at their end."""
    definition = {} if body.decoder is None else json.loads(body.decoder.__getstate__())
    if definition.get("type") == "ByteLevel":
        return "bytes"
    match definition:
        case {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": space}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *rest,
            ],
        } if space:  # replacing the empty string would put a space between all characters
            match rest:
                case []:
                    return _ByteFallback(space, 0)
                case [{"type": "Strip", "content": " ", "start": int(start), "stop": 0}]:
                    return _ByteFallback(space, start)
    return "whole"


def _byte_of_character() -> dict[str, int]:
    """The alphabet of byte-level BPE: printable Latin-1 for equal bytes, U+0100 and up for others."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def _fallback_byte(token: str) -> int | None:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return int(token[3:5], 16)
        except ValueError:
            return None
    return None


class _Utf8Run:
    """Byte-level: bytes as UTF-8, U+FFFD for invalid ones; an incomplete character waits for more."""

    whole = False

    def __init__(self) -> None:
        self._pending = b""

    def feed(self, pieces: Sequence[bytes]) -> Decoded:
        data = b"".join(pieces)
        if not self._pending and data.isascii():
            return Decoded(data.decode("ascii"), list(accumulate(map(len, pieces))), [])
        pending, data = self._pending, self._pending + data
        text, begins, rest = split_utf8(data)
        self._pending = data[rest:]
        ends = np.cumsum([len(pending), *map(len, pieces)])
        begun = np.concatenate(([0], np.cumsum(begins)))[ends]
        first = np.append(begins, True)[ends[:-1]]  # the end continues no character
        return Decoded(text, begun[1:].tolist(), np.flatnonzero(~first & (np.diff(ends) > 0)).tolist())

    def finish(self) -> Decoded:
        pending, self._pending = self._pending, b""
        return Decoded("\ufffd", [], []) if pending else _NOTHING


def split_utf8(data: bytes) -> tuple[str, np.ndarray, int]:
    """Text of the complete characters, a mask of the bytes at which characters begin, and the offset of the rest.

    The mask is bool of shape (len(data),). Each maximal piece that is not UTF-8 becomes U+FFFD. The rest is a character
    that more bytes may complete.
    """
    begins = (np.frombuffer(data, dtype=np.uint8) & 0xC0) != 0x80
    view, position, pieces = memoryview(data), 0, []
    while position < len(data):
        window = view[position : position + _WINDOW]
        is_last = position + len(window) == len(data)
        try:
            pieces.append(str(window, "utf-8"))
            position += len(window)
        except UnicodeDecodeError as error:
            pieces.append(str(window[: error.start], "utf-8"))
            position += error.start
            if error.reason != "unexpected end of data":
                pieces.append("\ufffd")
                begins[position] = True
                position += error.end - error.start
            elif is_last:  # else the window has cut a character in two
                break
    return "".join(pieces), begins, position


class _ByteFallbackRun:
    """Text tokens, and byte tokens (`<0xE2>`): a run of these is decoded as UTF-8, or as one U+FFFD each."""

    whole = False

    def __init__(self, strip: int) -> None:
        self._bytes = bytearray()
        self._strip = strip  # leading spaces of the run that are still to be removed

    def feed(self, pieces: Sequence[str | bytes]) -> Decoded:
        texts: list[str] = []
        begun = [0]
        inside: list[int] = []
        for piece in pieces:
            if isinstance(piece, bytes):
                self._bytes += piece
                continue
            if self._bytes:
                texts.append(self._end_bytes(begun, inside))
            texts.append(self._stripped(piece))
            begun.append(begun[-1] + len(texts[-1]))
        return Decoded("".join(texts), begun[1:], inside)

    def finish(self) -> Decoded:
        text, begun, inside = self.feed([""])  # text ends the bytes
        return Decoded(text, begun[:-1], inside)

    def _end_bytes(self, begun: list[int], inside: list[int]) -> str:
        """The text of the byte tokens so far; their positions are added to `begun` and `inside`."""
        data, self._bytes = self._bytes, bytearray()
        try:
            text = data.decode()
        except UnicodeDecodeError:
            begun += range(begun[-1] + 1, begun[-1] + len(data) + 1)
            self._strip = 0
            return "\ufffd" * len(data)
        kept = self._stripped(text)
        dropped = len(text) - len(kept)  # spaces, so one byte each
        for index, byte in enumerate(data):
            continues = byte & 0xC0 == 0x80
            if continues:
                inside.append(len(begun) - 1)
            begun.append(begun[-1] + (not continues and index >= dropped))
        return kept

    def _stripped(self, text: str) -> str:
        if self._strip and text:
            kept = text.lstrip(" ")
            spaces = min(self._strip, len(text) - len(kept))
            text = text[spaces:]
            self._strip = 0 if text else self._strip - spaces
        return text


class _WholeRun:
    """Any other decoder: a token's text may depend on its neighbours, so a run is decoded at its end."""

    whole = True

    def __init__(self, body: Tokenizer) -> None:
        self._body = body
        self._ids: list[int] = []

    def feed(self, pieces: Sequence[int]) -> Decoded:
        self._ids += pieces
        return _NOTHING

    def finish(self) -> Decoded:
        ids, self._ids = self._ids, []
        if not ids:
            return _NOTHING
        text = self._body.decode(ids, skip_special_tokens=False)
        return Decoded(text, [len(text)] * len(ids), [])
