"""Provenance text -> token ids with attribution.

The text is cut at the control tokens that the *template* printed; each maximal run between two of them is encoded in
one pass, so that scaffold and body merge exactly as they would if the whole prompt were tokenised at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from renderers.errors import ControlTokenInContentError
from renderers.template.chat_template import Printed, Segment
from renderers.tokens.tokenizer import ControlMatch, TemplateTokenizer

BodyPolicy = Literal["text", "parse", "error"]
"""A control token spelled in a message body is plain text, a control token (as Hugging Face reads it) or an error."""

DEFAULT_BODY_POLICIES: Mapping[str, BodyPolicy] = {
    "system": "text",
    "developer": "text",
    "user": "text",
    "tool": "text",
    "assistant": "parse",  # its history may legitimately hold <think> and tool-call markers
}


class EncodedText(NamedTuple):
    """Token ids with, per token, its first character (int32) and whether it was mapped as a control token (bool)."""

    ids: list[int]
    starts: np.ndarray
    control: np.ndarray


def encode_printed(
    printed: Printed,
    tokenizer: TemplateTokenizer,
    roles: Sequence[str],
    policies: Mapping[str, BodyPolicy] = DEFAULT_BODY_POLICIES,
) -> EncodedText:
    """Encode what a template printed.

    `roles[i]` is the role of message i; text from tools and template variables follows the `system` policy. Raises
    `ControlTokenInContentError` where the policy of a role is `error`.
    """
    text, segments = printed
    ids: list[int] = []
    starts: list[np.ndarray] = []
    control: list[np.ndarray] = []
    position = 0

    def add_run(end: int) -> None:
        if end > position:
            run = tokenizer.encode_run(text[position:end])
            ids.extend(run.ids)
            starts.append(run.starts + position)
            control.append(np.zeros(len(run.ids), dtype=bool))

    for match in _control_matches(text, segments, tokenizer, roles, policies):
        add_run(match.start)
        ids.append(match.token_id)
        starts.append(np.array([match.start], dtype=np.int32))
        control.append(np.ones(1, dtype=bool))
        position = match.end
    add_run(len(text))

    if not ids:
        return EncodedText(ids, np.empty(0, dtype=np.int32), np.empty(0, dtype=bool))
    return EncodedText(ids, np.concatenate(starts), np.concatenate(control))


def _control_matches(
    text: str,
    segments: Sequence[Segment],
    tokenizer: TemplateTokenizer,
    roles: Sequence[str],
    policies: Mapping[str, BodyPolicy],
) -> list[ControlMatch]:
    """The control tokens that count, left to right."""
    matches: list[ControlMatch] = []
    position, index = 0, 0
    while (match := tokenizer.find_control(text, position, len(text))) is not None:
        while segments[index].end <= match.start:
            index += 1
        if _counts(match, text, segments, index, roles, policies):
            matches.append(match)
            position = match.end
        else:
            # Refused as spelled by content; a genuine one may begin inside the refused text.
            position = match.start + 1
    return matches


def _counts(
    match: ControlMatch,
    text: str,
    segments: Sequence[Segment],
    index: int,
    roles: Sequence[str],
    policies: Mapping[str, BodyPolicy],
) -> bool:
    """Whether every piece of content that helped to spell the match may do so."""
    counts = True
    while index < len(segments) and segments[index].start < match.end:
        origin = segments[index].origin
        if origin is not None:
            role = roles[origin.message_index] if origin.message_index >= 0 else "system"
            policy = policies[role]
            if policy == "error":
                raise ControlTokenInContentError(
                    f"{origin.path} spells the control token {text[match.start : match.end]!r}, and the body policy of "
                    f"role {role!r} is 'error'; remove it, or set the policy to 'text' to keep it as plain text",
                    message_index=max(origin.message_index, 0),
                )
            counts = counts and policy == "parse"
        index += 1
    return counts
