"""Extending what was sampled to the next turn's prompt, without touching a sampled token.

The extension is read off a traced print of (a history, the assistant's turn, new messages): everything that the
template prints behind the token that ends the assistant's turn. Only those characters are tokenised; the prefix is
taken verbatim. What may stand for the history, and what the template does to it, is asked of the template once for each
shape of conversation (`renderers.bridging.continuation`).
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

import numpy as np

from renderers.attribution import attribute
from renderers.bridging.continuation import (
    Continuation,
    Continuations,
    ProbeMessages,
    TurnSummary,
    shape_of,
    unused_ids,
)
from renderers.bridging.turn_printer import TurnPrinter
from renderers.errors import PlaceholderCountError, TemplateError
from renderers.media.item import ExpansionPiece, Modality
from renderers.messages import check_messages, message_tool_names, without_media
from renderers.parsing.format import Format
from renderers.placement import item_placement_error
from renderers.protocol import Messages, Tools
from renderers.rendered import MultiModalData, RenderedTokens, TokenSpan
from renderers.template.chat_template import Printed
from renderers.turn_boundaries import TurnEnd
from renderers.vision.media_markers import LocatedItem

_log = logging.getLogger("renderers")

ThinkingRetention = Literal["template", "tool_cycle", "all"]
"""When a bridge may keep reasoning that a full render would drop: never, until a user speaks, always."""

HistoryPolicy = Literal["template", "as_sampled"]
"""Which history a bridge goes on from: only one that a full render would print too, or the one that was sampled."""

# What stands for an item that says nothing else: its marker.
_MARKER = (ExpansionPiece("", embed=True),)


class BridgeRefusal(StrEnum):
    """Why a bridge could not be proven equal to what the template means."""

    NO_NEW_MESSAGES = "there are no new messages"
    ASSISTANT_IN_EXTENSION = "the new messages hold an assistant turn, which was never sampled here"
    OPEN_REASONING = "a stop token was sampled inside open reasoning"
    DROPS_REASONING = "the template drops earlier reasoning here, and thinking_retention does not allow to keep it"
    REWRITES_HISTORY = "the template prints earlier messages differently once these follow"
    NEEDS_HISTORY = "what the template prints depends on earlier messages; pass previous_messages"
    TEMPLATE_REFUSES = "the template refuses to print such a conversation"
    MISSING_MEDIA = "the prompt holds image tokens but no media came with it"
    MISPLACED_MEDIA = "a media range does not cover placeholder tokens of the prompt"
    NO_TURN_END = "the template closes this assistant turn with no token at which the model stops"


@dataclass(slots=True)
class BridgeStats:
    """How often bridging succeeded, and how often it was refused for which reason.

    `kept` counts, among the bridges that succeeded, those that went on from a history that a full render would have
    printed differently: `REWRITES_HISTORY` where `history="as_sampled"` allowed it, `DROPS_REASONING` where
    `thinking_retention` did. A bridge may count under both.
    """

    bridged: int = 0
    refused: Counter[BridgeRefusal] = field(default_factory=Counter)
    overridden: Counter[BridgeRefusal] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def count(self, outcome: RenderedTokens | BridgeRefusal) -> None:
        with self._lock:
            if isinstance(outcome, BridgeRefusal):
                self.refused[outcome] += 1
            else:
                self.bridged += 1

    def count_kept(self, reasons: Collection[BridgeRefusal]) -> None:
        with self._lock:
            self.overridden.update(reasons)


class Bridge:
    """Prints what follows a sampled turn. Safe to share between threads."""

    def __init__(
        self,
        printer: TurnPrinter,
        format: Format,
        stand_ins: ProbeMessages,
        *,
        retention: ThinkingRetention,
        history: HistoryPolicy,
        stats: BridgeStats,
        markers: Mapping[int, Modality],
        embed_ids: Collection[int],
    ) -> None:
        """`markers` are the tokens that the template prints for media, `embed_ids` those that stand for features.

        `stats` learns of each bridge that the two policies allowed.
        """
        self._printer = printer
        self._stand_ins = stand_ins
        self._continuations = Continuations(printer, stand_ins, format, modalities=tuple(markers.values()))
        self._retention = retention
        self._history_policy = history
        self._stats = stats
        self._markers = markers
        self._embed_ids = frozenset(embed_ids)

    def extend(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        turn: TurnSummary,
        new: Messages,
        items: Sequence[LocatedItem],
        *,
        tools: Tools | None,
        previous: Messages | None,
        media: MultiModalData | None,
    ) -> RenderedTokens | BridgeRefusal:
        """Prompt + completion + what the template prints behind the turn for the checked messages `new`.

        `items` are the images of `new`, `media` those of the prompt; `previous` is the history, with or without the
        turn, if it is known.
        """
        if not turn.reasoning_complete and turn.stopped:
            return BridgeRefusal.OPEN_REASONING
        continuation = self._continuations.of(shape_of(new, turn, tools))
        obstacles = self._obstacles(continuation, prompt_ids, completion_ids, previous)
        if obstacles and previous is not None and self._may_go_on(continuation, prompt_ids, completion_ids, previous):
            real, _ = self._history(Continuation(), turn, new, previous, media)
            continuation = self._continuations.behind(real[:-1], real[-1], new, tools)
            obstacles = self._obstacles(continuation, prompt_ids, completion_ids, previous)
        refusal = self._refusal(obstacles, continuation, new, previous)
        if refusal is not None:
            return refusal

        history, names_known = self._history(continuation, turn, new, previous, media)
        shown = without_media([*history, *new])
        try:
            continued = self._printer.print_continued(
                shown, len(history) - 1, tools if continuation.needs_tools else None
            )
        except TemplateError as error:
            _log.info("bridge: %s", error)
            return BridgeRefusal.TEMPLATE_REFUSES
        if continued is None:
            return BridgeRefusal.NO_TURN_END
        self._printer.warn_of_unread_content(new)
        end = continued.end
        cut = end.control.end if completion_ids and completion_ids[-1] == end.control.token_id else continued.cut
        if not names_known and _copies_from_history(continued.printed, cut, len(history)):
            return BridgeRefusal.NEEDS_HISTORY
        # The calls of a made-up turn have made-up names.
        names = message_tool_names([*history, *new] if names_known else new)[-len(new) :]
        try:
            layout = attribute(
                continued.printed,
                continued.controls,
                self._printer.tokenizer,
                [message["role"] for message in shown],
                [shown_item.slot(first_message=len(history)) for shown_item in items],
                shape=None,
                markers=self._markers,
                begin=cut,
            )
        except PlaceholderCountError as error:  # of the caller's messages, not of those printed before them
            raise error.counted_from(len(history)) from None
        extension = layout.with_media(
            [shown_item.item for shown_item in items],
            [*itertools.repeat(None, len(history)), *names],
            self._markers,
        )
        self._stats.count_kept(obstacles)
        return join_extension(prompt_ids, completion_ids, self._close(turn, end), extension, len(history), media)

    def check_carried_media(self, prompt_ids: Sequence[int], media: MultiModalData | None) -> BridgeRefusal | None:
        """The prompt's placeholders need their media, and every range must cover placeholders of its item only.

        None says that no media came along; a `MultiModalData` says which there are, and any other placeholder token
        was sampled: that it lists all of them is taken on trust.
        """
        if media is None:
            missing = any(token_id in prompt_ids for token_id in self._embed_ids)
            return BridgeRefusal.MISSING_MEDIA if missing else None
        ids = np.asarray(prompt_ids)
        placed = media.items_with_ranges()
        if item_placement_error(placed, len(ids)) is not None:
            return BridgeRefusal.MISPLACED_MEDIA
        for item, where in placed:
            allowed = [self._embed_id(piece, item.modality) for piece in item.expansion or _MARKER if piece.embed]
            if not all(np.isin(ids[start:stop], allowed).all() for start, stop in where.runs):
                return BridgeRefusal.MISPLACED_MEDIA
        return None

    def _embed_id(self, piece: ExpansionPiece, modality: Modality) -> int:
        """The id of a placeholder that holds features; without a text of its own, the marker of the modality."""
        if piece.text:
            return self._printer.tokenizer.require_control_id(piece.text, f"a placeholder of a {modality}")
        return next((token_id for token_id, shown in self._markers.items() if shown == modality), -1)

    def _obstacles(
        self,
        continuation: Continuation,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        previous: Messages | None,
    ) -> list[BridgeRefusal]:
        """Why a full render would not go on from here, or why that is not known."""
        if not continuation.accepted:
            return [BridgeRefusal.TEMPLATE_REFUSES]
        if not continuation.ends_turn:
            return [BridgeRefusal.NO_TURN_END]
        obstacles: list[BridgeRefusal] = []
        if not continuation.keeps_history:
            obstacles.append(BridgeRefusal.REWRITES_HISTORY)
        if self._drops_reasoning(continuation, prompt_ids, completion_ids):
            obstacles.append(BridgeRefusal.DROPS_REASONING)
        if continuation.needs_history and previous is None and not continuation.counts_media:
            obstacles.append(BridgeRefusal.NEEDS_HISTORY)
        return obstacles

    def _may_go_on(
        self, continuation: Continuation, prompt_ids: Sequence[int], completion_ids: Sequence[int], previous: Messages
    ) -> bool:
        """Whether there may be no obstacle behind one history, although there is one behind some."""
        if not continuation.accepted:
            return True
        at_best = continuation.at_best
        return at_best is not None and not self._obstacles(at_best, prompt_ids, completion_ids, previous)

    def _refusal(
        self,
        obstacles: Sequence[BridgeRefusal],
        continuation: Continuation,
        new: Messages,
        previous: Messages | None,
    ) -> BridgeRefusal | None:
        """The first obstacle in spite of which the configuration does not go on."""
        allowed = self._allowed(new)
        refusal = next((obstacle for obstacle in obstacles if obstacle not in allowed), None)
        at_best = continuation.at_best
        if refusal is BridgeRefusal.REWRITES_HISTORY and previous is None and at_best and at_best.keeps_history:
            return BridgeRefusal.NEEDS_HISTORY
        return refusal

    def _allowed(self, new: Messages) -> list[BridgeRefusal]:
        """The obstacles in spite of which the configuration goes on."""
        allowed = [BridgeRefusal.REWRITES_HISTORY] if self._history_policy == "as_sampled" else []
        user_speaks = any(message["role"] == "user" for message in new)
        if self._retention == "all" or (self._retention == "tool_cycle" and not user_speaks):
            allowed.append(BridgeRefusal.DROPS_REASONING)
        return allowed

    def _drops_reasoning(
        self, continuation: Continuation, prompt_ids: Sequence[int], completion_ids: Sequence[int]
    ) -> bool:
        """Whether the template would not print again some reasoning that was sampled or that the prompt holds."""
        if self._printer.reasoning_ids is None:
            return False
        suspects: list[Sequence[int]] = []
        if not (continuation.keeps_reasoning and continuation.keeps_empty_reasoning):
            opened = len(self._printer.generation_prompt_ids)
            suspects.append([*(prompt_ids[-opened:] if opened else ()), *completion_ids])
        if not continuation.keeps_prompt:
            suspects.append(prompt_ids)
        return any(
            not (continuation.keeps_empty_reasoning if is_empty else continuation.keeps_reasoning)
            for suspect in suspects
            for is_empty in self._reasoning(list(suspect))
        )

    def _reasoning(self, token_ids: list[int]) -> Iterator[bool]:
        """For each stretch of reasoning in the ids, whether it is what the template prints where there is none."""
        assert self._printer.reasoning_ids is not None
        start, end = self._printer.reasoning_ids
        position = 0
        while (position := _find(token_ids, start, position)) >= 0:
            position += len(start)
            close = _find(token_ids, end, position)
            block = token_ids[position : close if close >= 0 else len(token_ids)]
            yield self._printer.empty_reasoning_ids == block

    def _history(
        self,
        continuation: Continuation,
        turn: TurnSummary,
        new: Messages,
        previous: Messages | None,
        media: MultiModalData | None,
    ) -> tuple[list[Mapping[str, Any]], bool]:
        """What to print before the new messages, and whether the names of the called tools in it are real."""
        last = _last_turn(previous)
        if previous is not None and continuation.needs_history:
            history: list[Mapping[str, Any]] = list(check_messages(previous))
        else:
            counted = media.items_with_ranges() if media is not None and continuation.counts_media else []
            opening = self._stand_ins.opening([item.modality for item, _ in counted])
            history = [*opening, *([] if last is None else [last])]
        if last is not None:
            return history, True
        calls = _calls_of_turn(turn, new)
        stand_in = self._stand_ins.turn(
            [self._stand_ins.call(call_id, name or "unknown") for call_id, name in calls.items()], spoke=turn.spoke
        )
        return [*history, stand_in], None not in calls.values()

    def _close(self, turn: TurnSummary, end: TurnEnd) -> list[int]:
        """What closes a turn that was cut off: its reasoning, then itself."""
        if turn.stopped:
            return []
        close: list[int] = []
        if not turn.reasoning_complete and self._printer.reasoning_ids is not None:
            close += self._printer.reasoning_ids[1]
        if end.inside and close[-1:] != [end.control.token_id]:
            close.append(end.control.token_id)
        return close


def _find(token_ids: list[int], wanted: list[int], start: int) -> int:
    """The first position from `start` on where the ids `wanted` stand, or -1."""
    try:
        while True:
            start = token_ids.index(wanted[0], start)
            if token_ids[start : start + len(wanted)] == wanted:
                return start
            start += 1
    except ValueError:
        return -1


def _last_turn(previous: Messages | None) -> Mapping[str, Any] | None:
    """The turn that the new messages follow, checked, if the history given ends with it."""
    if previous is None:
        return None
    if not isinstance(previous, (list, tuple)):
        previous = check_messages(previous)
    last = check_messages(previous[-1:], first_index=max(len(previous) - 1, 0))
    return last[0] if last and last[0]["role"] == "assistant" else None


def _calls_of_turn(turn: TurnSummary, new: Messages) -> dict[str, str | None]:
    """Id -> name of the tool calls of a sampled turn that `new` follows, in its order; None where a name is not known.

    An answer names its call by id, never by position: only where one call has one answer, the id need not agree.
    """
    calls: dict[str, str | None] = dict(turn.calls)
    answers = [message for message in new if message["role"] == "tool"]
    ids = {message["tool_call_id"] for message in answers if "tool_call_id" in message}
    if answers and not (ids and calls.keys() >= ids):
        only = next(iter(calls.values())) if len(calls) == len(answers) == 1 else None
        made_up = unused_ids(ids)
        calls = {answer.get("tool_call_id") or next(made_up): answer.get("name", only) for answer in answers}
    if turn.called_tools and not calls:
        calls = {next(unused_ids(())): None}
    return calls


def _copies_from_history(printed: Printed, cut: int, first_new_message: int) -> bool:
    """Whether anything behind `cut` was copied from a message before the new ones."""
    return any(
        segment.end > cut and segment.origin is not None and 0 <= segment.origin.message_index < first_new_message
        for segment in printed.segments
    )


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
        message_tool_names=extension.message_tool_names[first_new_message:],
        multi_modal_data=carried,
        placeholder_token_ids=extension.placeholder_token_ids,
    )
