"""Extending sampled tokens to the next turn's prompt, without changing any of them.

The extension comes from a traced print of (a history, the assistant's turn, new messages): everything that
the template prints behind the token that ends the assistant's turn. Only those characters are tokenised;
the sampled prefix is taken verbatim. What may be printed in place of the real history, and how the template
changes the history, is found once for each shape of conversation (`renderers.bridging.continuation`).
"""

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from renderers.attribution import TokenLayout, attribute
from renderers.bridging.continuation import Continuation, Continuations, TurnSummary, shape_of
from renderers.bridging.probe_messages import ProbeMessages, unused_call_ids
from renderers.bridging.refusals import BridgeRefusal, BridgeStats, HistoryPolicy, ThinkingRetention
from renderers.bridging.turn_printer import TurnPrinter
from renderers.errors import MessageError, TemplateError
from renderers.media.item import ExpansionPiece, MediaItem
from renderers.messages import Modality, check_message, check_messages, message_tool_names, without_media
from renderers.parsing.format import Format
from renderers.placement import item_placement_error
from renderers.process.caches import LayoutCache
from renderers.protocol import Messages, Tools
from renderers.rendered import MultiModalData, RenderedTokens, TokenSpan
from renderers.turn_bounds import TurnEnd
from renderers.unread_input import UnreadInput
from renderers.vision.media_markers import MediaSlot

_log = logging.getLogger("renderers")


class BridgeRequest(NamedTuple):
    """A sampled turn and the checked messages that follow it.

    `previous_messages` is the history, with or without the turn, if it is known; `prompt_media` are the
    media of the prompt.
    """

    prompt_ids: list[int]
    completion_ids: list[int]
    new_messages: Messages
    tools: Tools | None
    previous_messages: Messages | None
    prompt_media: MultiModalData | None


class _Extension(NamedTuple):
    """What a template prints behind a turn for new messages; `end` is the token that ends the turn."""

    end: TurnEnd
    layout: TokenLayout

    @property
    def nbytes(self) -> int:
        return self.layout.nbytes


class _NoExtension(NamedTuple):
    refusal: BridgeRefusal
    nbytes: int = 0


