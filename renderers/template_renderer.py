"""The renderer: a chat template, a tokenizer, a format and, for models that see, a media processor."""

from __future__ import annotations

import logging
import marshal
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from renderers.attribution import MediaSlot, ShownItem, TokenLayout, attribute
from renderers.bounded_cache import BoundedCache
from renderers.bridge import Bridge, BridgeRefusal, BridgeStats, ThinkingRetention, check_carried_media
from renderers.continuation import StandIns, TurnSummary
from renderers.errors import MediaError, UnsupportedModalityError
from renderers.formats.format import Format
from renderers.messages import (
    IMAGE_PART_TYPES,
    check_messages,
    check_tools,
    media_parts,
    message_tool_names,
    without_media,
)
from renderers.parsing.parser import ResponseParser, parse_response
from renderers.parsing.prompts import ends_in_reasoning
from renderers.parsing.response import ParsedResponse
from renderers.protocol import Messages, Tools
from renderers.media.item import MediaItem
from renderers.rendered import MultiModalData, RenderedTokens
from renderers.template.chat_template import Template
from renderers.template.dialect import content_form
from renderers.tokens.encoding import DEFAULT_BODY_POLICIES, BodyPolicy
from renderers.tokens.tokenizer import TemplateTokenizer
from renderers.turn_printer import TurnPrinter
from renderers.value_key import value_key

if TYPE_CHECKING:
    from renderers.vision.qwen_vl import QwenVLProcessor

_log = logging.getLogger("renderers")


