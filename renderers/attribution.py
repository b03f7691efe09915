"""From encoded text to a layout: who owns each token, which ones are sampled, where the media sit."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from renderers.errors import PlaceholderCountError
from renderers.media.item import MediaItem
from renderers.rendered import MultiModalData, PlaceholderRange, RenderedTokens, TokenSpan
from renderers.template.chat_template import Printed, Segment
from renderers.tokens.encoding import PrintedControl, encode_printed
from renderers.tokens.tokenizer import TemplateTokenizer
from renderers.turn import TurnEnd, TurnShape, regions, turn_end, words_start


class ShownItem(NamedTuple):
    """A picture and the message that holds it."""

    message_index: int
    item: MediaItem


class MediaSlot(NamedTuple):
    """A picture to be shown: which message holds it, and how many tokens it takes."""

    message_index: int
    num_tokens: int


class TokenLayout(NamedTuple):
    """A rendered conversation but for the pixels: expanded ids, attribution, and the range of each picture."""

    token_ids: list[int]
    spans: tuple[TokenSpan, ...]
    roles: list[str]
    ranges: list[PlaceholderRange]

    def with_media(self, items: Sequence[MediaItem], tool_names: list[str | None], *, sees: bool) -> RenderedTokens:
        """Fresh `RenderedTokens`; `sees` is whether the model has media at all (None against empty)."""
        media = MultiModalData.from_items(zip(items, self.ranges, strict=True)) if sees else None
        return RenderedTokens(
            self.token_ids.copy(), self.spans, self.roles.copy(), media, message_tool_names=tool_names
        )

    @property
    def nbytes(self) -> int:
        """About what this holds: list slots and int objects, span tuples with their ints."""
        return 36 * len(self.token_ids) + 200 * len(self.spans) + 100 * len(self.ranges)


def attribute(
    printed: Printed,
    controls: Sequence[PrintedControl],
    tokenizer: TemplateTokenizer,
    roles: Sequence[str],
    slots: Sequence[MediaSlot],
    *,
    shape: TurnShape | None,
    placeholder_id: int | None,
    begin: int = 0,
) -> TokenLayout:
    """Encode what was printed from `begin` on, attribute every token, expand each placeholder into its item's tokens.

    `shape` None says that nothing here would be sampled: the text begins behind the last assistant turn.
    Raises `PlaceholderCountError` when the template printed more or fewer placeholders than there are `slots`.
    """
    turns = [] if shape is None else _turns(printed, controls, roles, shape)
    marks = sorted({segment.start for segment in printed.segments} | {turn.begin for turn in turns})
    encoded = encode_printed(printed.text, controls, tokenizer, marks, begin=begin)
    token_at = dict(zip(marks, encoded.tokens_at, strict=True))
    shown = [control for control in controls if control.start >= begin]
    token_of = {control.start: index for control, index in zip(shown, encoded.control_at, strict=True)}
    placeholders = [
        token_of[control.start]
        for control in shown
        if control.token_id == placeholder_id and not _is_from_message(printed.segments[control.segment])
    ]

    words, borrowed = _words(turns, token_at, token_of, len(encoded.ids))
    edges = {0, len(encoded.ids), *encoded.tokens_at, *itertools.chain.from_iterable(words.values())}
    edges.update(itertools.chain.from_iterable((token, token + 1) for token in (*placeholders, *borrowed)))
    first_token = [token_at[segment.start] for segment in printed.segments]

    # Everything is constant between two edges.
    shown_at = set(placeholders)
    stretches: list[TokenSpan] = []
    for start, end in itertools.pairwise(sorted(edges)):
        segment = printed.segments[bisect.bisect_right(first_token, start) - 1]
        owner = borrowed.get(start, _owner(segment, roles))
        begin_words, end_words = words.get(owner, (0, 0))
        sampled = begin_words <= start < end_words
        is_body = start in shown_at or _is_body(segment)
        is_assistant = owner >= 0 and roles[owner] == "assistant"
        stretches.append(TokenSpan(start, end, owner, sampled, sampled if is_assistant else is_body))
    _check_placeholders([stretch.message_index for stretch in stretches if stretch.start in shown_at], slots)
    return _expanded(encoded.ids, _merged(stretches), list(roles), placeholders, slots)


def _words(
    turns: Sequence[_Turn], token_at: Mapping[int, int], token_of: Mapping[int, int], total: int
) -> tuple[dict[int, tuple[int, int]], dict[int, int]]:
    """Assistant -> the tokens that it samples; and token -> owner, for stops that the next role's region printed."""
    words: dict[int, tuple[int, int]] = {}
    borrowed: dict[int, int] = {}
    for turn in turns:
        end = total if turn.end is None else token_of[turn.end.control.start] + 1
        if turn.end is not None and not turn.end.inside:
            borrowed[end - 1] = turn.message
        words[turn.message] = (token_at[turn.begin], end)
    return words, borrowed