@dataclass(frozen=True)
class Bridge:
    """Extends a sampled turn to the next prompt. Safe to share between threads.

    `markers` are the tokens that the template prints for media, `embed_ids` those that stand for features.
    `stats` counts each bridge that `retention` or `history` allowed. `layouts` caches extensions.
    """

    printer: TurnPrinter
    unread: UnreadInput
    format: Format
    probes: ProbeMessages
    retention: ThinkingRetention
    history: HistoryPolicy
    stats: BridgeStats
    layouts: LayoutCache
    markers: Mapping[int, Modality]
    embed_ids: Collection[int]

    @cached_property
    def _placeholder_token_ids(self) -> dict[str, int]:
        return {modality: token_id for token_id, modality in self.markers.items()}

    @cached_property
    def _plain_history(self) -> list[Mapping[str, Any]]:
        """What is printed before new messages if nothing depends on the history and no tool was called."""
        return [*self.probes.opening(), self.probes.turn([])]

    @cached_property
    def _continuations(self) -> Continuations:
        return Continuations(self.printer, self.probes, self.format, modalities=tuple(self.markers.values()))

    def extend(
        self,
        request: BridgeRequest,
        turn: TurnSummary,
        new_slots: Sequence[MediaSlot],
        new_items: Sequence[MediaItem] | None,
    ) -> RenderedTokens | BridgeRefusal:
        """Prompt + completion + what the template prints behind the turn for the new messages.

        `new_slots` are the places of the media in the new messages, `new_items` the media; None if not
        loaded.
        """
        new_messages, tools = request.new_messages, request.tools
        if not turn.reasoning_complete and turn.stopped:
            return BridgeRefusal.OPEN_REASONING
        continuation = self._continuations.of_shape(shape_of(new_messages, turn, tools))
        obstacles = self._obstacles(continuation, request)
        if obstacles:
            if request.previous_messages is not None and self._depends_on_history(continuation, request):
                real, _ = self._history(Continuation(), turn, request)
                continuation = self._continuations.of_conversation(real[:-1], real[-1], new_messages, tools)
                obstacles = self._obstacles(continuation, request)
            refusal = self._refusal(obstacles, continuation, request)
            if refusal is not None:
                return refusal

        history, names_are_real = self._history(continuation, turn, request)
        try:
            extension = self._extension(continuation, request, history, new_slots, names_are_real=names_are_real)
        except TemplateError as error:
            _log.info("bridge: %s", error)
            return BridgeRefusal.TEMPLATE_REFUSES
        except MessageError as error:  # name the message by its index in `new_messages`
            if error.message_index is None:
                raise
            index = error.message_index - len(history)
            raise MessageError(error.reason, message_index=index, part_index=error.part_index) from None
        if isinstance(extension, _NoExtension):
            return extension.refusal
        if obstacles:
            self.stats.count_overridden(obstacles)
        # The plain history calls no tools.
        named = [*history, *new_messages] if names_are_real and history is not self._plain_history else new_messages
        return _join(
            request,
            () if turn.stopped else self._closing_ids(turn, extension.end),
            extension.layout,
            new_items if self.markers else None,
            message_tool_names(named)[-len(new_messages) :],
            self._placeholder_token_ids.copy(),
        )

    def _extension(
        self,
        continuation: Continuation,
        request: BridgeRequest,
        history: Sequence[Mapping[str, Any]],
        new_slots: Sequence[MediaSlot],
        *,
        names_are_real: bool,
    ) -> _Extension | _NoExtension:
        """What the template prints behind the turn, cached: observations are often equal, images aside."""
        new_messages = without_media(request.new_messages) if new_slots else request.new_messages
        tools = request.tools if continuation.needs_tools else None
        last_ids = request.completion_ids[-1:]

        def print_extension() -> _Extension | _NoExtension:
            messages = [*without_media(history), *new_messages]
            continued = self.printer.print_continued(messages, len(history) - 1, tools)
            if continued is None:
                return _NoExtension(BridgeRefusal.NO_TURN_END)
            first = len(history)
            unprinted = self.unread.of_messages(messages, continued.printed, tools, prompt=True, first=first)
            end = continued.end
            # A sampled end token is in the prefix already; a turn that was cut off gets the printed one.
            start = end.control.end if last_ids == [end.control.token_id] else continued.extension_start
            if not names_are_real and any(
                segment.end > start and segment.origin is not None and 0 <= segment.origin.message_index < first
                for segment in continued.printed.segments
            ):  # text was copied from a message before the new ones
                return _NoExtension(BridgeRefusal.NEEDS_HISTORY)
            layout = attribute(
                continued.printed,
                continued.controls,
                self.printer.tokenizer,
                [message["role"] for message in messages],
                [slot._replace(message_index=slot.message_index + len(history)) for slot in new_slots],
                shape=None,
                markers=self.markers,
                begin=start,
            )
            return _Extension(end, _of_new_messages(layout, first)._replace(unprinted=unprinted))

        known_history = None if history is self._plain_history else without_media(history)
        layout_keys = [slot.layout_key for slot in new_slots]
        inputs = (known_history, new_messages, names_are_real, tools, last_ids, layout_keys)
        return self.layouts.get_or_make("extension", inputs, print_extension)

    def check_prompt_media(self, prompt_ids: list[int], media: MultiModalData | None) -> BridgeRefusal | None:
        """Check that the prompt's placeholders have their media, and that every range covers placeholders of its item.

        With None for `media`, no placeholder token may be in the prompt. A `MultiModalData` is trusted to
        list all media: any other placeholder token counts as sampled text.
        """
        if media is None:
            missing = any(token_id in prompt_ids for token_id in self.embed_ids)
            return BridgeRefusal.MISSING_MEDIA if missing else None
        placed = media.items_with_ranges()
        if not placed:
            return None
        if item_placement_error(placed, len(prompt_ids)) is not None:
            return BridgeRefusal.MISPLACED_MEDIA
        for item, placeholder in placed:
            if not item.expansion and placeholder.embed_runs is None:  # the marker, again and again
                token_id = self._placeholder_token_ids.get(item.modality, -1)
                if prompt_ids[placeholder.offset : placeholder.end].count(token_id) != placeholder.length:
                    return BridgeRefusal.MISPLACED_MEDIA
                continue
            # The expansion of an item that has none of its own: its marker.
            allowed = {
                self._embed_id(piece, item.modality)
                for piece in item.expansion or (ExpansionPiece("", embed=True),)
                if piece.embed
            }
            if not all(allowed.issuperset(prompt_ids[start:stop]) for start, stop in placeholder.runs):
                return BridgeRefusal.MISPLACED_MEDIA
        return None

    def _embed_id(self, piece: ExpansionPiece, modality: Modality) -> int:
        """The id of a placeholder of features; for a piece without text, the modality's marker."""
        if piece.text:
            return self.printer.tokenizer.require_control_id(piece.text, f"a placeholder of a {modality}")
        return self._placeholder_token_ids.get(modality, -1)

    def _obstacles(self, continuation: Continuation, request: BridgeRequest) -> list[BridgeRefusal]:
        """Why a full render would not continue these tokens, or why that is not known."""
        if not continuation.accepted:
            return [BridgeRefusal.TEMPLATE_REFUSES]
        if not continuation.ends_turn:
            return [BridgeRefusal.NO_TURN_END]
        obstacles: list[BridgeRefusal] = []
        if not continuation.keeps_history:
            obstacles.append(BridgeRefusal.REWRITES_HISTORY)
        if self._drops_reasoning(continuation, request):
            obstacles.append(BridgeRefusal.DROPS_REASONING)
        if continuation.needs_history and request.previous_messages is None and not continuation.counts_media:
            obstacles.append(BridgeRefusal.NEEDS_HISTORY)
        return obstacles

    def _depends_on_history(self, continuation: Continuation, request: BridgeRequest) -> bool:
        """Whether some history of this shape has no obstacle: the real one is then printed and compared."""
        if not continuation.accepted:
            return True
        at_best = continuation.at_best
        return at_best is not None and not self._obstacles(at_best, request)

    def _refusal(
        self, obstacles: Sequence[BridgeRefusal], continuation: Continuation, request: BridgeRequest
    ) -> BridgeRefusal | None:
        """The first obstacle that the configuration does not override."""
        overridden = [BridgeRefusal.REWRITES_HISTORY] if self.history == "as_sampled" else []
        has_query = any(message["role"] in ("user", "developer") for message in request.new_messages)
        if self.retention == "all" or (self.retention == "tool_cycle" and not has_query):
            overridden.append(BridgeRefusal.DROPS_REASONING)
        refusal = next((obstacle for obstacle in obstacles if obstacle not in overridden), None)
        at_best = continuation.at_best
        if (
            refusal is BridgeRefusal.REWRITES_HISTORY
            and request.previous_messages is None
            and at_best is not None
            and at_best.keeps_history
        ):
            return BridgeRefusal.NEEDS_HISTORY
        return refusal

    def _drops_reasoning(self, continuation: Continuation, request: BridgeRequest) -> bool:
        """Whether a full render would leave out some reasoning that was sampled or that the prompt holds."""
        if self.printer.reasoning_ids is None:
            # The format does not know what reasoning looks like: any turn may hold some. Where a template
            # rewrites the history too, that is an obstacle of its own.
            prompt_differs_in_reasoning = continuation.keeps_history and not continuation.keeps_prompt
            return not continuation.keeps_reasoning or prompt_differs_in_reasoning
        at_risk: list[Sequence[int]] = []
        if not (continuation.keeps_reasoning and continuation.keeps_empty_reasoning):
            opened = len(self.printer.generation_prompt_ids)
            at_risk.append([*(request.prompt_ids[-opened:] if opened else ()), *request.completion_ids])
        if not continuation.keeps_prompt:
            at_risk.append(request.prompt_ids)
        return bool(at_risk) and any(
            not (continuation.keeps_empty_reasoning if is_empty else continuation.keeps_reasoning)
            for token_ids in at_risk
            for is_empty in self._reasoning_blocks(list(token_ids))
        )

    def _reasoning_blocks(self, token_ids: list[int]) -> Iterator[bool]:
        """For each block of reasoning in the ids, whether the template prints it for a turn without any."""
        assert self.printer.reasoning_ids is not None
        start, end = self.printer.reasoning_ids
        position = 0
        while (position := _find(token_ids, start, position)) >= 0:
            position += len(start)
            close = _find(token_ids, end, position)
            block = token_ids[position : close if close >= 0 else len(token_ids)]
            yield self.printer.empty_reasoning_ids == block

    def _history(
        self, continuation: Continuation, turn: TurnSummary, request: BridgeRequest
    ) -> tuple[list[Mapping[str, Any]], bool]:
        """What to print before the new messages, and whether the names of the called tools in it are real."""
        last = _last_turn(request.previous_messages)
        if request.previous_messages is not None and continuation.needs_history:
            history: list[Mapping[str, Any]] = list(check_messages(request.previous_messages))
        else:
            media = request.prompt_media
            counted = media.items_with_ranges() if media is not None and continuation.counts_media else []
            if last is None and not counted and not turn.called_tools and not _results(request.new_messages):
                return self._plain_history, True
            opening = self.probes.opening([item.modality for item, _ in counted])
            history = [*opening, *([] if last is None else [last])]
        if last is not None:
            return history, True
        names = _call_names(turn, request.new_messages)
        calls = [self.probes.call(call_id, name or "unknown") for call_id, name in names.items()]
        return [*history, self.probes.turn(calls, has_text=turn.has_text)], None not in names.values()

    def _closing_ids(self, turn: TurnSummary, end: TurnEnd) -> list[int]:
        """The ids that close a turn that was cut off: first its reasoning, then the turn itself."""
        ids: list[int] = []
        if not turn.reasoning_complete and self.printer.reasoning_ids is not None:
            ids += self.printer.reasoning_ids[1]
        if end.inside and ids[-1:] != [end.control.token_id]:
            ids.append(end.control.token_id)
        return ids


