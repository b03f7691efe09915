"""From printed text to a token layout: the owner of each token, which are sampled, where the media are."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from renderers.media.item import MediaItem
from renderers.messages import Modality
from renderers.rendered import (
    MultiModalData,
    PlaceholderRange,
    RenderedTokens,
    TokenSpan,
    UnprintedField,
    merge_adjacent,
)
from renderers.template.chat_template import Printed, Segment
from renderers.tokens.encoding import PrintedControl, encode_printed
from renderers.tokens.tokenizer import TemplateTokenizer
from renderers.turn_bounds import TurnEnd, TurnShape, regions, sampled_start, turn_end
from renderers.vision.media_markers import MediaSlot, replace_markers


class TokenLayout(NamedTuple):
    """A rendered conversation without its pixels: expanded ids, attribution, and the range of each item."""

    token_ids: list[int]
    spans: tuple[TokenSpan, ...]
    roles: list[str]
    ranges: list[PlaceholderRange]
    unprinted: tuple[UnprintedField, ...] = ()

    def with_media(
        self, items: Sequence[MediaItem] | None, tool_names: list[str | None], placeholder_token_ids: Mapping[str, int]
    ) -> RenderedTokens:
        """New `RenderedTokens`; no `multi_modal_data` without placeholders, or with `items` None."""
        media = None
        if placeholder_token_ids and items is not None:
            media = MultiModalData.from_items(zip(items, self.ranges, strict=True))
        return RenderedTokens(
            self.token_ids.copy(),
            self.spans,
            self.roles.copy(),
            media,
            message_tool_names=tool_names,
            placeholder_token_ids=placeholder_token_ids,
            unprinted=self.unprinted,
        )

    @property
    def nbytes(self) -> int:
        """About how many bytes this takes: list slots and int objects, span tuples with their ints."""
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
    """Encode the text from character `begin` on, attribute every token, expand markers into their items.

    `markers` are the tokens that a template prints for an item. `shape` is None where no token would be sampled: the
    text begins behind the last assistant turn. Raises `MessageError` when the template printed more or fewer
    markers than there are `slots`.
    """
    owners = [_owner(segment, roles) for segment in printed.segments]
    printed, controls, repeats_at, expansions = replace_markers(
        printed, controls, slots, markers, owners, tokenizer, begin=begin
    )
    turns = [] if shape is None else _turns(printed, controls, roles, shape)
    # Segments before `begin` have no tokens: what a bridge prints of the history is not encoded.
    unread = next((i for i, segment in enumerate(printed.segments) if segment.end > begin), len(printed.segments))
    segments, owners = printed.segments[unread:], owners[unread:]
    boundaries = {segment.start for segment in segments} | {turn.begin for turn in turns}
    boundaries.update(itertools.chain.from_iterable((expansion.start, expansion.end) for expansion in expansions))
    characters = sorted(boundaries)
    encoded = encode_printed(printed.text, controls, tokenizer, characters, begin=begin)
    token_at = dict(zip(characters, encoded.tokens_at, strict=True))
    encoded_controls = [control for control in controls if control.start >= begin]
    control_token = {control.start: token for control, token in zip(encoded_controls, encoded.control_at, strict=True)}
    media = [range(token_at[expansion.start], token_at[expansion.end]) for expansion in expansions]

    sampled_ranges, stop_owners = _sampled_ranges(turns, token_at, control_token, len(encoded.ids))
    edges = {0, len(encoded.ids), *encoded.tokens_at, *itertools.chain.from_iterable(sampled_ranges.values())}
    edges.update(itertools.chain.from_iterable((token, token + 1) for token in stop_owners))
    first_token = [token_at[segment.start] for segment in segments]

    # All attributes are constant between two edges.
    in_media = set(itertools.chain.from_iterable(media))
    spans: list[TokenSpan] = []
    for start, end in itertools.pairwise(sorted(edges)):
        index = bisect.bisect_right(first_token, start) - 1
        owner = stop_owners.get(start, owners[index])
        sampled_start, sampled_end = sampled_ranges.get(owner, (0, 0))
        sampled = sampled_start <= start < sampled_end
        is_body = start in in_media or _is_body(segments[index])
        is_assistant = owner >= 0 and roles[owner] == "assistant"
        spans.append(TokenSpan(start, end, owner, sampled, sampled if is_assistant else is_body))
    repeats = {control_token[start]: count for start, count in repeats_at.items()}
    embeds = [[control_token[start] for start in expansion.embeds] for expansion in expansions]
    whole = [expansion.whole for expansion in expansions]
    return _with_repeats(encoded.ids, _merged(spans), list(roles), repeats, media, embeds, whole)


def _sampled_ranges(
    turns: Sequence[_Turn], token_at: Mapping[int, int], control_token: Mapping[int, int], total: int
) -> tuple[dict[int, tuple[int, int]], dict[int, int]]:
    """Assistant message -> its sampled tokens; stop token of the next message -> assistant message."""
    ranges: dict[int, tuple[int, int]] = {}
    stop_owners: dict[int, int] = {}
    for turn in turns:
        end = total if turn.end is None else control_token[turn.end.control.start] + 1
        if turn.end is not None and not turn.end.inside:
            stop_owners[end - 1] = turn.message
        ranges[turn.message] = (token_at[turn.begin], end)
    return ranges, stop_owners


class _Turn(NamedTuple):
    """The text that an assistant message samples: from character `begin` to the end of its turn."""

    message: int
    begin: int
    end: TurnEnd | None


def _turns(printed: Printed, controls: Sequence[PrintedControl], roles: Sequence[str], shape: TurnShape) -> list[_Turn]:
    printed_regions = regions(printed)
    turns: list[_Turn] = []
    for index, role in enumerate(roles):
        if role == "assistant" and (region := printed_regions.get(index)) is not None:
            begin = sampled_start(printed, controls, region, shape)
            turns.append(_Turn(index, begin, turn_end(printed, controls, index, region, begin, shape)))
    return turns


def _owner(segment: Segment, roles: Sequence[str]) -> int:
    """The message that a segment belongs to: the one that it was printed for.

    Content of a tool or user message that is printed inside an assistant's turn (Gemma 4's tool results)
    belongs to the message that it was copied from.
    """
    if segment.origin is None or not _is_body(segment) or segment.owner < 0 or roles[segment.owner] != "assistant":
        return segment.owner
    source = segment.origin.message_index
    return segment.owner if roles[source] == "assistant" else source


def _is_body(segment: Segment) -> bool:
    """Whether the segment is text of a message's content; a name in a header is not."""
    origin = segment.origin
    return origin is not None and origin.message_index >= 0 and origin.path.startswith("content")


