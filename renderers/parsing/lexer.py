"""Sampled ids -> marker tokens and runs of text, with their token ranges."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from renderers.tokens.tokenizer import TemplateTokenizer


class Lexeme(NamedTuple):
    """Tokens `start:end`: a marker (one token, `marker` names it) or text (`marker` is None)."""

    start: int
    end: int
    text: str
    marker: str | None


def lex(token_ids: Sequence[int], tokenizer: TemplateTokenizer, markers: Collection[str]) -> Iterator[Lexeme]:
    """Cut ids at the control tokens in `markers`; every other token, control or not, is text."""
    ids_of_markers = {tokenizer.control_id(marker): marker for marker in markers}
    start = 0
    for index, token_id in enumerate(token_ids):
        marker = ids_of_markers.get(token_id)
        if marker is not None:
            if index > start:
                yield Lexeme(start, index, tokenizer.decode(token_ids[start:index]), None)
            yield Lexeme(index, index + 1, marker, marker)
            start = index + 1
    if len(token_ids) > start:
        yield Lexeme(start, len(token_ids), tokenizer.decode(token_ids[start:]), None)