def _find(token_ids: list[int], wanted: list[int], start: int) -> int:
    """The first position from `start` on where the ids `wanted` begin, or -1."""
    try:
        while True:
            start = token_ids.index(wanted[0], start)
            if token_ids[start : start + len(wanted)] == wanted:
                return start
            start += 1
    except ValueError:
        return -1


def _last_turn(previous: Messages | None) -> Mapping[str, Any] | None:
    """The assistant turn that the new messages follow, checked; None if the history does not end with it."""
    if previous is None:
        return None
    if not isinstance(previous, (list, tuple)):
        previous = check_messages(previous)
    if not previous:
        return None
    last = check_message(previous[-1], len(previous) - 1)
    return last if last["role"] == "assistant" else None


def _results(new_messages: Messages) -> list[Mapping[str, Any]]:
    return [message for message in new_messages if message["role"] == "tool"]


def _call_names(turn: TurnSummary, new_messages: Messages) -> dict[str, str | None]:
    """Id -> name of the tool calls of a sampled turn that `new_messages` follow, in order; None for an unknown name.

    A tool message names its call by id, never by position: only where one call has one result, the ids may differ.
    """
    names: dict[str, str | None] = dict(turn.calls)
    results = _results(new_messages)
    ids = {message["tool_call_id"] for message in results if "tool_call_id" in message}
    if results and not (ids and names.keys() >= ids):
        only = next(iter(names.values())) if len(names) == len(results) == 1 else None
        unused = unused_call_ids(ids)
        names = {result.get("tool_call_id") or next(unused): result.get("name", only) for result in results}
    if turn.called_tools and not names:
        names = {next(unused_call_ids()): None}
    return names


