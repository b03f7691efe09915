"""The renderer of one model: a chat template, a tokenizer, a format and the media processors, if there are any."""

import logging
import marshal
import operator
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import cached_property
from typing import Any

from renderers.attribution import TokenLayout, attribute
from renderers.bridging.bridge import Bridge, BridgeRequest
from renderers.bridging.continuation import TurnSummary
from renderers.bridging.probe_messages import ProbeMessages
from renderers.bridging.refusals import BridgeRefusal, BridgeStats, HistoryPolicy, ThinkingRetention
from renderers.bridging.turn_printer import TurnPrinter
from renderers.errors import MessageError, RendererError, short_repr
from renderers.media.item import MediaItem
from renderers.messages import (
    MEDIA_PART_TYPES,
    Modality,
    check_messages,
    check_tools,
    media_parts,
    message_tool_names,
    with_names_in_call_ids,
    without_media,
)
from renderers.model_files import ModelFiles
from renderers.parsing.format import Format
from renderers.parsing.grammar import Grammar, grammar_of
from renderers.parsing.parser import (
    ResponseParser,
    ends_unbegun_reasoning,
    leaves_reasoning_open,
    parse_response,
    plain_response,
)
from renderers.parsing.response import ParsedResponse
from renderers.process.caches import ByteLRU, LayoutCache
from renderers.protocol import Messages, Tools
from renderers.rendered import TOKEN_TYPE_IDS, MultiModalData, RenderedTokens
from renderers.template.chat_template import Template
from renderers.template.content_forms import ContentForms
from renderers.template.probe_conversation import smallest_conversation
from renderers.tokens.encoding import DEFAULT_BODY_POLICIES, BodyPolicy
from renderers.tokens.tokenizer import TemplateTokenizer
from renderers.unread_input import UnreadInput
from renderers.vision.media_loader import MediaLoader
from renderers.vision.media_markers import MediaSlot
from renderers.vision.processor import MediaProcessor

_log = logging.getLogger("renderers")


