"""Where the turn of an assistant begins and ends in printed text."""

import itertools
import operator
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
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

    `generation_prompt` is printed before it; `prompt_controls` are the character ranges of its control
    tokens. `prompt_after_result` is printed in its place after the result of a call, and may be empty
    (DeepSeek V3 prints the token that ends all results). `stop_ids` are tokens that a model samples to end
    its turn; `close_ids` are those that a template prints in their place once the turn is history (harmony:
    `<|end|>` for `<|return|>`). `sampled_ids` are all tokens that a turn may begin with, stop tokens
    included.
    """

    generation_prompt: str
    prompt_controls: tuple[tuple[int, int], ...]
    prompt_after_result: str
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

    `controls` are in the order of the text.

    A template may print history with another reasoning state than the prompt (`<think>` opened or not), so
    the printed turn may differ from the generation prompt at any character. The start is moved back where it
    would lie inside a control token, and content never counts as generation prompt. Where the template has no
    generation prompt, the sampled text begins after the last control token before the message's content. What
    the template prints before any answer to the result of a call is not sampled.
    """
    limit = region.start
    for segment in printed.segments[region.first_segment : region.end_segment]:
        if segment.origin is not None or segment.start != limit:
            break
        limit = segment.end
    prompt, text = shape.generation_prompt, printed.text
    least = region.start
    if text.startswith(shape.prompt_after_result, region.start, limit):
        least += len(shape.prompt_after_result)
    if not prompt:
        before_content = itertools.takewhile(lambda control: control.end <= limit, _from(controls, region.start))
        opening = (control.end for control in before_content if control.token_id not in shape.sampled_ids)
        return max(opening, default=least)
    common = 0
    while common < len(prompt) and region.start + common < limit and text[region.start + common] == prompt[common]:
        common += 1
    cut = region.start + common
    cut = next((region.start + start for start, end in shape.prompt_controls if start < common < end), cut)
    before = bisect_left(controls, cut, key=_start) - 1
    return max(least, controls[before].start if before >= 0 and cut < controls[before].end else cut)


def turn_end(
    printed: Printed, controls: Sequence[PrintedControl], turn: int, region: Region, begin: int, shape: TurnShape
) -> TurnEnd | None:
    """The token that ends the turn of assistant `turn`, or None if the template prints none.

    `begin` is the turn's `sampled_start`. The end is the first of these that exists: the first stop token
    that the template prints after `begin`; the first closing token after the last character of the message's
    content; the first control token after the region, if it is a stop token.
    """
    content_end = max(
        (
            s.end
            for s in printed.segments[region.first_segment : region.end_segment]
            if s.origin and s.origin.message_index == turn
        ),
        default=begin,
    )
    for control in _from(controls, begin):
        if not control.from_template:
            continue
        if control.start >= region.end:
            return TurnEnd(control, False) if control.token_id in shape.stop_ids else None
        if control.token_id in shape.stop_ids or (control.token_id in shape.close_ids and control.start >= content_end):
            return TurnEnd(control, True)
    return None


def _from(controls: Sequence[PrintedControl], start: int) -> Iterator[PrintedControl]:
    """The control tokens that begin at character `start` or later, maybe tens of thousands."""
    return (controls[index] for index in range(bisect_left(controls, start, key=_start), len(controls)))


_start = operator.attrgetter("start")