def _of_new_messages(layout: TokenLayout, first_new_message: int) -> TokenLayout:
    """The layout of an extension, its message indices counted from the new messages; -1 for earlier ones."""
    spans = tuple(
        span._replace(message_index=max(-1, span.message_index - first_new_message))
        for span in layout.spans
        if span.end > span.start
    )
    return layout._replace(spans=spans, roles=layout.roles[first_new_message:])


def _join(
    request: BridgeRequest,
    closing_ids: Sequence[int],
    extension: TokenLayout,
    new_items: Sequence[MediaItem] | None,
    tool_names: list[str | None],
    placeholder_token_ids: Mapping[str, int],
) -> RenderedTokens:
    """Join prompt, completion, closing ids and extension; messages count from the new ones, others -1."""
    prompt_ids, completion_ids = request.prompt_ids, request.completion_ids
    prompt_end, completion_end = len(prompt_ids), len(prompt_ids) + len(completion_ids)
    shift = completion_end + len(closing_ids)
    spans = [TokenSpan(0, prompt_end, -1, False, False)]
    if completion_ids:
        spans.append(TokenSpan(prompt_end, completion_end, -1, True, True))
    if closing_ids:
        spans.append(TokenSpan(completion_end, shift, -1, False, False))
    spans += [span.moved(shift) for span in extension.spans]
    media = None
    if new_items is not None:
        placed = [(item, at.shifted(shift)) for item, at in zip(new_items, extension.ranges, strict=True)]
        placed.sort(key=lambda pair: pair[1].offset)
        earlier = request.prompt_media
        if earlier is None or earlier.is_empty():
            media = MultiModalData.from_items(placed)
        else:
            media = earlier.with_items(placed)
    return RenderedTokens(
        [*prompt_ids, *completion_ids, *closing_ids, *extension.token_ids],
        tuple(spans),
        extension.roles.copy(),
        media,
        message_tool_names=tool_names,
        placeholder_token_ids=placeholder_token_ids,
        unprinted=extension.unprinted,
    )