class _Turn(NamedTuple):
    """What the assistant of this message samples: from character `begin` to its turn's end."""

    message: int
    begin: int
    end: TurnEnd | None


def _turns(printed: Printed, controls: Sequence[PrintedControl], roles: Sequence[str], shape: TurnShape) -> list[_Turn]:
    printed_regions = regions(printed)
    return [
        _Turn(
            index,
            words_start(printed, controls, printed_regions[index], shape),
            turn_end(printed, controls, index, printed_regions[index], shape),
        )
        for index, role in enumerate(roles)
        if role == "assistant" and index in printed_regions
    ]


def _owner(segment: Segment, roles: Sequence[str]) -> int:
    """Who printed it; but what tools and users say is theirs even inside an assistant's turn (Gemma 4's results)."""
    if segment.origin is None or not _is_body(segment) or segment.owner < 0 or roles[segment.owner] != "assistant":
        return segment.owner
    said_by = segment.origin.message_index
    return segment.owner if roles[said_by] == "assistant" else said_by


def _is_body(segment: Segment) -> bool:
    """Whether it is text of some message's content: a name in a header is not."""
    return _is_from_message(segment) and segment.origin is not None and segment.origin.path.startswith("content")


def _is_from_message(segment: Segment) -> bool:
    return segment.origin is not None and segment.origin.message_index >= 0


def _merged(stretches: Sequence[TokenSpan]) -> list[TokenSpan]:
    """Neighbours of equal attribution made one."""
    merged: list[TokenSpan] = []
    for stretch in stretches:
        if merged and merged[-1][2:] == stretch[2:]:
            merged[-1] = merged[-1]._replace(end=stretch.end)
        else:
            merged.append(stretch)
    return merged


def _expanded(
    ids: list[int],
    spans: Sequence[TokenSpan],
    roles: list[str],
    placeholders: Sequence[int],
    slots: Sequence[MediaSlot],
) -> TokenLayout:
    """The layout with every placeholder repeated for its item."""
    if not slots:
        return TokenLayout(ids, tuple(spans), roles, [])
    added = [0, *itertools.accumulate(slot.num_tokens - 1 for slot in slots)]

    def moved(token: int) -> int:
        return token + added[bisect.bisect_left(placeholders, token)]

    expanded: list[int] = []
    position = 0
    for token, slot in zip(placeholders, slots, strict=True):
        expanded += ids[position:token]
        expanded += [ids[token]] * slot.num_tokens
        position = token + 1
    expanded += ids[position:]
    return TokenLayout(
        expanded,
        tuple(span._replace(start=moved(span.start), end=moved(span.end)) for span in spans),
        roles,
        [PlaceholderRange(moved(token), slot.num_tokens) for token, slot in zip(placeholders, slots, strict=True)],
    )


def _check_placeholders(actual: Sequence[int], slots: Sequence[MediaSlot]) -> None:
    """Placeholders and slots must pair off in order, message by message (-1: printed outside any loop)."""
    expected = [slot.message_index for slot in slots]
    if len(expected) == len(actual) and all(a in (-1, e) for a, e in zip(actual, expected, strict=True)):
        return
    for index in sorted({*expected, *actual}):
        if expected.count(index) != actual.count(index):
            raise PlaceholderCountError(index, expected.count(index), actual.count(index), "image")
    raise PlaceholderCountError(expected[0], len(expected), len(actual), "image")
