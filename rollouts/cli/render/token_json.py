"""Rendered tokens as JSON."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from renderers import RenderedTokens
from rollouts.cli.render.token_cells import TokenCell


def tokens_as_json(rendered: RenderedTokens, cells: Iterable[TokenCell]) -> dict[str, Any]:
    """Plain data: `token_ids` with their columns, `pieces` with their text, `messages` with their token counts.


    A piece covers tokens `start:end`: usually one token, several if only together they decode to a character, or if
    they are the placeholder of an image.
    """
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