class TemplateRenderer:
    """Renders, bridges and parses for one model. Safe to share between threads.

    `image_token` is the placeholder that the template prints for a picture; both it and `image_processor` are None for
    a model that only reads text.
    """

    def __init__(
        self,
        template: Template,
        tokenizer: TemplateTokenizer,
        format: Format,
        *,
        image_processor: QwenVLProcessor | None = None,
        image_token: str | None = None,
        body_policies: Mapping[str, BodyPolicy] | None = None,
        thinking_retention: ThinkingRetention = "template",
        cache_bytes: int = 64 * 2**20,
    ) -> None:
        self.template = template
        self.tokenizer = tokenizer
        self.format = format
        self.image_processor = image_processor
        self.image_token_id = (
            None if image_token is None else tokenizer.require_control_id(image_token, "a picture's placeholder")
        )
        self.thinking_retention = thinking_retention
        self.bridge_stats = BridgeStats()
        # A template that prints the time may print another text for the same messages.
        self._layouts: BoundedCache[bytes, TokenLayout] = BoundedCache(
            0 if "strftime_now" in template.source else cache_bytes
        )
        self._turns: BoundedCache[bytes, TurnSummary] = BoundedCache(2**20)
        stand_ins = StandIns(content_form(template), format.arguments)
        policies = {**DEFAULT_BODY_POLICIES, **(body_policies or {})}
        self._printer = TurnPrinter(template, tokenizer, format, stand_ins.question, stand_ins.answer, policies)
        self._bridge = Bridge(
            self._printer, format, stand_ins, retention=thinking_retention, placeholder_id=self.image_token_id
        )

    # Messages -> tokens.

    def render(
        self, messages: Messages, *, tools: Tools | None = None, add_generation_prompt: bool = False
    ) -> RenderedTokens:
        """Render a whole conversation.

        Raises `MessageError` for a conversation that is not one, `MediaError` for a picture that cannot be accepted,
        `TemplateError` with the template's words if the template refuses.
        """
        checked = check_messages(messages)
        check_tools(tools)
        media = self._process_media(checked)
        shown = without_media(checked)

        def lay_out() -> TokenLayout:
            printed = self.template.print(shown, tools=tools, add_generation_prompt=add_generation_prompt)
            self._printer.warn_of_lost_text(printed, shown)
            return attribute(
                printed,
                self._printer.controls(printed, shown),
                self.tokenizer,
                [message["role"] for message in shown],
                [MediaSlot(entry.message_index, entry.item.num_tokens) for entry in media],
                shape=self._printer.shape,
                placeholder_id=self.image_token_id,
            )

        layout = self._cached((shown, tools, add_generation_prompt), media, lay_out)
        return layout.with_media(
            [entry.item for entry in media], message_tool_names(checked), sees=self.image_token_id is not None
        )

    def render_ids(
        self, messages: Messages, *, tools: Tools | None = None, add_generation_prompt: bool = False
    ) -> list[int]:
        """The `token_ids` of `render`."""
        return self.render(messages, tools=tools, add_generation_prompt=add_generation_prompt).token_ids

    def get_stop_token_ids(self) -> list[int]:
        """The ids that end a turn; the one that the template itself prints comes first."""
        return list(self._printer.stop_ids)

    # Tokens -> message.

    def parse_response(
        self, token_ids: Sequence[int], *, tools: Tools | None = None, prompt_ids: Sequence[int] | None = None
    ) -> ParsedResponse:
        """Read a completion back. `prompt_ids` decides whether the prompt had opened reasoning."""
        check_tools(tools)
        token_ids = _plain_ids(token_ids)
        parsed = parse_response(
            token_ids, self.format, self.tokenizer, reasoning_open=self._reasoning_open(prompt_ids), tools=tools
        )
        key = self._turn_key(token_ids, tools, prompt_ids)
        self._turns.put(key, TurnSummary.of(parsed), 2 * len(key) + 500)
        return parsed

    def _turn(self, token_ids: Sequence[int], tools: Tools | None, prompt_ids: Sequence[int]) -> TurnSummary:
        """What a bridge must know of a completion, which its caller has nearly always just had parsed."""
        known = self._turns.get(self._turn_key(token_ids, tools, prompt_ids))
        return known or TurnSummary.of(self.parse_response(token_ids, tools=tools, prompt_ids=prompt_ids))

    def _turn_key(self, token_ids: Sequence[int], tools: Tools | None, prompt_ids: Sequence[int] | None) -> bytes:
        names = None if tools is None else [str(tool.get("function", tool).get("name")) for tool in tools]
        return marshal.dumps((list(token_ids), names, self._reasoning_open(prompt_ids)), 2)

    def response_parser(self, *, tools: Tools | None = None, prompt_ids: Sequence[int] | None = None) -> ResponseParser:
        """A parser to feed sampled ids to as they come; arguments as for `parse_response`."""
        check_tools(tools)
        return ResponseParser(self.format, self.tokenizer, reasoning_open=self._reasoning_open(prompt_ids), tools=tools)

    def _reasoning_open(self, prompt_ids: Sequence[int] | None) -> bool:
        """Whether the prompt opened reasoning; without one, what the template does."""
        if prompt_ids is None:
            return self.format.reasoning is not None and self.format.reasoning.opened_by_prompt
        return ends_in_reasoning(prompt_ids, self.format, self.tokenizer)

    # Prompt + completion + new messages -> next prompt.

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: Sequence[int],
        previous_completion_ids: Sequence[int],
        new_messages: Messages,
        *,
        tools: Tools | None = None,
        previous_messages: Messages | None = None,
        previous_multi_modal_data: MultiModalData | None = None,
    ) -> RenderedTokens | None:
        """The next prompt, starting with prompt + completion verbatim, or None where that cannot be proven right.

        Refusals are counted with their reason in `bridge_stats`; `try_bridge` returns the reason.
        """
        outcome = self.try_bridge(
            previous_prompt_ids,
            previous_completion_ids,
            new_messages,
            tools=tools,
            previous_messages=previous_messages,
            previous_multi_modal_data=previous_multi_modal_data,
        )
        if isinstance(outcome, BridgeRefusal):
            _log.info("bridge refused: %s", outcome.value)
            return None
        return outcome

    def try_bridge(
        self,
        previous_prompt_ids: Sequence[int],
        previous_completion_ids: Sequence[int],
        new_messages: Messages,
        *,
        tools: Tools | None = None,
        previous_messages: Messages | None = None,
        previous_multi_modal_data: MultiModalData | None = None,
    ) -> RenderedTokens | BridgeRefusal:
        """As `bridge_to_next_turn`, with the reason in place of None."""
        check_tools(tools)
        outcome = self._extended(
            _plain_ids(previous_prompt_ids),
            _plain_ids(previous_completion_ids),
            check_messages(new_messages),
            tools,
            previous_messages,
            previous_multi_modal_data,
        )
        self.bridge_stats.count(outcome)
        return outcome

    def _extended(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        new: list[dict[str, Any]],
        tools: Tools | None,
        previous: Messages | None,
        media: MultiModalData | None,
    ) -> RenderedTokens | BridgeRefusal:
        if not new:
            return BridgeRefusal.NOTHING_NEW
        if any(message["role"] == "assistant" for message in new):
            return BridgeRefusal.ASSISTANT_IN_EXTENSION
        refusal = check_carried_media(prompt_ids, media, self.image_token_id)
        if refusal is not None:
            return refusal
        return self._bridge.extend(
            prompt_ids,
            completion_ids,
            self._turn(completion_ids, tools, prompt_ids),
            new,
            self._process_media(new),
            tools=tools,
            previous=previous,
            media=media,
        )

    # Media.

    @property
    def mm_token_type_id_map(self) -> dict[int, int]:
        """Placeholder id -> 1 for pictures; empty for a model that only reads text."""
        return {} if self.image_token_id is None else {self.image_token_id: 1}

    def _process_media(self, messages: Messages) -> list[ShownItem]:
        return [
            ShownItem(index, self._process_part(part, index, part_index))
            for index, message in enumerate(messages)
            for part_index, part in media_parts(message)
        ]

    def _process_part(self, part: Mapping[str, Any], message_index: int, part_index: int) -> MediaItem:
        kind = part["type"]
        if self.image_processor is None or kind not in IMAGE_PART_TYPES:
            sees = "pictures, not videos" if self.image_processor is not None else "text"
            raise UnsupportedModalityError(
                f"a part of type {kind!r}, but {self.tokenizer.model} reads only {sees}. Remove the part, or load a "
                "model directory with a preprocessor_config.json for it",
                message_index=message_index,
                part_index=part_index,
            )
        from renderers.media.reference import source_of_part  # loads Pillow, which readers of text do without

        try:
            return self.image_processor.process(source_of_part(part, self.image_processor.policy))
        except MediaError as error:
            raise error.at(message_index, part_index) from error.__cause__

    # Layouts.

    def _cached(
        self, text: tuple[Any, ...], media: Sequence[ShownItem], lay_out: Callable[[], TokenLayout]
    ) -> TokenLayout:
        """The layout of a text that was laid out before with pictures of the same sizes, or a new one."""
        key = value_key((text, [entry.item.num_tokens for entry in media]))
        if key is None:  # holds something other than plain data; the template may still print it
            return lay_out()
        layout = self._layouts.get(key)
        if layout is None:
            layout = lay_out()
            self._layouts.put(key, layout, len(key) + layout.nbytes)
        return layout


def _plain_ids(token_ids: Sequence[int]) -> list[int]:
    """The ids as a list of ints, which numpy's and torch's arrays are not; a list of ints is taken as it is."""
    if type(token_ids) is list and (not token_ids or type(token_ids[0]) is int):
        return token_ids
    return [operator.index(token_id) for token_id in token_ids]
