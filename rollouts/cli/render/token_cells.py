"""Tokens with their texts, as `rollouts render` shows them and as JSON."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from renderers import RenderedTokens, TemplateRenderer
from renderers.rendered import TokenSpan


@dataclass(frozen=True, slots=True)
class TokenCell:
    """Tokens shown as one `text`: one, several that are one character together, or a placeholder."""

    start: int
    token_ids: tuple[int, ...]
    text: str
    message_index: int
    sampled: bool
    content: bool
    is_medium: bool = False


def token_cells(renderer: TemplateRenderer, rendered: RenderedTokens) -> Iterator[TokenCell]:
    """All tokens, in order. The joined texts are the decoded tokens, except for the placeholders of media."""
    media = rendered.multi_modal_data
    numbers: Counter[str] = Counter()
    placeholders: dict[int, tuple[str, int]] = {}  # offset -> the medium with its number, from 1, and its tokens
    for item, where in () if media is None else media.items_with_ranges():
        numbers[item.modality] += 1
        placeholders[where.offset] = f"{item.modality} {numbers[item.modality]}", where.length
    for span in rendered.spans:
        before: Sequence[int] = ()
        start = span.start
        while start < span.end:
            if start in placeholders:
                name, length = placeholders[start]
                ids: Sequence[int] = rendered.token_ids[start : start + length]
                yield _cell(span, start, ids, f"{name}: {len(ids)} tokens", is_medium=True)
                before = ()
            else:
                ids, text = _decodable_tokens(renderer, rendered.token_ids[start : span.end], before)
                yield _cell(span, start, ids, text)
                before = ids
            start += len(ids)


def _cell(span: TokenSpan, start: int, ids: Sequence[int], text: str, *, is_medium: bool = False) -> TokenCell:
    return TokenCell(start, tuple(ids), text, span.message_index, span.sampled, span.content, is_medium)


def _decodable_tokens(
    renderer: TemplateRenderer, ids: Sequence[int], before: Sequence[int]
) -> tuple[Sequence[int], str]:
    """The smallest number of first tokens that decode to whole characters, and their text after the tokens `before`.

    The text of a token may depend on the token before it: some tokenizers drop the space at the beginning of
    a text.
    """
    decode = renderer.tokenizer.decode
    text_before = decode(before)
    # One character is at most four bytes, and so at most four tokens.
    for count in range(1, min(4, len(ids)) + 1):
        text = decode([*before, *ids[:count]])
        if text.startswith(text_before) and not text.endswith("\ufffd"):
            return ids[:count], text[len(text_before) :]
    return ids[:1], decode(ids[:1])


def tokens_as_json(rendered: RenderedTokens, cells: Iterable[TokenCell]) -> dict[str, Any]:
    """Plain data: `token_ids` with their columns, `pieces` with text, `messages` with token counts."""
    counts = zip(
        rendered.message_roles,
        rendered.message_tool_names or [None] * len(rendered.message_roles),
        rendered.tokens_per_message(),
        rendered.tokens_per_message(sampled_only=True),
        strict=True,
    )
    media = [] if rendered.multi_modal_data is None else rendered.multi_modal_data.items_with_ranges()
    return {
        "token_ids": rendered.token_ids,
        "message_indices": rendered.message_indices,
        "sampled_mask": rendered.sampled_mask,
        "is_content": rendered.is_content,
        "pieces": [{"start": cell.start, "end": cell.start + len(cell.token_ids), "text": cell.text} for cell in cells],
        "messages": [
            {"role": role, "tool_name": name, "tokens": tokens, "sampled": sampled}
            for role, name, tokens, sampled in counts
        ],
        "media": [
            {"modality": item.modality, "mm_hash": item.mm_hash, "offset": where.offset, "length": where.length}
            for item, where in media
        ],
    }
