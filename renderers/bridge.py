"""Extending what was sampled to the next turn's prompt, without touching a sampled token.

The extension is read off a traced print of (history, the assistant's turn, new messages): everything that the template
prints behind the assistant's turn-end token. Only those characters are tokenised; the prefix is taken verbatim.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from renderers.rendered import MultiModalData, RenderedTokens, TokenSpan
from renderers.template.chat_template import Printed, Segment
from renderers.tokens.tokenizer import TemplateTokenizer


class BridgeRefusal(StrEnum):
    """Why a bridge could not be proven equal to what the template means."""

    NOTHING_NEW = "there are no new messages"
    ASSISTANT_IN_EXTENSION = "the new messages hold an assistant turn, which was never sampled here"
    OPEN_REASONING = "the completion ended inside open reasoning"
    REWRITES_HISTORY = "the template drops earlier reasoning when a user speaks again"
    MISSING_MEDIA = "the prompt holds image tokens but no media came with it"
    MISPLACED_MEDIA = "a media range does not cover placeholder tokens of the prompt"
    NO_TURN_END = "the template closes this assistant turn with no turn-end token"


@dataclass(slots=True)
class BridgeStats:
    """How often bridging succeeded, and how often it was refused for which reason."""

    bridged: int = 0
    refused: Counter[BridgeRefusal] = field(default_factory=Counter)

    def count(self, outcome: RenderedTokens | BridgeRefusal) -> None:
        if isinstance(outcome, BridgeRefusal):
            self.refused[outcome] += 1
        else:
            self.bridged += 1


def history_for_bridge(
    previous_messages: Sequence[Mapping[str, Any]] | None,
    assistant: Mapping[str, Any],
    new_messages: Sequence[Mapping[str, Any]],
) -> list[Mapping[str, Any]]:
    """What stands before the new messages when the extension is printed; ends with the assistant's turn.

    With the real history, its last message is the sampled turn, or the turn is added from the parsed completion.
    Without it, one question stands for everything earlier, and the turn calls the tools that the new messages answer.
    """
    if previous_messages is not None:
        if previous_messages and previous_messages[-1]["role"] == "assistant":
            return list(previous_messages)
        return [*previous_messages, assistant]
    turn: dict[str, Any] = {"role": "assistant", "content": "."}
    answers = [message for message in new_messages if message["role"] == "tool"]
    if answers:
        turn["tool_calls"] = [
            {
                "id": message.get("tool_call_id", f"call_{index}"),
                "type": "function",
                "function": {"name": message.get("name", "tool"), "arguments": {}},
            }
            for index, message in enumerate(answers)
        ]
    return [{"role": "user", "content": "."}, turn]


def cut_behind_turn(printed: Printed, turn: int, tokenizer: TemplateTokenizer, turn_end_id: int) -> Printed | None:
    """The part of `printed` behind the turn-end token of message `turn`, or None if the template prints none."""
    cut = None
    for segment in printed.segments:
        if segment.owner != turn or segment.origin is not None:
            continue
        position = segment.start
        while (match := tokenizer.find_control(printed.text, position, segment.end)) is not None:
            if match.token_id == turn_end_id:
                cut = match.end
            position = match.end
    if cut is None:
        return None
    kept = [
        Segment(max(segment.start, cut) - cut, segment.end - cut, segment.owner, segment.origin)
        for segment in printed.segments
        if segment.end > cut
    ]
    return Printed(printed.text[cut:], kept)


def check_carried_media(
    prompt_ids: Sequence[int], media: MultiModalData | None, placeholder_id: int | None
) -> BridgeRefusal | None:
    """The prompt's image tokens need their media, and every range must cover image tokens only.

    None says that no media came along; an empty `MultiModalData` says that there are none, and what looks like an image
    token was sampled.
    """
    if media is None:
        return BridgeRefusal.MISSING_MEDIA if placeholder_id is not None and placeholder_id in prompt_ids else None
    for _, where in media.placed():
        covered = prompt_ids[where.offset : where.end]
        if len(covered) != where.length or any(token_id != placeholder_id for token_id in covered):
            return BridgeRefusal.MISPLACED_MEDIA
    return None


def join_extension(
    prompt_ids: Sequence[int],
    completion_ids: Sequence[int],
    close_ids: Sequence[int],
    extension: RenderedTokens,
    first_new_message: int,
    media: MultiModalData | None,
) -> RenderedTokens:
    """Prompt + completion verbatim, the missing close if any, then the extension.

    Message indices of the result count the *new* messages from 0; prompt and completion belong to none (-1).
    """
    completion_at, close_at = len(prompt_ids), len(prompt_ids) + len(completion_ids)
    shift = close_at + len(close_ids)
    spans = [TokenSpan(0, completion_at, -1, False, False), TokenSpan(completion_at, close_at, -1, True, True)]
    if close_ids:
        spans.append(TokenSpan(close_at, shift, -1, False, False))
    for start, end, owner, sampled, content in extension.spans:
        spans.append(TokenSpan(start + shift, end + shift, max(-1, owner - first_new_message), sampled, content))
    carried = None
    if extension.multi_modal_data is not None:
        carried = (media or MultiModalData()).followed_by(extension.multi_modal_data, shift)
    return RenderedTokens(
        token_ids=[*prompt_ids, *completion_ids, *close_ids, *extension.token_ids],
        spans=tuple(span for span in spans if span.end > span.start),
        message_roles=extension.message_roles[first_new_message:],
        multi_modal_data=carried,
    )