class TemplateRenderer:
    """Renders, bridges and parses for one model. Safe to share between threads.

    `media` loads the media; without processors, the model only reads text. `unprocessed_markers` are the
    tokens that the template prints for media without a processor, which are rendered with
    `process_multimodal=False` only. Messages go to `template` as they are: `load_renderer` and
    `create_renderer` pass a template that converts their content. `config` is what the renderer was made
    of: `RendererOptions`, or the resolved typed configuration of a family. `files` are those that it was
    read from; None for a renderer of objects.
    """

    def __init__(
        self,
        template: Template,
        tokenizer: TemplateTokenizer,
        format: Format,
        *,
        media: MediaLoader | None = None,
        unprocessed_markers: Mapping[Modality, str] | None = None,
        body_policies: Mapping[str, BodyPolicy] | None = None,
        thinking_retention: ThinkingRetention = "template",
        history: HistoryPolicy = "template",
        cache_bytes: int = 64 * 2**20,
        config: Any = None,
        files: ModelFiles | None = None,
    ) -> None:
        self.config = config
        self.files = files
        self.template = template
        self.tokenizer = tokenizer
        self._media = media or MediaLoader({}, model=tokenizer.model)
        processors = self._media.processors
        markers = {modality: processor.marker for modality, processor in processors.items()}
        markers = {**(unprocessed_markers or {}), **markers}
        self._markers: dict[int, Modality] = {
            tokenizer.require_control_id(marker, f"the {modality} processor"): modality
            for modality, marker in markers.items()
        }
        self._placeholder_token_ids: dict[str, int] = {
            modality: token_id for token_id, modality in self._markers.items()
        }
        embed_tokens = {processors[m].embed_token if m in processors else marker for m, marker in markers.items()}
        self.thinking_retention = thinking_retention
        self.bridge_stats = BridgeStats()
        # A template that prints the time may print different texts for the same messages, so nothing is cached.
        self._layouts = LayoutCache(0 if "strftime_now" in template.source else cache_bytes)
        self._turn_summaries: ByteLRU[bytes, TurnSummary] = ByteLRU(2**20)
        smallest = smallest_conversation(template)
        forms = ContentForms(template)
        probes = ProbeMessages(template, smallest, forms, format.arguments)
        self.format = format = replace(format, one_call=True) if probes.one_call else format
        policies = {**DEFAULT_BODY_POLICIES, **(body_policies or {})}
        self._printer = TurnPrinter(template, tokenizer, format, smallest, policies)
        self._unread = UnreadInput(template, smallest, forms, format, model=tokenizer.model)
        self._bridge = Bridge(
            self._printer,
            self._unread,
            format,
            probes,
            retention=thinking_retention,
            history=history,
            stats=self.bridge_stats,
            layouts=self._layouts,
            markers=self._markers,
            embed_ids={tokenizer.require_control_id(token, "the processor") for token in embed_tokens},
        )

    def __repr__(self) -> str:
        return f"<TemplateRenderer of {self.tokenizer.model}, format {self.format.name}>"

    # Messages -> tokens.

    def render(
        self,
        messages: Messages,
        *,
        tools: Tools | None = None,
        add_generation_prompt: bool = False,
        process_multimodal: bool = True,
    ) -> RenderedTokens:
        """Render a whole conversation.

        With `process_multimodal=False` no medium is loaded: each has one placeholder token, as in
        `RenderedTokens.logical_ids`, and `multi_modal_data` is None. It is the prompt of a server that
        loads media.

        Raises `MessageError` for a malformed conversation, `MediaError` for a medium that cannot be
        accepted, `TemplateError` with the template's own message if the template refuses.
        """
        checked = check_messages(messages)
        check_tools(tools)
        if "{name}" in self.format.call_id:
            # Not in the template, as other forms of calls: ids are numbered through the conversation, of
            # which a bridge prints a part, and their form is that of the format, which is found by printing.
            checked = with_names_in_call_ids(checked, self.format.call_id)
        media = self._media.load(checked) if process_multimodal else []
        slots = [entry.slot() for entry in media] if process_multimodal else self._logical_slots(checked)
        text_messages = without_media(checked)

        def build_layout() -> TokenLayout:
            printed = self.template.print(text_messages, tools=tools, add_generation_prompt=add_generation_prompt)
            unprinted = self._unread.of_messages(text_messages, printed, tools, prompt=add_generation_prompt)
            if add_generation_prompt:
                self._unread.of_tools(text_messages, tools, printed)
            layout = attribute(
                printed,
                self._printer.controls(printed, text_messages),
                self.tokenizer,
                [message["role"] for message in text_messages],
                slots,
                shape=self._printer.shape,
                markers=self._markers,
            )
            return layout._replace(unprinted=unprinted)

        layout_keys = [slot.layout_key for slot in slots]
        inputs = (text_messages, tools, add_generation_prompt, layout_keys)
        layout = self._layouts.get_or_make("prompt", inputs, build_layout)
        items = [entry.item for entry in media] if process_multimodal else None
        return layout.with_media(items, message_tool_names(checked), self._placeholder_token_ids.copy())

    def render_ids(
        self,
        messages: Messages,
        *,
        tools: Tools | None = None,
        add_generation_prompt: bool = False,
        process_multimodal: bool = True,
    ) -> list[int]:
        """The `token_ids` of `render`."""
        return self.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            process_multimodal=process_multimodal,
        ).token_ids

    def get_stop_token_ids(self) -> list[int]:
        """The ids that end a turn; the one that the template itself prints comes first."""
        return list(self._printer.stop_ids)

    # Tokens -> message.

    def parse_response(
        self, token_ids: Sequence[int], *, tools: Tools | None = None, prompt_ids: Sequence[int] | None = None
    ) -> ParsedResponse:
        """Parse a completion into a message. `prompt_ids` tell whether the prompt ends inside reasoning.

        Raises `RendererError` for a negative id. An id beyond the tokenizer's is valid: models pad their
        embedding, and may sample such a row, which reads as U+FFFD.
        """
        check_tools(tools)
        token_ids = _plain_ids(token_ids)
        reasoning_open = self._reasoning_open(prompt_ids, token_ids)
        parsed = None if reasoning_open else plain_response(token_ids, self._grammar)
        if parsed is None:  # the ids of a plain response are those of tokens
            _check_not_negative(token_ids)
            format = self._grammar.format
            parsed = parse_response(token_ids, format, self.tokenizer, reasoning_open=reasoning_open, tools=tools)
        key = _turn_key(token_ids, tools, reasoning_open)
        if key is not None:
            self._turn_summaries.put(key, TurnSummary.of(parsed), 2 * len(key) + 500)
        return parsed

    def _turn_summary(self, token_ids: list[int], tools: Tools | None, prompt_ids: Sequence[int]) -> TurnSummary:
        """What a bridge must know of a completion; cached, because callers parse a completion before they bridge it."""
        reasoning_open = self._reasoning_open(prompt_ids, token_ids)
        key = _turn_key(token_ids, tools, reasoning_open)
        cached = None if key is None else self._turn_summaries.get(key)
        return cached or TurnSummary.of(self.parse_response(token_ids, tools=tools, prompt_ids=prompt_ids))

    def response_parser(self, *, tools: Tools | None = None, prompt_ids: Sequence[int] | None = None) -> ResponseParser:
        """A streaming parser, fed with sampled ids as they arrive; arguments as for `parse_response`."""
        check_tools(tools)
        return ResponseParser(self.format, self.tokenizer, reasoning_open=self._reasoning_open(prompt_ids), tools=tools)

    def _reasoning_open(self, prompt_ids: Sequence[int] | None, token_ids: Sequence[int] | None = None) -> bool:
        """Whether reasoning is open after the prompt, or after the template's; the completion may decide."""
        if prompt_ids is None:
            opened = self.format.reasoning is not None and self.format.reasoning.opened_by_prompt
            if opened and token_ids is not None and not self.format.assumes_open_reasoning:
                return ends_unbegun_reasoning(token_ids, self.format, self.tokenizer)
            return opened
        return leaves_reasoning_open(prompt_ids, self._grammar)

    @cached_property
    def _grammar(self) -> Grammar:
        return grammar_of(self.format, self.tokenizer)

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
        process_multimodal: bool = True,
    ) -> RenderedTokens | None:
        """The next prompt, starting with prompt + completion verbatim, or None where that cannot be proven right.

        With `process_multimodal=False` the prompt and the result have one placeholder token for each
        medium, as `render` returns them then; whether the prompt's placeholders belong to images is not
        checked. Refusals are counted with their reason in `bridge_stats`; `try_bridge` returns the reason.
        """
        outcome = self.try_bridge(
            previous_prompt_ids,
            previous_completion_ids,
            new_messages,
            tools=tools,
            previous_messages=previous_messages,
            previous_multi_modal_data=previous_multi_modal_data,
            process_multimodal=process_multimodal,
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
        process_multimodal: bool = True,
    ) -> RenderedTokens | BridgeRefusal:
        """Extend a turn as `bridge_to_next_turn`; a refusal returns its reason in place of None."""
        check_tools(tools)
        request = BridgeRequest(
            _plain_ids(previous_prompt_ids),
            _plain_ids(previous_completion_ids),
            check_messages(new_messages),
            tools,
            previous_messages,
            previous_multi_modal_data,
        )
        outcome = self._extend(request, process_multimodal)
        self.bridge_stats.count(outcome)
        return outcome

    def _extend(self, request: BridgeRequest, process_multimodal: bool) -> RenderedTokens | BridgeRefusal:
        if not request.new_messages:
            return BridgeRefusal.NO_NEW_MESSAGES
        for message in request.new_messages:
            if message["role"] == "assistant":
                return BridgeRefusal.ASSISTANT_IN_EXTENSION
        if not request.prompt_ids:
            return BridgeRefusal.NO_PROMPT
        if process_multimodal:
            refusal = self._bridge.check_prompt_media(request.prompt_ids, request.prompt_media)
            if refusal is not None:
                return refusal
        turn = self._turn_summary(request.completion_ids, request.tools, request.prompt_ids)
        if not process_multimodal:
            return self._bridge.extend(request, turn, self._logical_slots(request.new_messages), None)
        media = self._media.load(request.new_messages)
        return self._bridge.extend(request, turn, [entry.slot() for entry in media], [entry.item for entry in media])

    # What the renderer supports.

    @property
    def supports_tools(self) -> bool:
        """Whether calls that the template prints are parsed back."""
        return self.format.tool_calls is not None or self.format.channels is not None

    @property
    def supports_process_multimodal(self) -> bool:
        """Whether `process_multimodal=False` may be passed: always; the template prints placeholders."""
        return True

    @property
    def is_prefix_stable(self) -> bool:
        """Whether longer conversations begin with the ids of shorter ones: promised for no template."""
        return False

    @property
    def effective_thinking_retention(self) -> ThinkingRetention:
        """How long a bridge keeps reasoning that a full render would drop."""
        return self.thinking_retention

    # Media.

    @property
    def placeholder_token_ids(self) -> Mapping[str, int]:
        """By modality the token that stands for one unexpanded item, as in `RenderedTokens`."""
        return self._placeholder_token_ids

    @property
    def processors(self) -> Mapping[Modality, MediaProcessor]:
        """The processors of media, by modality; empty for a model that only reads text."""
        return self._media.processors

    @property
    def mm_token_type_id_map(self) -> dict[int, int]:
        """The token that a template prints for an item -> 1 for images, 2 for videos."""
        return {token_id: TOKEN_TYPE_IDS[modality] for token_id, modality in self._markers.items()}

    def prefetch(self, messages: Messages) -> Future[list[MediaItem]]:
        """Start to load and process the media of messages on threads; a later `render` or bridge uses the results.

        Returns at once. The future's result is the items, in order; `await asyncio.wrap_future(...)` waits
        for it.
        """
        return self._media.prefetch(check_messages(messages))

    def _logical_slots(self, messages: Messages) -> list[MediaSlot]:
        """Slots of one placeholder token each, for checked messages whose media are not loaded."""
        return [
            MediaSlot(index, part_index, self._logical_modality(part, index, part_index), 1, None, "")
            for index, message in enumerate(messages)
            for part_index, part in media_parts(message)
        ]

    def _logical_modality(self, part: Mapping[str, Any], index: int, part_index: int) -> Modality:
        modality = MEDIA_PART_TYPES[part["type"]]
        if self._media.reads_sound(modality):
            raise MessageError(
                "a video with its sound (use_audio_in_video), which a server that loads media would not "
                "read; render it with process_multimodal=True, or load a renderer without the option",
                message_index=index,
                part_index=part_index,
            )
        known = modality in self._markers.values()
        return modality if known else self._media.modality(part, index, part_index)  # raises


def _turn_key(token_ids: list[int], tools: Tools | None, reasoning_open: bool) -> bytes | None:
    """Equal for completions that are parsed alike; None for tools that are no plain data."""
    try:
        return marshal.dumps((token_ids, tools, reasoning_open), 2)  # type: ignore[arg-type]
    except ValueError:
        return None


def _check_not_negative(token_ids: list[int]) -> None:
    if token_ids and min(token_ids) < 0:
        index = next(index for index, token_id in enumerate(token_ids) if token_id < 0)
        raise RendererError(f"token {index} has id {token_ids[index]}; pass the sampled ids, which are 0 or more")


def _plain_ids(token_ids: Sequence[int]) -> list[int]:
    """The ids of any sequence, such as an array or a tensor, as ints; a list is returned as it is."""
    if type(token_ids) is list and (not token_ids or type(token_ids[0]) is int):
        return token_ids
    try:
        return [operator.index(token_id) for token_id in token_ids]
    except TypeError as error:
        raise RendererError(f"token ids are a sequence of whole numbers, not {short_repr(token_ids)}") from error
