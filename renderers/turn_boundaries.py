"""Where the sampled text of an assistant begins and where its turn ends, in the text that a template printed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from renderers.template.chat_template import Printed
from renderers.tokens.encoding import PrintedControl


class Region(NamedTuple):
    """The text that a template printed for one message: characters `start:end`, from its first to its last segment.

    These are the segments `first_segment:end_segment`; `end` and `end_segment` are exclusive.
    """

    start: int
    end: int
    first_segment: int
    end_segment: int


class TurnShape(NamedTuple):
    """What a template prints around the sampled text of an assistant.

    `generation_prompt` is printed before it; `prompt_controls` are the character ranges of its control tokens.
    `stop_ids` are tokens that a model samples to end its turn; `close_ids` are those that a template prints in their
    place once the turn is history (harmony: `<|end|>` for `<|return|>`). `sampled_ids` are all tokens that a turn may
    begin with, stop tokens included.
    """

    generation_prompt: str
    prompt_controls: tuple[tuple[int, int], ...]
    stop_ids: frozenset[int]
    close_ids: frozenset[int]
    sampled_ids: frozenset[int]


class TurnEnd(NamedTuple):
    """The token that ends a turn. `inside`: it is in the turn's own region.

    GLM's templates print no token there: the role token of the next message ends the turn, in the next region.
    """

    control: PrintedControl
    inside: bool


def regions(printed: Printed) -> Mapping[int, Region]:
    """Message index -> its region, from its first segment to its last."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for index, (_, _, owner, _) in enumerate(printed.segments):
        first.setdefault(owner, index)
        last[owner] = index
    segments = printed.segments
    return {
        owner: Region(segments[begin].start, segments[last[owner]].end, begin, last[owner] + 1)
        for owner, begin in first.items()
    }


def sampled_start(printed: Printed, controls: Sequence[PrintedControl], region: Region, shape: TurnShape) -> int:
    """The character where the sampled text begins: after the longest prefix of the generation prompt printed.

    A template may print history with another reasoning state than the prompt (`<think>` opened or not), so the printed
    turn may differ from the generation prompt at any character. The start is moved back where it would lie inside a
    control token, and content never counts as generation prompt. Where the template has no generation prompt, the
    sampled text begins after the last control token before the message's content.
    """
    limit = region.start
    for segment in printed.segments[region.first_segment : region.end_segment]:
        if segment.origin is not None or segment.start != limit:
            break
        limit = segment.end
    prompt, text = shape.generation_prompt, printed.text
    if not prompt:
        opening = (
            control.end
            for control in controls
            if region.start <= control.start and control.end <= limit and control.token_id not in shape.sampled_ids
        )
        return max(opening, default=region.start)
    common = 0
    while common < len(prompt) and region.start + common < limit and text[region.start + common] == prompt[common]:
        common += 1
    cut = region.start + common
    cut = next((region.start + start for start, end in shape.prompt_controls if start < common < end), cut)
    return next((control.start for control in controls if control.start < cut < control.end), cut)


def turn_end(
    printed: Printed, controls: Sequence[PrintedControl], turn: int, region: Region, shape: TurnShape
) -> TurnEnd | None:
    """The token that ends the turn of assistant `turn`, or None if the template prints none.

    The first of these that exists: the first stop token that the template prints after the start of the sampled text;
    the first closing token after the last character of the message's content; the first control token after the
    region, if it is a stop token.
    """
    begin = sampled_start(printed, controls, region, shape)
    content_end = max(
        (
            s.end
            for s in printed.segments[region.first_segment : region.end_segment]
            if s.origin and s.origin.message_index == turn
        ),
        default=begin,
    )
    for control in controls:
        if control.start < begin or not control.from_template:
            continue
        if control.start >= region.end:
            return TurnEnd(control, False) if control.token_id in shape.stop_ids else None
        if control.token_id in shape.stop_ids or (control.token_id in shape.close_ids and control.start >= content_end):
            return TurnEnd(control, True)
    return None
