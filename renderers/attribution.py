"""From encoded text to a layout: who owns each token, which ones are sampled, where the media sit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from renderers.errors import PlaceholderCountError
from renderers.rendered import MediaItem, MultiModalData, PlaceholderRange, RenderedTokens, TokenSpan
from renderers.template.chat_template import Printed
from renderers.tokens.encoding import EncodedText


class MediaSlot(NamedTuple):
    """A picture to be shown: which message holds it, and how many tokens it takes."""

    message_index: int
    num_tokens: int


class TurnShape(NamedTuple):
    """What surrounds the words of an assistant: the generation prompt before them, the turn-end token behind them."""

    generation_prompt: str
    turn_end_id: int


class TokenLayout(NamedTuple):
    """A rendered conversation but for the pixels: expanded ids, attribution, and the range of each picture."""

    token_ids: list[int]
    spans: tuple[TokenSpan, ...]
    roles: list[str]
    ranges: list[PlaceholderRange]

    def with_media(self, items: Sequence[MediaItem], *, sees: bool) -> RenderedTokens:
        """Fresh `RenderedTokens`; `sees` is whether the model has media at all (None against empty)."""
        media = MultiModalData.from_items(zip(items, self.ranges, strict=True)) if sees else None
        return RenderedTokens(self.token_ids.copy(), self.spans, self.roles.copy(), media)

    @property
    def nbytes(self) -> int:
        """About what this holds: list slots and int objects, span tuples with their ints."""
        return 36 * len(self.token_ids) + 200 * len(self.spans) + 100 * len(self.ranges)


def attribute(
    printed: Printed,
    encoded: EncodedText,
    roles: Sequence[str],
    slots: Sequence[MediaSlot],
    *,
    shape: TurnShape | None,
    placeholder_id: int | None,
) -> TokenLayout:
    """Attribute every token and expand each placeholder that the template printed into its item's tokens.

    `shape` None says that nothing here would be sampled: the text begins behind the last assistant turn.
    Raises `PlaceholderCountError` when the template printed more or fewer placeholders than there are `slots`.
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

    _check_placeholders(owner[placeholder], slots)
    lengths = np.ones(len(ids), dtype=np.int64)
    lengths[placeholder] = [slot.num_tokens for slot in slots]
    offsets = np.cumsum(lengths) - lengths
    return TokenLayout(
        token_ids=np.repeat(ids, lengths).tolist(),
        spans=_spans(owner, sampled, content, offsets, int(lengths.sum())),
        roles=list(roles),
        ranges=[
            PlaceholderRange(int(offset), slot.num_tokens)
            for offset, slot in zip(offsets[placeholder], slots, strict=True)
        ],
    )


def _sampled(
    printed: Printed,
    encoded: EncodedText,
    ids: np.ndarray,
    owner: np.ndarray,
    roles: Sequence[str],
    shape: TurnShape | None,
) -> np.ndarray:
    """An assistant's tokens behind the generation prompt, up to and including its turn-end token."""
    sampled = np.zeros(len(ids), dtype=bool)
    if shape is None:
        return sampled
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


def _check_placeholders(owners: np.ndarray, slots: Sequence[MediaSlot]) -> None:
    """Placeholders and slots must pair off in order, message by message (-1: printed outside any loop)."""
    expected = [slot.message_index for slot in slots]
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
