"""Messages <-> tokens: a model's own chat template, run under provenance tracing. Knows no engine and no network."""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from renderers import errors
from renderers.bridging.refusals import BridgeRefusal, BridgeStats, ThinkingRetention
from renderers.errors import MalformedGenerateResponseError, OverlongPromptError, RendererError, missing_name
from renderers.family_renderers import (
    DeepSeekR1Renderer,
    DeepSeekV3Renderer,
    DeepSeekV4Renderer,
    DefaultRenderer,
    Gemma4Renderer,
    GLM5Renderer,
    GLM45Renderer,
    GLM51Renderer,
    GLM53Renderer,
    GptOssRenderer,
    Hy3Renderer,
    InklingRenderer,
    KimiK2Renderer,
    KimiK25Renderer,
    LagunaM1Renderer,
    LagunaS21Renderer,
    LagunaXS2Renderer,
    LagunaXS21Renderer,
    Llama3Renderer,
    MiniMaxM2Renderer,
    Nemotron3Renderer,
    Nemotron3UltraRenderer,
    Nemotron35Renderer,
    PrimeQwen3Renderer,
    Qwen3Renderer,
    Qwen3VLRenderer,
    Qwen35Renderer,
    Qwen36Renderer,
    Qwen38Renderer,
    add_family_modules,
    create_renderer,
)
from renderers.loading import load_renderer
from renderers.media.item import MediaItem, MediaSource
from renderers.media.policy import MediaPolicy
from renderers.media.store import MediaStore
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
)
from renderers.options import RendererOptions
from renderers.parsing.format import Format
from renderers.parsing.parser import ResponseParser
from renderers.parsing.response import (
    ContentDelta,
    ParsedResponse,
    ParsedToolCall,
    ReasoningDelta,
    ToolCallDelta,
    ToolCallParseStatus,
)
from renderers.protocol import MultimodalRenderer, Renderer, is_multimodal
from renderers.rendered import MultiModalData, PlaceholderRange, RenderedTokens, TokenSpan, UnprintedField
from renderers.template_renderer import TemplateRenderer
from renderers.vision.processor import ProcessorOutput

if TYPE_CHECKING:
    from renderers.base import build_trajectory_step, create_renderer_pool, extract_message_tool_names
    from renderers.configs import (
        AutoRendererConfig,
        BaseRendererConfig,
        CustomRendererConfig,
        DeepSeekR1RendererConfig,
        DeepSeekV3RendererConfig,
        DeepSeekV4RendererConfig,
        DefaultRendererConfig,
        Gemma4RendererConfig,
        GLM5RendererConfig,
        GLM45RendererConfig,
        GLM51RendererConfig,
        GLM53RendererConfig,
        GptOssRendererConfig,
        Hy3RendererConfig,
        InklingRendererConfig,
        KimiK2RendererConfig,
        KimiK25RendererConfig,
        LagunaM1RendererConfig,
        LagunaS21RendererConfig,
        LagunaXS2RendererConfig,
        LagunaXS21RendererConfig,
        Llama3RendererConfig,
        MiniMaxM2RendererConfig,
        Nemotron3RendererConfig,
        Nemotron3UltraRendererConfig,
        Nemotron35RendererConfig,
        PrimeQwen3RendererConfig,
        Qwen3RendererConfig,
        Qwen3VLRendererConfig,
        Qwen35RendererConfig,
        Qwen36RendererConfig,
        Qwen38RendererConfig,
        RendererConfig,
        config_from_name,
    )
    from renderers.custom import custom_renderer_config, load_custom_renderer, load_target
    from renderers.family_options import merge_chat_template_kwargs, template_field_names
    from renderers.model_tokenizer import load_tokenizer
    from renderers.pool import RendererPool
    from renderers.training_sample import RenderedTrainingSample, build_training_sample, build_training_samples

#: Tells this package from the other distribution that installs an import package of the same name.
__distribution__ = "mmrollouts"

add_family_modules(sys.modules[__name__])

