"""The texts of token ids, as bytes."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from renderers.tokens.decoding import TokenDecoder
from renderers.tokens.tokenizer import TemplateTokenizer


class TokenKind(IntEnum):
    """What an id is to the tokenizer."""

    TEXT = 0
    ADDED = 1  # a control token, or another token that was added to the vocabulary
    UNKNOWN = 2  # no token has this id


class TokenTexts(NamedTuple):
    """For each of u ids: `kinds` uint8 (u,); its bytes, `data[ends[i - 1] : ends[i]]`, `ends` uint32 (u,).

    The bytes of one token of a byte-level tokenizer may be an incomplete character.
    """

    kinds: np.ndarray
    ends: np.ndarray
    data: bytes


def token_texts(tokenizer: TemplateTokenizer, ids: Iterable[int]) -> TokenTexts:
    """The texts of `ids`, in order."""
    decoder = TokenDecoder(tokenizer)
    kinds: list[int] = []
    pieces: list[bytes] = []
    for token_id in map(int, ids):
        kind, piece = _text(tokenizer, decoder, token_id)
        kinds.append(kind)
        pieces.append(piece)
    ends = np.cumsum([len(piece) for piece in pieces], dtype=np.uint32)
    return TokenTexts(np.array(kinds, np.uint8), ends, b"".join(pieces))


def _text(tokenizer: TemplateTokenizer, decoder: TokenDecoder, token_id: int) -> tuple[TokenKind, bytes]:
    added = tokenizer.added_token(token_id)
    if added is not None:
        return TokenKind.ADDED, added.encode()
    if not 0 <= token_id < tokenizer.vocab_size:
        return TokenKind.UNKNOWN, b""
    (piece,) = decoder.pieces([token_id])
    if isinstance(piece, bytes):
        return TokenKind.TEXT, piece
    if isinstance(piece, int):  # a decoder that needs whole runs, of which the first token may lack its space
        return TokenKind.TEXT, decoder.bytes_of([token_id, token_id])[1]
    return TokenKind.TEXT, piece.encode(errors="replace")