def _merged(spans: Sequence[TokenSpan]) -> list[TokenSpan]:
    merged: list[TokenSpan] = []
    for span in spans:
        if merged and merged[-1][2:] == span[2:]:
            merged[-1] = merged[-1]._replace(end=span.end)
        else:
            merged.append(span)
    return merged


def _with_repeats(
    ids: list[int],
    spans: Sequence[TokenSpan],
    roles: list[str],
    repeats: Mapping[int, int],
    media: Sequence[range],
    embeds: Sequence[Sequence[int]],
    whole: Sequence[bool],
) -> TokenLayout:
    """The layout with each token of `repeats` repeated as often as its item needs, and positions moved."""
    if not media:
        return TokenLayout(ids, tuple(spans), roles, [])
    repeated = sorted(repeats)
    added = [0, *itertools.accumulate(repeats[token] - 1 for token in repeated)]

    def new_position(token: int) -> int:
        return token + added[bisect.bisect_left(repeated, token)]

    expanded: list[int] = []
    position = 0
    for token in repeated:
        expanded += ids[position:token]
        expanded += [ids[token]] * repeats[token]
        position = token + 1
    expanded += ids[position:]
    ranges = []
    for tokens, embed_tokens, is_whole in zip(media, embeds, whole, strict=True):
        offset, end = new_position(tokens.start), new_position(tokens.stop)
        starts = ((new_position(token) - offset, repeats[token]) for token in embed_tokens)
        runs = tuple(merge_adjacent((start, start + count) for start, count in starts))
        sparse = None if runs == ((0, end - offset),) else runs
        ranges.append(PlaceholderRange(offset, end - offset, sparse, is_whole))
    return TokenLayout(
        expanded,
        tuple(span._replace(start=new_position(span.start), end=new_position(span.end)) for span in spans),
        roles,
        ranges,
    )
