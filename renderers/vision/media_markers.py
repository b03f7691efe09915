"""The media markers that a template printed, and what stands in their place before the text becomes tokens."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from renderers.errors import PlaceholderCountError
from renderers.media.item import ExpansionPiece, MediaItem, Modality
from renderers.template.chat_template import Printed, Segment
from renderers.tokens.encoding import PrintedControl
from renderers.tokens.tokenizer import TemplateTokenizer


class LocatedItem(NamedTuple):
    """An image or video, and the content part that holds it."""

    message_index: int
    part_index: int
    item: MediaItem

    def slot(self, first_message: int = 0) -> MediaSlot:
        """What laying out needs to know, where the messages are printed from number `first_message` on."""
        item = self.item
        return MediaSlot(
            self.message_index + first_message,
            self.part_index,
            item.modality,
            item.num_tokens,
            item.expansion,
            item.source.digest,
        )


class MediaSlot(NamedTuple):
    """Where an item is to be shown, and the tokens that it takes there."""

    message_index: int
    part_index: int
    modality: Modality
    num_tokens: int
    expansion: tuple[ExpansionPiece, ...] | None
    digest: str

    @property
    def layout_key(self) -> tuple[object, ...]:
        """Plain data, equal for slots that are laid out alike."""
        pieces = None if self.expansion is None else [tuple(piece) for piece in self.expansion]
        return self.modality, self.num_tokens, pieces


class MediaSpan(NamedTuple):
    """Characters `start:end` that stand for an item; `embeds` are the starts of the control tokens that hold features.

    `whole` is False where text at an edge of the expansion may merge with its neighbours into one token: the stretch
    then begins or ends at a control token.
    """

    start: int
    end: int
    embeds: tuple[int, ...]
    whole: bool


class ExpandedPrint(NamedTuple):
    """A print in which every marker is replaced. A control token at character c stands for `times.get(c, 1)` of them.

    `stretches` is parallel to the slots.
    """

    printed: Printed
    controls: Sequence[PrintedControl]
    times: Mapping[int, int]
    stretches: Sequence[MediaSpan]


def replace_markers(
    printed: Printed,
    controls: Sequence[PrintedControl],
    slots: Sequence[MediaSlot],
    markers: Mapping[int, Modality],
    owners: Sequence[int],
    tokenizer: TemplateTokenizer,
    *,
    begin: int = 0,
) -> ExpandedPrint:
    """Replace each marker printed from character `begin` on by what its item takes.

    `owners` is parallel to the segments of `printed`. Text is only spliced where an expansion holds more than markers;
    otherwise the marker stays, to be repeated. Raises `PlaceholderCountError` when the template printed more or fewer
    markers than there are slots.
    """
    shown = [
        control
        for control in controls
        if control.start >= begin and control.token_id in markers and not _is_said(printed.segments[control.segment])
    ]
    slot_of = _pair(shown, slots, markers, owners)
    placed = [slots[index] for index in slot_of]
    if all(slot.expansion is None for slot in placed):
        times = {control.start: slot.num_tokens for control, slot in zip(shown, placed, strict=True)}
        stretches = [MediaSpan(control.start, control.end, (control.start,), True) for control in shown]
        return ExpandedPrint(printed, controls, times, _in_slot_order(stretches, slot_of))
    replaced = _spliced(printed, controls, shown, placed, tokenizer, begin)
    return replaced._replace(stretches=_in_slot_order(replaced.stretches, slot_of))


def _in_slot_order(stretches: Sequence[MediaSpan], slot_of: Sequence[int]) -> list[MediaSpan]:
    return [stretch for _, stretch in sorted(zip(slot_of, stretches, strict=True))]


def _pair(
    shown: Sequence[PrintedControl],
    slots: Sequence[MediaSlot],
    markers: Mapping[int, Modality],
    owners: Sequence[int],
) -> list[int]:
    """For each marker the index of its slot: in order within each modality, and of the same message.

    A marker that was printed outside of any message (-1) may be any message's.
    """
    slot_of = [-1] * len(shown)
    for modality in dict.fromkeys(markers.values()):
        printed = [index for index, control in enumerate(shown) if markers[control.token_id] == modality]
        wanted = [index for index, slot in enumerate(slots) if slot.modality == modality]
        actual = [owners[shown[index].segment] for index in printed]
        expected = [slots[index].message_index for index in wanted]
        if len(actual) != len(expected) or any(a not in (-1, e) for a, e in zip(actual, expected, strict=True)):
            raise _count_error(actual, [slots[index] for index in wanted], modality)
        for marker, slot in zip(printed, wanted, strict=True):
            slot_of[marker] = slot
    return slot_of


def _count_error(actual: Sequence[int], slots: Sequence[MediaSlot], modality: Modality) -> PlaceholderCountError:
    expected = [slot.message_index for slot in slots]
    differing = (index for index in sorted({*expected, *actual}) if expected.count(index) != actual.count(index))
    at = next(differing, None)
    if at is None:  # as many in every message, but in another order
        at = next(e for a, e in zip(actual, expected, strict=True) if a not in (-1, e))
    parts = [(slot.part_index, slot.digest) for slot in slots if slot.message_index == at]
    return PlaceholderCountError(at, parts, actual.count(at), modality)


def _is_said(segment: Segment) -> bool:
    """Whether a message said it, and not the template."""
    return segment.origin is not None and segment.origin.message_index >= 0


def _spliced(
    printed: Printed,
    controls: Sequence[PrintedControl],
    shown: Sequence[PrintedControl],
    slots: Sequence[MediaSlot],
    tokenizer: TemplateTokenizer,
    begin: int,
) -> ExpandedPrint:
    """The print with expansions in the place of the markers `shown`; `slots` and the stretches are parallel to them."""
    marker_starts = {marker.start for marker in shown}
    kept = [control for control in controls if control.start not in marker_starts]
    # Where a token begins and ends for certain, whatever text is beside it.
    borders = {begin, len(printed.text), *(c.start for c in kept), *(c.end for c in kept)}
    text: list[str] = []
    length, position = 0, 0
    found: list[PrintedControl] = []
    times: dict[int, int] = {}
    stretches: list[MediaSpan] = []
    shifts = [0]
    for marker, slot in zip(shown, slots, strict=True):
        text.append(printed.text[position : marker.start])
        length += marker.start - position
        expansion = _expanded(printed, marker, slot, tokenizer, length)
        found += expansion.controls
        times |= expansion.times
        bounded = marker.start in borders, marker.end in borders
        stretches.append(_stretch(expansion, length, bounded))
        text.append(expansion.text)
        length += len(expansion.text)
        position = marker.end
        shifts.append(length - position)
    text.append(printed.text[position:])

    def moved(character: int) -> int:
        """Where a character of the old text is in the new one; inside a marker, its beginning."""
        passed = bisect.bisect_right(marker_ends, character)
        begin_of_next = shown[passed].start if passed < len(shown) else character
        return min(character, begin_of_next) + shifts[passed]

    marker_ends = [marker.end for marker in shown]
    segments = [s._replace(start=moved(s.start), end=moved(s.end)) for s in printed.segments]
    moved_controls = [c._replace(start=moved(c.start), end=moved(c.end)) for c in kept]
    return ExpandedPrint(Printed("".join(text), segments), sorted([*moved_controls, *found]), times, stretches)


class _Expansion(NamedTuple):
    """The text in place of a marker, and the control tokens in it; those at `embeds` hold features."""

    text: str
    controls: list[PrintedControl]
    times: dict[int, int]
    embeds: tuple[int, ...]


def _expanded(
    printed: Printed, marker: PrintedControl, slot: MediaSlot, tokenizer: TemplateTokenizer, start: int
) -> _Expansion:
    """What stands for a slot from character `start` of the new text on."""
    spelled = printed.text[marker.start : marker.end]
    pieces = slot.expansion or (ExpansionPiece(spelled, slot.num_tokens, embed=True),)
    controls: list[PrintedControl] = []
    times: dict[int, int] = {}
    embeds: list[int] = []
    text = ""
    for piece in pieces:
        if piece.text == spelled:
            token_id: int | None = marker.token_id
        elif piece.embed or piece.times != 1:
            token_id = tokenizer.require_control_id(piece.text, f"a placeholder of the {slot.modality} processor")
        else:
            token_id = tokenizer.control_id(piece.text)
        if token_id is not None:
            at = start + len(text)
            controls.append(PrintedControl(at, at + len(piece.text), token_id, marker.segment, True))
            times[at] = piece.times
            if piece.embed:
                embeds.append(at)
        text += piece.text
    return _Expansion(text, controls, times, tuple(embeds))


def _stretch(expansion: _Expansion, start: int, bounded: tuple[bool, bool]) -> MediaSpan:
    """Characters that begin and end with a token for certain; `bounded`: nothing can merge at the start, at the end."""
    end = start + len(expansion.text)
    first, last = expansion.controls[0].start, expansion.controls[-1].end
    stretch = (start if bounded[0] else first, end if bounded[1] else last)
    return MediaSpan(*stretch, expansion.embeds, whole=stretch == (start, end))
