"""From encoded text to a layout: who owns each token, which ones are sampled, where the media sit."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from renderers.media.item import MediaItem, Modality
from renderers.rendered import MultiModalData, PlaceholderRange, RenderedTokens, TokenSpan
from renderers.template.chat_template import Printed, Segment
from renderers.tokens.encoding import PrintedControl, encode_printed
from renderers.tokens.tokenizer import TemplateTokenizer
from renderers.turn_boundaries import TurnEnd, TurnShape, regions, sampled_start, turn_end
from renderers.vision.media_markers import MediaSlot, replace_markers


class TokenLayout(NamedTuple):
    """A rendered conversation but for the pixels: expanded ids, attribution, and the range of each item."""

    token_ids: list[int]
    spans: tuple[TokenSpan, ...]
    roles: list[str]
    ranges: list[PlaceholderRange]

    def with_media(
        self, items: Sequence[MediaItem], tool_names: list[str | None], markers: Mapping[int, Modality]
    ) -> RenderedTokens:
        """Fresh `RenderedTokens`; for a model without `markers` there are no media at all (None against empty)."""
        media = MultiModalData.from_items(zip(items, self.ranges, strict=True)) if markers else None
        return RenderedTokens(
            self.token_ids.copy(),
            self.spans,
            self.roles.copy(),
            media,
            message_tool_names=tool_names,
            placeholder_token_ids={modality: token_id for token_id, modality in markers.items()},
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
    markers: Mapping[int, Modality],
    begin: int = 0,
) -> TokenLayout:
    """Encode what was printed from `begin` on, attribute every token, expand each media marker into its item's tokens.

    `markers` are the tokens that a template prints for an item. `shape` None says that nothing here would be sampled:
    the text begins behind the last assistant turn. Raises `PlaceholderCountError` when the template printed more or
    fewer markers than there are `slots`.
    """
    owners = [_owner(segment, roles) for segment in printed.segments]
    printed, controls, times, stretches = replace_markers(
        printed, controls, slots, markers, owners, tokenizer, begin=begin
    )
    turns = [] if shape is None else _turns(printed, controls, roles, shape)
    marks = {segment.start for segment in printed.segments} | {turn.begin for turn in turns}
    marks.update(itertools.chain.from_iterable((stretch.start, stretch.end) for stretch in stretches))
    ascending = sorted(marks)
    encoded = encode_printed(printed.text, controls, tokenizer, ascending, begin=begin)
    token_at = dict(zip(ascending, encoded.tokens_at, strict=True))
    shown = [control for control in controls if control.start >= begin]
    token_of = {control.start: index for control, index in zip(shown, encoded.control_at, strict=True)}
    media = [range(token_at[stretch.start], token_at[stretch.end]) for stretch in stretches]

    words, borrowed = _words(turns, token_at, token_of, len(encoded.ids))
    edges = {0, len(encoded.ids), *encoded.tokens_at, *itertools.chain.from_iterable(words.values())}
    edges.update(itertools.chain.from_iterable((token, token + 1) for token in borrowed))
    first_token = [token_at[segment.start] for segment in printed.segments]

    # Everything is constant between two edges.
    in_media = set(itertools.chain.from_iterable(media))
    spans: list[TokenSpan] = []
    for start, end in itertools.pairwise(sorted(edges)):
        index = bisect.bisect_right(first_token, start) - 1
        owner = borrowed.get(start, owners[index])
        begin_words, end_words = words.get(owner, (0, 0))
        sampled = begin_words <= start < end_words
        is_body = start in in_media or _is_body(printed.segments[index])
        is_assistant = owner >= 0 and roles[owner] == "assistant"
        spans.append(TokenSpan(start, end, owner, sampled, sampled if is_assistant else is_body))
    repeats = {token_of[start]: count for start, count in times.items()}
    embeds = [[token_of[start] for start in stretch.embeds] for stretch in stretches]
    whole = [stretch.whole for stretch in stretches]
    return _repeated(encoded.ids, _merged(spans), list(roles), repeats, media, embeds, whole)


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
            sampled_start(printed, controls, printed_regions[index], shape),
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


def _repeated(
    ids: list[int],
    spans: Sequence[TokenSpan],
    roles: list[str],
    repeats: Mapping[int, int],
    media: Sequence[range],
    embeds: Sequence[Sequence[int]],
    whole: Sequence[bool],
) -> TokenLayout:
    """The layout with each token of `repeats` as often as its item takes it."""
    if not media:
        return TokenLayout(ids, tuple(spans), roles, [])
    repeated = sorted(repeats)
    added = [0, *itertools.accumulate(repeats[token] - 1 for token in repeated)]

    def moved(token: int) -> int:
        return token + added[bisect.bisect_left(repeated, token)]

    expanded: list[int] = []
    position = 0
    for token in repeated:
        expanded += ids[position:token]
        expanded += [ids[token]] * repeats[token]
        position = token + 1
    expanded += ids[position:]
    ranges = []
    for tokens, held, is_whole in zip(media, embeds, whole, strict=True):
        offset, end = moved(tokens.start), moved(tokens.stop)
        runs = _joined((moved(token) - offset, moved(token) - offset + repeats[token]) for token in held)
        sparse = None if runs == ((0, end - offset),) else runs
        ranges.append(PlaceholderRange(offset, end - offset, sparse, is_whole))
    return TokenLayout(
        expanded,
        tuple(span._replace(start=moved(span.start), end=moved(span.end)) for span in spans),
        roles,
        ranges,
    )


def _joined(runs: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Ascending half-open runs, those that touch made one."""
    joined: list[tuple[int, int]] = []
    for start, end in runs:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return tuple(joined)
