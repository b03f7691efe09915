"""Rendered tokens as the pieces that a person can read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from renderers import RenderedTokens, TemplateRenderer
from renderers.rendered import TokenSpan

# One character is at most four bytes, and so at most four tokens.
_TOKENS_OF_A_CHARACTER = 4
_BROKEN = "\ufffd"


@dataclass(frozen=True, slots=True)
class TokenCell:
    """Tokens `start:start + len(token_ids)` that show as one piece of `text`.

    Usually a single token; several where they only spell a character together, or stand for an image.
    """

    start: int
    token_ids: tuple[int, ...]
    text: str
    message_index: int
    sampled: bool
    content: bool
    image: int | None = None  # its number among the images of the conversation, from 1


def token_cells(renderer: TemplateRenderer, rendered: RenderedTokens) -> Iterator[TokenCell]:
    """All tokens, in order. Joining the texts gives what decoding the tokens gives, an image's placeholders apart."""
    media = rendered.multi_modal_data
    images = (
        {}
        if media is None
        else {where.offset: number for number, (_, where) in enumerate(media.items_with_ranges(), 1)}
    )
    lengths = {} if media is None else {where.offset: where.length for _, where in media.items_with_ranges()}
    for span in rendered.spans:
        before: Sequence[int] = ()
        start = span.start
        while start < span.end:
            if start in images:
                number = images[start]
                ids: Sequence[int] = rendered.token_ids[start : start + lengths[start]]
                yield _cell(span, start, ids, f"image {number}: {len(ids)} tokens", number)
                before = ()
            else:
                ids, text = _readable(renderer, rendered.token_ids[start : span.end], before)
                yield _cell(span, start, ids, text, None)
                before = ids
            start += len(ids)


def _cell(span: TokenSpan, start: int, ids: Sequence[int], text: str, image: int | None) -> TokenCell:
    return TokenCell(start, tuple(ids), text, span.message_index, span.sampled, span.content, image)


def _readable(renderer: TemplateRenderer, ids: Sequence[int], before: Sequence[int]) -> tuple[Sequence[int], str]:
    """The fewest first tokens that are whole characters, and their text behind the tokens `before`.

    What a token reads as may depend on its neighbour: some tokenizers drop the space at the very beginning of a text.
    """
    decode = renderer.tokenizer.decode
    known = decode(before)
    for count in range(1, min(_TOKENS_OF_A_CHARACTER, len(ids)) + 1):
        text = decode([*before, *ids[:count]])
        if text.startswith(known) and not text.endswith(_BROKEN):
            return ids[:count], text[len(known) :]
    return ids[:1], decode(ids[:1])
