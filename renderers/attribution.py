"""From encoded text to `RenderedTokens`: who owns each token, which ones are sampled, where the media sit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from renderers.errors import PlaceholderCountError
from renderers.rendered import MediaItem, MultiModalData, PlaceholderRange, RenderedTokens, TokenSpan
from renderers.template.chat_template import Printed
from renderers.tokens.encoding import EncodedText


class PlacedMedia(NamedTuple):
    """An item and the message that shows it."""

    message_index: int
    item: MediaItem


class TurnShape(NamedTuple):
    """What surrounds the words of an assistant: the generation prompt before them, the turn-end token behind them."""

    generation_prompt: str
    turn_end_id: int


def attribute(
    printed: Printed,
    encoded: EncodedText,
    roles: Sequence[str],
    media: Sequence[PlacedMedia],
    *,
    shape: TurnShape,
    placeholder_id: int | None,
) -> RenderedTokens:
    """Attribute every token and expand each placeholder that the template printed into its item's tokens.

    Raises `PlaceholderCountError` when the template printed more or fewer placeholders than there are `media`.
    """
    ids = np.array(encoded.ids, dtype=np.int64)
    begins = np.array([segment.start for segment in printed.segments], dtype=np.int64)
    segment_of = np.searchsorted(begins, encoded.starts, side="right") - 1
    owner = np.array([segment.owner for segment in printed.segments], dtype=np.int64)[segment_of]
    from_message = np.array(
        [segment.origin is not None and segment.origin.message_index >= 0 for segment in printed.segments], dtype=bool
    )[segment_of]

    sampled = _sampled(printed, encoded, ids, owner, roles, shape)
    placeholder = encoded.control & (ids == placeholder_id) & ~from_message
    is_assistant = np.array([role == "assistant" for role in roles] + [False], dtype=bool)[owner]  # -1 hits the False
    content = np.where(is_assistant, sampled, from_message | placeholder)

    _check_placeholders(owner[placeholder], media)
    lengths = np.ones(len(ids), dtype=np.int64)
    lengths[placeholder] = [placed.item.num_tokens for placed in media]
    offsets = np.cumsum(lengths) - lengths
    ranges = [
        PlaceholderRange(int(offset), placed.item.num_tokens)
        for offset, placed in zip(offsets[placeholder], media, strict=True)
    ]
    return RenderedTokens(
        token_ids=np.repeat(ids, lengths).tolist(),
        spans=_spans(owner, sampled, content, offsets, int(lengths.sum())),
        message_roles=list(roles),
        multi_modal_data=None
        if placeholder_id is None
        else MultiModalData.from_items([(placed.item, where) for placed, where in zip(media, ranges, strict=True)]),
    )


def _sampled(
    printed: Printed,
    encoded: EncodedText,
    ids: np.ndarray,
    owner: np.ndarray,
    roles: Sequence[str],
    shape: TurnShape,
) -> np.ndarray:
    """An assistant's tokens behind the generation prompt, up to and including its turn-end token."""
    sampled = np.zeros(len(ids), dtype=bool)
    for index, role in enumerate(roles):
        if role != "assistant":
            continue
        mine = np.flatnonzero(owner == index)
        if not len(mine):
            continue
        region_start = next(segment.start for segment in printed.segments if segment.owner == index)
        words_start = region_start + _common_prefix_length(printed.text, region_start, shape.generation_prompt)
        ends = mine[encoded.control[mine] & (ids[mine] == shape.turn_end_id) & (encoded.starts[mine] >= words_start)]
        last = ends[-1] if len(ends) else mine[-1]
        sampled[mine[(encoded.starts[mine] >= words_start) & (mine <= last)]] = True
    return sampled


def _common_prefix_length(text: str, start: int, prefix: str) -> int:
    if text.startswith(prefix, start):
        return len(prefix)
    return next((i for i, character in enumerate(prefix) if text[start + i : start + i + 1] != character), len(prefix))


def _check_placeholders(owners: np.ndarray, media: Sequence[PlacedMedia]) -> None:
    """Placeholders and media must pair off in order, message by message (-1: printed outside any loop)."""
    expected = [placed.message_index for placed in media]
    actual = owners.tolist()
    if len(expected) == len(actual) and all(a in (-1, e) for a, e in zip(actual, expected, strict=True)):
        return
    for index in sorted({*expected, *actual}):
        if expected.count(index) != actual.count(index):
            raise PlaceholderCountError(index, expected.count(index), actual.count(index), "image")
    raise PlaceholderCountError(expected[0], len(expected), len(actual), "image")


def _spans(
    owner: np.ndarray, sampled: np.ndarray, content: np.ndarray, offsets: np.ndarray, total: int
) -> tuple[TokenSpan, ...]:
    """Runs of equal attribution, in expanded token positions."""
    if not len(owner):
        return ()
    kind = owner * 4 + sampled * 2 + content
    first = np.concatenate(([0], np.flatnonzero(np.diff(kind)) + 1))
    starts = offsets[first].tolist()
    ends = [*starts[1:], total]
    return tuple(
        TokenSpan(start, end, int(owner[i]), bool(sampled[i]), bool(content[i]))
        for start, end, i in zip(starts, ends, first.tolist(), strict=True)
    )