# Imported on first access: asyncio (the pool) takes a tenth of the time of all other imports, pydantic (the typed
# configurations) a third.
_MODULE_OF = {
    "RendererConfig": "configs",
    "config_from_name": "configs",
    "RenderedTrainingSample": "training_sample",
    "RendererPool": "pool",
    "build_training_sample": "training_sample",
    "build_training_samples": "training_sample",
    "build_trajectory_step": "base",
    "create_renderer_pool": "base",
    "custom_renderer_config": "custom",
    "extract_message_tool_names": "base",
    "load_custom_renderer": "custom",
    "load_target": "custom",
    "load_tokenizer": "model_tokenizer",
    "merge_chat_template_kwargs": "family_options",
    "template_field_names": "family_options",
}

__all__ = [
    "AutoRendererConfig",
    "BaseRendererConfig",
    "BridgeRefusal",
    "BridgeStats",
    "Content",
    "ContentDelta",
    "ContentPart",
    "CustomRendererConfig",
    "DeepSeekR1Renderer",
    "DeepSeekR1RendererConfig",
    "DeepSeekV3Renderer",
    "DeepSeekV3RendererConfig",
    "DeepSeekV4Renderer",
    "DeepSeekV4RendererConfig",
    "DefaultRenderer",
    "DefaultRendererConfig",
    "Format",
    "GLM5Renderer",
    "GLM5RendererConfig",
    "GLM45Renderer",
    "GLM45RendererConfig",
    "GLM51Renderer",
    "GLM51RendererConfig",
    "GLM53Renderer",
    "GLM53RendererConfig",
    "Gemma4Renderer",
    "Gemma4RendererConfig",
    "GptOssRenderer",
    "GptOssRendererConfig",
    "Hy3Renderer",
    "Hy3RendererConfig",
    "ImagePart",
    "InklingRenderer",
    "InklingRendererConfig",
    "KimiK2Renderer",
    "KimiK2RendererConfig",
    "KimiK25Renderer",
    "KimiK25RendererConfig",
    "LagunaM1Renderer",
    "LagunaM1RendererConfig",
    "LagunaS21Renderer",
    "LagunaS21RendererConfig",
    "LagunaXS2Renderer",
    "LagunaXS2RendererConfig",
    "LagunaXS21Renderer",
    "LagunaXS21RendererConfig",
    "Llama3Renderer",
    "Llama3RendererConfig",
    "MalformedGenerateResponseError",
    "MediaItem",
    "MediaPolicy",
    "MediaSource",
    "MediaStore",
    "Message",
    "MiniMaxM2Renderer",
    "MiniMaxM2RendererConfig",
    "MultiModalData",
    "MultimodalRenderer",
    "Nemotron3Renderer",
    "Nemotron3RendererConfig",
    "Nemotron3UltraRenderer",
    "Nemotron3UltraRendererConfig",
    "Nemotron35Renderer",
    "Nemotron35RendererConfig",
    "OverlongPromptError",
    "ParsedResponse",
    "ParsedToolCall",
    "PlaceholderRange",
    "PrimeQwen3Renderer",
    "PrimeQwen3RendererConfig",
    "ProcessorOutput",
    "Qwen3Renderer",
    "Qwen3RendererConfig",
    "Qwen3VLRenderer",
    "Qwen3VLRendererConfig",
    "Qwen35Renderer",
    "Qwen35RendererConfig",
    "Qwen36Renderer",
    "Qwen36RendererConfig",
    "Qwen38Renderer",
    "Qwen38RendererConfig",
    "ReasoningDelta",
    "RenderedTokens",
    "RenderedTrainingSample",
    "Renderer",
    "RendererConfig",
    "RendererError",
    "RendererOptions",
    "RendererPool",
    "ResponseParser",
    "TemplateRenderer",
    "TextPart",
    "ThinkingPart",
    "ThinkingRetention",
    "TokenSpan",
    "ToolCall",
    "ToolCallDelta",
    "ToolCallFunction",
    "ToolCallParseStatus",
    "ToolSpec",
    "UnprintedField",
    "VideoPart",
    "build_training_sample",
    "build_training_samples",
    "build_trajectory_step",
    "config_from_name",
    "create_renderer",
    "create_renderer_pool",
    "custom_renderer_config",
    "errors",
    "extract_message_tool_names",
    "is_multimodal",
    "load_custom_renderer",
    "load_renderer",
    "load_target",
    "load_tokenizer",
    "merge_chat_template_kwargs",
    "template_field_names",
]


def __getattr__(name: str) -> Any:
    module = "configs" if name in __all__ and name.endswith("RendererConfig") else _MODULE_OF.get(name)
    if module is None:
        raise missing_name(__name__, name)
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
