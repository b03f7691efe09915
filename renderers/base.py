"""The names of the module `renderers.base` of PyPI's `renderers`, in one place for its users.

Everything here is defined elsewhere in this package, except `build_trajectory_step` and small conveniences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from renderers.family_renderers import create_renderer
from renderers.messages import (
    Content,
    ContentPart,
    ImagePart,
    Message,
    TextPart,
    ThinkingPart,
    ToolCall,
    ToolCallFunction,
    ToolSpec,
    VideoPart,
    check_messages,
    message_tool_names,
)
from renderers.model_families import MODEL_RENDERER_MAP
from renderers.model_tokenizer import load_tokenizer
from renderers.parsing.response import ParsedResponse, ParsedToolCall, ToolCallParseStatus
from renderers.protocol import MultimodalRenderer, Renderer, is_multimodal
from renderers.rendered import MultiModalData, PlaceholderRange, RenderedTokens
from renderers.training_sample import RenderedTrainingSample, build_training_sample

if TYPE_CHECKING:
    from renderers.pool import RendererPool

__all__ = [
    "MODEL_RENDERER_MAP",
    "Content",
    "ContentPart",
    "ImagePart",
    "Message",
    "MultiModalData",
    "MultimodalRenderer",
    "ParsedResponse",
    "ParsedToolCall",
    "PlaceholderRange",
    "RenderedTokens",
    "RenderedTrainingSample",
    "Renderer",
    "TextPart",
    "ThinkingPart",
    "ToolCall",
    "ToolCallFunction",
    "ToolCallParseStatus",
    "ToolSpec",
    "VideoPart",
    "build_training_sample",
    "build_trajectory_step",
    "create_renderer",
    "create_renderer_pool",
    "extract_message_tool_names",
    "is_multimodal",
    "load_tokenizer",
    "reject_assistant_in_extension",
]


def extract_message_tool_names(messages: Sequence[Mapping[str, Any]]) -> list[str | None]:
    """Per message, the name of the tool whose result it holds; None for other roles and where unknown."""
    return message_tool_names(check_messages(messages))


def reject_assistant_in_extension(new_messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a bridge must refuse these messages: an assistant turn among them was sampled, not rendered."""
    return any(message.get("role") == "assistant" for message in new_messages)


def build_trajectory_step(
    renderer: Renderer,
    prompt_messages: Sequence[Mapping[str, Any]],
    completion_messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """A prompt and a completion that were not sampled here, as lists of ids, masks and log-probs of 0.

    The prompt ends where the ids of the prompt with generation prompt and those of the whole conversation
    begin to differ. `multi_modal_data` holds the media of the whole conversation, if there are any.
    """
    prompt_ids = renderer.render_ids(prompt_messages, tools=tools, add_generation_prompt=bool(completion_messages))
    rendered = renderer.render([*prompt_messages, *completion_messages], tools=tools)
    ids = rendered.token_ids
    shared = min(len(prompt_ids), len(ids))
    split = next((index for index in range(shared) if prompt_ids[index] != ids[index]), shared)
    step: dict[str, Any] = {
        "prompt_ids": ids[:split],
        "prompt_mask": [False] * split,
        "completion_ids": ids[split:],
        "completion_mask": [True] * (len(ids) - split),
        "completion_logprobs": [0.0] * (len(ids) - split),
        "routed_experts": None,
        "sampling_mask": None,
    }
    media = rendered.multi_modal_data
    return step if media is None or media.is_empty() else {**step, "multi_modal_data": media}


def create_renderer_pool(
    tokenizer_name_or_path: str,
    config: Any = None,
    *,
    size: int = 16,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> RendererPool:
    """A pool of one renderer of a model, for `size` calls at a time, at most 8.

    The calls share that renderer, its tokenizer and its caches. The renderer of a `CustomRendererConfig` need
    not be safe to share: it is made `size` times.
    """
    from renderers.pool import RendererPool
    from renderers.template_renderer import TemplateRenderer

    tokenizer = load_tokenizer(tokenizer_name_or_path)
    renderer = create_renderer(tokenizer, config, chat_template_kwargs=chat_template_kwargs)
    if isinstance(renderer, TemplateRenderer):
        return RendererPool(renderer, threads=min(size, 8))
    return RendererPool(
        lambda: create_renderer(
            load_tokenizer(tokenizer_name_or_path), config, chat_template_kwargs=chat_template_kwargs
        ),
        size,
    )
