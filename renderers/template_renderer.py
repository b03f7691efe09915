"""The renderer: a chat template, a tokenizer, a format and, for models that see, a media processor."""

from __future__ import annotations

import logging
import marshal
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from renderers.attribution import MediaSlot, TokenLayout, TurnShape, attribute
from renderers.bounded_cache import BoundedCache
from renderers.bridge import (
    BridgeRefusal,
    BridgeStats,
    check_carried_media,
    cut_behind_turn,
    history_for_bridge,
    join_extension,
)
from renderers.errors import MediaError, UnsupportedModalityError
from renderers.formats.format import Format
from renderers.media.reference import source_of_part
from renderers.messages import IMAGE_PART_TYPES, check_messages, media_parts, without_media
from renderers.parsing.parser import parse_response
from renderers.parsing.response import ParsedResponse
from renderers.protocol import Messages, Tools
from renderers.rendered import MediaItem, MultiModalData, RenderedTokens
from renderers.template.chat_template import ChatTemplate, Printed
from renderers.tokens.encoding import DEFAULT_BODY_POLICIES, BodyPolicy, encode_printed
from renderers.tokens.tokenizer import TemplateTokenizer
from renderers.vision.qwen_vl import QwenVLProcessor

_log = logging.getLogger("renderers")


class _ShownItem(NamedTuple):
    """A picture and the message that holds it."""

    message_index: int
    item: MediaItem


