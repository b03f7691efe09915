"""Encodes printed text.

The text is split at the control tokens that the *template* printed; each run between two of them is encoded in one
pass, so that scaffold and body merge exactly as if the whole prompt were tokenised at once.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from renderers.errors import MessageError
from renderers.template.chat_template import Printed, Segment
from renderers.template.traced import Origin
from renderers.tokens.added_tokens import ControlMatch
from renderers.tokens.length_bound import check_length
from renderers.tokens.tokenizer import TemplateTokenizer

BodyPolicy = Literal["text", "parse", "error"]
"""The text of a control token in a message body is plain text, a control token (as in Hugging Face) or an error."""

DEFAULT_BODY_POLICIES: Mapping[str, BodyPolicy] = {
    "system": "text",
    "developer": "text",
    "user": "text",
    "tool": "text",
    "assistant": "parse",  # its history may hold <think> and tool-call markers
}


class PrintedControl(NamedTuple):
    """A control token in a printed text: characters `start:end`; its own text begins in segment `segment`."""

    start: int
    end: int
    token_id: int
    segment: int
    from_template: bool


class EncodedText(NamedTuple):
    """Token ids, and the token index of each mark and of each control token."""

    ids: list[int]
    tokens_at: list[int]
    control_at: list[int]


def find_controls(
    printed: Printed,
    tokenizer: TemplateTokenizer,
    roles: Sequence[str],
    policies: Mapping[str, BodyPolicy] = DEFAULT_BODY_POLICIES,
) -> list[PrintedControl]:
    """The control tokens of a printed text, left to right, without those in content that are plain text.

    `roles[i]` is the role of message i; text from tools follows the `system` policy, variables of the template count as
    template text. Raises `MessageError` where the policy of a role is `error`.
    """
    text, segments = printed
    found: list[PrintedControl] = []
    position, index = 0, 0
    while position < len(text):
        while segments[index].end <= position:
            index += 1
        end = segments[index].end
        origin = segments[index].origin
        # No control token can begin in content of the policy "text".
        inert = origin is not None and policies[_role_of(origin, roles)] == "text"
        match = None if inert else tokenizer.find_control(text, position, len(text), before=end)
        if match is None or match.text_range[0] >= end:
            position = end
            continue
        first, last = match.text_range
        from_template = origin is None and end >= last
        if from_template or _is_allowed(match, printed, index, roles, policies):
            found.append(PrintedControl(match.start, match.end, match.token_id, index, from_template))
            position = match.end
        else:
            # Plain text of content; a control token of the template may begin inside it.
            position = first + 1
    return found


def _role_of(origin: Origin, roles: Sequence[str]) -> str:
    return roles[origin.message_index] if origin.message_index >= 0 else "system"


def encode_printed(
    text: str,
    controls: Sequence[PrintedControl],
    tokenizer: TemplateTokenizer,
    marks: Sequence[int] = (),
    *,
    begin: int = 0,
) -> EncodedText:
    """Encode printed text from character `begin` on, which must not be inside a control token.

    `marks` are ascending characters; `tokens_at` is for each the first token that starts there or later. `control_at`
    is parallel to those of `controls` that start at `begin` or later.
    """
    printed_controls = sum(control.end - control.start for control in controls if control.start >= begin)
    check_length(text, len(text) - begin - printed_controls, tokenizer.longest_piece)
    ids: list[int] = []
    tokens_at: list[int] = []
    control_at: list[int] = []
    position = begin

    def add_run(end: int) -> None:
        first = len(tokens_at)
        cuts = [max(mark - position, 0) for mark in marks[first : bisect_left(marks, end, lo=first)]]
        run = tokenizer.encode_run(text[position:end], cuts, first=position == 0)
        tokens_at.extend(len(ids) + run.token_at[cut] for cut in cuts)
        ids.extend(run.ids)

    for control in controls:
        if control.start < begin:
            continue
        if control.start > position:
            add_run(control.start)
        control_at.append(len(ids))
        while len(tokens_at) < len(marks) and marks[len(tokens_at)] < control.end:
            tokens_at.append(len(ids) + (marks[len(tokens_at)] > control.start))
        ids.append(control.token_id)
        position = control.end
    if position < len(text):
        add_run(len(text))
    tokens_at.extend(len(ids) for _ in range(len(marks) - len(tokens_at)))
    return EncodedText(ids, tokens_at, control_at)


def _is_allowed(
    match: ControlMatch, printed: Printed, index: int, roles: Sequence[str], policies: Mapping[str, BodyPolicy]
) -> bool:
    """Whether all content in the text of the match, from segment `index` on, may become a control token."""
    first, last = match.text_range
    allowed = True
    while index < len(printed.segments) and printed.segments[index].start < last:
        segment: Segment = printed.segments[index]
        if segment.origin is not None:
            role = _role_of(segment.origin, roles)
            policy = policies[role]
            if policy == "error":
                raise MessageError(
                    f"{segment.origin.path} holds the control token {printed.text[first:last]!r}, and the body policy "
                    f"of role {role!r} is 'error'; remove it, or set the policy to 'text' to keep it as plain text",
                    message_index=max(segment.origin.message_index, 0),
                )
            allowed = allowed and policy == "parse"
        index += 1
    return allowed
