"""Messages <-> tokens: a model's own chat template, run under provenance tracing. Knows no engine and no network."""

import importlib
from typing import TYPE_CHECKING, Any

from renderers import errors
from renderers.bridging.refusals import BridgeRefusal, BridgeStats, ThinkingRetention
from renderers.errors import MalformedGenerateResponseError, OverlongPromptError, RendererError
from renderers.loading import create_renderer, load_renderer
from renderers.media.item import MediaItem
from renderers.media.policy import MediaPolicy
from renderers.media.source import MediaSource
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
from renderers.rendered import MultiModalData, PlaceholderRange, RenderedTokens, TokenSpan
from renderers.template_renderer import TemplateRenderer
from renderers.vision.processor_output import ProcessorOutput

if TYPE_CHECKING:
    from renderers.base import create_renderer_pool
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
    from renderers.model_tokenizer import load_tokenizer
    from renderers.pool import RendererPool
    from renderers.training_sample import RenderedTrainingSample, build_training_sample, build_training_samples

#: Tells this package from the other distribution that installs an import package of the same name.
__distribution__ = "mmrollouts"

# Imported on first access: asyncio (the pool) takes a tenth of the time of all other imports, pydantic (the typed
# configurations) a third.
_MODULE_OF = {
    **dict.fromkeys(
        (
            "AutoRendererConfig",
            "BaseRendererConfig",
            "CustomRendererConfig",
            "DeepSeekR1RendererConfig",
            "DeepSeekV3RendererConfig",
            "DeepSeekV4RendererConfig",
            "DefaultRendererConfig",
            "Gemma4RendererConfig",
            "GLM5RendererConfig",
            "GLM45RendererConfig",
            "GLM51RendererConfig",
            "GLM53RendererConfig",
            "GptOssRendererConfig",
            "Hy3RendererConfig",
            "InklingRendererConfig",
            "KimiK2RendererConfig",
            "KimiK25RendererConfig",
            "LagunaM1RendererConfig",
            "LagunaS21RendererConfig",
            "LagunaXS2RendererConfig",
            "LagunaXS21RendererConfig",
            "Llama3RendererConfig",
            "MiniMaxM2RendererConfig",
            "Nemotron3RendererConfig",
            "Nemotron3UltraRendererConfig",
            "Nemotron35RendererConfig",
            "PrimeQwen3RendererConfig",
            "Qwen3RendererConfig",
            "Qwen3VLRendererConfig",
            "Qwen35RendererConfig",
            "Qwen36RendererConfig",
            "Qwen38RendererConfig",
            "RendererConfig",
            "config_from_name",
        ),
        "configs",
    ),
    "RenderedTrainingSample": "training_sample",
    "RendererPool": "pool",
    "build_training_sample": "training_sample",
    "build_training_samples": "training_sample",
    "create_renderer_pool": "base",
    "load_tokenizer": "model_tokenizer",
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
    "DeepSeekR1RendererConfig",
    "DeepSeekV3RendererConfig",
    "DeepSeekV4RendererConfig",
    "DefaultRendererConfig",
    "Format",
    "GLM5RendererConfig",
    "GLM45RendererConfig",
    "GLM51RendererConfig",
    "GLM53RendererConfig",
    "Gemma4RendererConfig",
    "GptOssRendererConfig",
    "Hy3RendererConfig",
    "ImagePart",
    "InklingRendererConfig",
    "KimiK2RendererConfig",
    "KimiK25RendererConfig",
    "LagunaM1RendererConfig",
    "LagunaS21RendererConfig",
    "LagunaXS2RendererConfig",
    "LagunaXS21RendererConfig",
    "Llama3RendererConfig",
    "MalformedGenerateResponseError",
    "MediaItem",
    "MediaPolicy",
    "MediaSource",
    "MediaStore",
    "Message",
    "MiniMaxM2RendererConfig",
    "MultiModalData",
    "MultimodalRenderer",
    "Nemotron3RendererConfig",
    "Nemotron3UltraRendererConfig",
    "Nemotron35RendererConfig",
    "OverlongPromptError",
    "ParsedResponse",
    "ParsedToolCall",
    "PlaceholderRange",
    "PrimeQwen3RendererConfig",
    "ProcessorOutput",
    "Qwen3RendererConfig",
    "Qwen3VLRendererConfig",
    "Qwen35RendererConfig",
    "Qwen36RendererConfig",
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
    "VideoPart",
    "build_training_sample",
    "build_training_samples",
    "config_from_name",
    "create_renderer",
    "create_renderer_pool",
    "errors",
    "is_multimodal",
    "load_renderer",
    "load_tokenizer",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
