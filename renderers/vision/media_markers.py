"""Replaces the media markers that a template printed by their expansions, before the text becomes tokens."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from renderers.errors import MessageError, TemplateError
from renderers.media.item import ExpansionPiece, MediaItem
from renderers.messages import Modality
from renderers.template.chat_template import Printed, Template
from renderers.tokens.encoding import PrintedControl
from renderers.tokens.tokenizer import TemplateTokenizer

# Modality -> the tokens that templates print for an item: Qwen-VL, Gemma 4, Kimi K2.5, Nemotron, Gemma 3.
_KNOWN_MARKERS: dict[Modality, tuple[str, ...]] = {
    "image": ("<|image_pad|>", "<|image|>", "<|media_pad|>", "<image>", "<start_of_image>"),
    "video": ("<|video_pad|>", "<|video|>", "<video>"),
    "audio": ("<|audio_pad|>", "<|AUDIO|>", "<|audio|>", "<audio_soft_token>", "<sound>", "<so_embedding>", "[AUDIO]"),
}


def printed_markers(template: Template, tokenizer: TemplateTokenizer) -> dict[Modality, str]:
    """The marker of each modality for which the template prints a known one, found without a processor."""
    found: dict[Modality, str] = {}
    for modality, tokens in _KNOWN_MARKERS.items():
        known = [token for token in tokens if tokenizer.control_id(token) is not None]
        parts = [{"type": modality, modality: "<media>"}, {"type": "text", "text": "probe"}]
        try:
            text = template.print([{"role": "user", "content": parts}]).text if known else ""
        except TemplateError:
            continue
        marker = next((token for token in known if text.count(token) == 1), None)
        if marker is not None:
            found[modality] = marker
    return found


class LocatedItem(NamedTuple):
    """A medium, and the content part that contains it."""

    message_index: int
    part_index: int
    item: MediaItem

    def slot(self) -> MediaSlot:
        """The place and the placeholder tokens of the item."""
        item = self.item
        return MediaSlot(
            self.message_index,
            self.part_index,
            item.modality,
            item.num_tokens,
            item.expansion,
            item.source.digest,
        )


class MediaSlot(NamedTuple):
    """The place of an item in the conversation, and its placeholder tokens."""

    message_index: int
    part_index: int
    modality: Modality
    num_tokens: int
    expansion: tuple[ExpansionPiece, ...] | None
    digest: str

    @property
    def layout_key(self) -> tuple[object, ...]:
        """Plain data, equal for slots with equal tokens."""
        pieces = None if self.expansion is None else [tuple(piece) for piece in self.expansion]
        return self.modality, self.num_tokens, pieces


class MediaSpan(NamedTuple):
    """Characters `start:end` that stand for an item; `embeds` are the starts of the control tokens that hold features.

    `whole` is False where text at an edge of the expansion may merge with its neighbours into one token: the span then
    begins or ends at a control token.
    """

    start: int
    end: int
    embeds: tuple[int, ...]
    whole: bool


class ExpandedPrint(NamedTuple):
    """Printed text with every marker replaced. A control token at character c is repeated `times.get(c, 1)` times.

    `spans` is parallel to the slots.
    """

    printed: Printed
    controls: Sequence[PrintedControl]
    times: Mapping[int, int]
    spans: Sequence[MediaSpan]


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
    """Replace each marker printed from character `begin` on by the expansion of its item.

    `owners` is parallel to the segments of `printed`. The text changes only where an expansion is more than markers;
    otherwise the marker stays and is repeated. Raises `MessageError` when the template printed more or fewer
    markers than there are slots.
    """
    marks = [
        control
        for control in controls
        if control.start >= begin
        and control.token_id in markers
        # A marker of a message, not of the template, is text.
        and ((origin := printed.segments[control.segment].origin) is None or origin.message_index < 0)
    ]
    if not marks and not slots:
        return ExpandedPrint(printed, controls, {}, [])
    slot_of = _slot_of_markers(marks, slots, markers, owners)
    placed = [slots[index] for index in slot_of]
    if all(slot.expansion is None for slot in placed):
        times = {control.start: slot.num_tokens for control, slot in zip(marks, placed, strict=True)}
        spans = [MediaSpan(control.start, control.end, (control.start,), True) for control in marks]
        expanded = ExpandedPrint(printed, controls, times, spans)
    else:
        expanded = _expand(printed, controls, marks, placed, tokenizer, begin)
    return expanded._replace(spans=[span for _, span in sorted(zip(slot_of, expanded.spans, strict=True))])


def _slot_of_markers(
    marks: Sequence[PrintedControl],
    slots: Sequence[MediaSlot],
    markers: Mapping[int, Modality],
    owners: Sequence[int],
) -> list[int]:
    """For each marker the index of its slot: in order within each modality, and of the same message.

    A marker that was printed outside of any message (-1) may belong to any message.
    """
    slot_of = [-1] * len(marks)
    for modality in dict.fromkeys(markers.values()):
        printed = [index for index, control in enumerate(marks) if markers[control.token_id] == modality]
        wanted = [index for index, slot in enumerate(slots) if slot.modality == modality]
        actual = [owners[marks[index].segment] for index in printed]
        expected = [slots[index].message_index for index in wanted]
        if len(actual) != len(expected) or any(a not in (-1, e) for a, e in zip(actual, expected, strict=True)):
            raise _count_error(actual, [slots[index] for index in wanted], modality)
        for marker, slot in zip(printed, wanted, strict=True):
            slot_of[marker] = slot
    return slot_of


def _count_error(actual: Sequence[int], slots: Sequence[MediaSlot], modality: Modality) -> MessageError:
    expected = [slot.message_index for slot in slots]
    differing = (index for index in sorted({*expected, *actual}) if expected.count(index) != actual.count(index))
    at = next(differing, None)
    if at is None:  # equal numbers in every message, in another order
        at = next(e for a, e in zip(actual, expected, strict=True) if a not in (-1, e))
    parts = "".join(f", part {slot.part_index} {slot.digest[:12]}" for slot in slots if slot.message_index == at)
    return MessageError(
        f"it holds {expected.count(at)} {modality} part(s){parts}, but the chat template printed {actual.count(at)} "
        f"{modality} placeholder(s). This template does not show {modality} parts there: move them to a role in which "
        "it does (usually user), or use a template that handles them.",
        message_index=at,
    )


def _expand(
    printed: Printed,
    controls: Sequence[PrintedControl],
    marks: Sequence[PrintedControl],
    slots: Sequence[MediaSlot],
    tokenizer: TemplateTokenizer,
    begin: int,
) -> ExpandedPrint:
    """The text with expansions in place of `marks`; `slots` and the spans are parallel to `marks`."""
    marker_starts = {marker.start for marker in marks}
    kept = [control for control in controls if control.start not in marker_starts]
    # Positions at which a token certainly begins or ends, whatever the text around.
    borders = {begin, len(printed.text), *(c.start for c in kept), *(c.end for c in kept)}
    text: list[str] = []
    length, position = 0, 0
    found: list[PrintedControl] = []
    times: dict[int, int] = {}
    spans: list[MediaSpan] = []
    shifts = [0]
    for marker, slot in zip(marks, slots, strict=True):
        text.append(printed.text[position : marker.start])
        length += marker.start - position
        expansion = _expanded(printed, marker, slot, tokenizer, length)
        found += expansion.controls
        times |= expansion.times
        end = length + len(expansion.text)
        certain_start = length if marker.start in borders else expansion.controls[0].start
        certain_end = end if marker.end in borders else expansion.controls[-1].end
        whole = (certain_start, certain_end) == (length, end)
        spans.append(MediaSpan(certain_start, certain_end, expansion.embeds, whole))
        text.append(expansion.text)
        length = end
        position = marker.end
        shifts.append(length - position)
    text.append(printed.text[position:])

    def moved(character: int) -> int:
        """The position in the new text of a character; inside a marker, that of the marker's start."""
        passed = bisect.bisect_right(marker_ends, character)
        begin_of_next = marks[passed].start if passed < len(marks) else character
        return min(character, begin_of_next) + shifts[passed]

    marker_ends = [marker.end for marker in marks]
    segments = [s._replace(start=moved(s.start), end=moved(s.end)) for s in printed.segments]
    moved_controls = [c._replace(start=moved(c.start), end=moved(c.end)) for c in kept]
    return ExpandedPrint(Printed("".join(text), segments), sorted([*moved_controls, *found]), times, spans)


class _Expansion(NamedTuple):
    """The text in place of a marker, and its control tokens; those at `embeds` stand for features."""

    text: str
    controls: list[PrintedControl]
    times: dict[int, int]
    embeds: tuple[int, ...]


def _expanded(
    printed: Printed, marker: PrintedControl, slot: MediaSlot, tokenizer: TemplateTokenizer, start: int
) -> _Expansion:
    """The expansion of a slot, which begins at character `start` of the new text."""
    marker_text = printed.text[marker.start : marker.end]
    pieces = slot.expansion or (ExpansionPiece(marker_text, slot.num_tokens, embed=True),)
    controls: list[PrintedControl] = []
    times: dict[int, int] = {}
    embeds: list[int] = []
    text = ""
    for piece in pieces:
        if piece.text == marker_text:
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