class TemplateRenderer:
    """Renders, bridges and parses for one model. Safe to share between threads.

    `image_token` is the placeholder that the template prints for a picture; both it and `image_processor` are None for
    a model that only reads text.
    """

    def __init__(
        self,
        template: ChatTemplate,
        tokenizer: TemplateTokenizer,
        format: Format,
        *,
        image_processor: QwenVLProcessor | None = None,
        image_token: str | None = None,
        body_policies: Mapping[str, BodyPolicy] | None = None,
        cache_bytes: int = 64 * 2**20,
    ) -> None:
        self.template = template
        self.tokenizer = tokenizer
        self.format = format
        self.image_processor = image_processor
        self.image_token_id = (
            None if image_token is None else tokenizer.require_control_id(image_token, "a picture's placeholder")
        )
        self.bridge_stats = BridgeStats()
        self._body_policies = {**DEFAULT_BODY_POLICIES, **(body_policies or {})}
        self._stop_ids = [tokenizer.require_control_id(token, "the format") for token in format.stop_tokens]
        # A template that prints the time may print another text for the same messages.
        self._layouts: BoundedCache[bytes, TokenLayout] = BoundedCache(
            0 if "strftime_now" in template.source else cache_bytes
        )
        self._shape = TurnShape(self._probe_generation_prompt(), self._stop_ids[0])

    # Messages -> tokens.

    def render(
        self, messages: Messages, *, tools: Tools | None = None, add_generation_prompt: bool = False
    ) -> RenderedTokens:
        """Render a whole conversation.

        Raises `MessageError` for a conversation that is not one, `MediaError` for a picture that cannot be accepted,
        `TemplateError` with the template's words if the template refuses.
        """
        checked = check_messages(messages)
        media = self._process_media(checked)
        shown = without_media(checked)

        def lay_out() -> TokenLayout:
            printed = self.template.print(shown, tools=tools, add_generation_prompt=add_generation_prompt)
            return self._lay_out(printed, shown, media, self._shape)

        layout = self._cached(("render", shown, tools, add_generation_prompt), media, lay_out)
        assert layout is not None
        return layout.with_media([entry.item for entry in media], sees=self.image_token_id is not None)

    def render_ids(
        self, messages: Messages, *, tools: Tools | None = None, add_generation_prompt: bool = False
    ) -> list[int]:
        """The `token_ids` of `render`."""
        return self.render(messages, tools=tools, add_generation_prompt=add_generation_prompt).token_ids

    def get_stop_token_ids(self) -> list[int]:
        """The ids that end a turn; the one that the template itself prints comes first."""
        return list(self._stop_ids)

    # Tokens -> message.

    def parse_response(
        self, token_ids: Sequence[int], *, tools: Tools | None = None, prompt_ids: Sequence[int] | None = None
    ) -> ParsedResponse:
        """Read a completion back. `prompt_ids` decides whether the prompt had opened reasoning."""
        return parse_response(
            token_ids, self.format, self.tokenizer, reasoning_open=self._reasoning_open(prompt_ids), tools=tools
        )

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
        outcome = self._bridge(
            previous_prompt_ids,
            previous_completion_ids,
            check_messages(new_messages),
            tools,
            None if previous_messages is None else check_messages(previous_messages),
            previous_multi_modal_data,
        )
        self.bridge_stats.count(outcome)
        return outcome

    def _bridge(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        new: list[dict[str, Any]],
        tools: Tools | None,
        previous: list[dict[str, Any]] | None,
        media: MultiModalData | None,
    ) -> RenderedTokens | BridgeRefusal:
        if not new:
            return BridgeRefusal.NOTHING_NEW
        if any(message["role"] == "assistant" for message in new):
            return BridgeRefusal.ASSISTANT_IN_EXTENSION
        refusal = check_carried_media(prompt_ids, media, self.image_token_id)
        if refusal is not None:
            return refusal
        parsed = self.parse_response(completion_ids, tools=tools, prompt_ids=prompt_ids)
        if not parsed.reasoning_complete:
            return BridgeRefusal.OPEN_REASONING
        if self._drops_reasoning and self._holds_reasoning(prompt_ids, completion_ids) and _user_speaks(new):
            return BridgeRefusal.REWRITES_HISTORY

        history = history_for_bridge(previous, parsed.to_message(), new)
        media_of_new = self._process_media(new, first_index=len(history))
        extension = self._extension(history, new, tools, media_of_new)
        if extension is None:
            return BridgeRefusal.NO_TURN_END
        closed = bool(completion_ids) and completion_ids[-1] == self._stop_ids[0]
        return join_extension(
            prompt_ids,
            completion_ids,
            [] if closed else self._stop_ids[:1],
            extension.with_media([entry.item for entry in media_of_new], sees=self.image_token_id is not None),
            len(history),
            media,
        )

    def _extension(
        self, history: Messages, new: Messages, tools: Tools | None, media: Sequence[_ShownItem]
    ) -> TokenLayout | None:
        """What the template prints behind the turn that ends `history`; None if it does not end that turn."""
        shown = without_media([*history, *new])

        def lay_out() -> TokenLayout | None:
            printed = self.template.print(shown, tools=tools, add_generation_prompt=True)
            behind = cut_behind_turn(printed, len(history) - 1, self.tokenizer, self._stop_ids[0])
            return None if behind is None else self._lay_out(behind, shown, media, None)

        return self._cached(("extend", shown, tools, len(history)), media, lay_out)

    # Media.

    @property
    def mm_token_type_id_map(self) -> dict[int, int]:
        """Placeholder id -> 1 for pictures; empty for a model that only reads text."""
        return {} if self.image_token_id is None else {self.image_token_id: 1}

    def _process_media(self, messages: Messages, first_index: int = 0) -> list[_ShownItem]:
        return [
            _ShownItem(index, self._process_part(part, index, part_index))
            for index, message in enumerate(messages, first_index)
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
        try:
            return self.image_processor.process(source_of_part(part, self.image_processor.policy))
        except MediaError as error:
            raise error.at(message_index, part_index) from error.__cause__

    # What the template does, asked once.

    def _probe_generation_prompt(self) -> str:
        question = [{"role": "user", "content": "."}]
        without = self.template.print(question).text
        with_prompt = self.template.print(question, add_generation_prompt=True).text
        return with_prompt.removeprefix(without)

    @cached_property
    def _drops_reasoning(self) -> bool:
        """Whether the template prints an assistant turn differently once a user has spoken again."""
        if self.format.reasoning is None:
            return False
        question = {"role": "user", "content": "."}
        thought = {"role": "assistant", "content": "a", "reasoning_content": "b"}
        before = self.template.print([question, thought]).text
        return not self.template.print([question, thought, question]).text.startswith(before)

    def _holds_reasoning(self, prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> bool:
        assert self.format.reasoning is not None
        start = self.tokenizer.control_id(self.format.reasoning.start)
        return start in prompt_ids or start in completion_ids

    def _reasoning_open(self, prompt_ids: Sequence[int] | None) -> bool:
        """Whether the last reasoning marker of the prompt opens (without a prompt: what the template does)."""
        if self.format.reasoning is None:
            return False
        if prompt_ids is None:
            return self.format.reasoning.opened_by_prompt
        start = self.tokenizer.control_id(self.format.reasoning.start)
        end = self.tokenizer.control_id(self.format.reasoning.end)
        markers = (token_id for token_id in reversed(prompt_ids) if token_id in (start, end))
        return next(markers, None) == start

    # Layouts.

    def _lay_out(
        self, printed: Printed, messages: Messages, media: Sequence[_ShownItem], shape: TurnShape | None
    ) -> TokenLayout:
        roles = [message["role"] for message in messages]
        encoded = encode_printed(printed, self.tokenizer, roles, self._body_policies)
        slots = [MediaSlot(entry.message_index, entry.item.num_tokens) for entry in media]
        return attribute(printed, encoded, roles, slots, shape=shape, placeholder_id=self.image_token_id)

    def _cached(
        self, text: tuple[Any, ...], media: Sequence[_ShownItem], lay_out: Callable[[], TokenLayout | None]
    ) -> TokenLayout | None:
        """The layout of a text that was laid out before with pictures of the same sizes, or a new one."""
        try:
            # Version 2 writes equal values as equal bytes; later ones depend on which objects are shared.
            key = marshal.dumps((text, [entry.item.num_tokens for entry in media]), 2)
        except ValueError:  # holds something other than plain data; the template may still print it
            return lay_out()
        layout = self._layouts.get(key)
        if layout is None and (layout := lay_out()) is not None:
            self._layouts.put(key, layout, len(key) + layout.nbytes)
        return layout


def _user_speaks(messages: Messages) -> bool:
    return any(message["role"] == "user" for message in messages)
