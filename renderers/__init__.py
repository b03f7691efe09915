"""A renderer turns messages into token ids with the model's own chat template, and sampled ids into messages.

It knows no engine and no network.
"""
# ruff: noqa: F403, F405 - `__all__` has the names, once; a type checker finds them by the imports below

import importlib
import sys
from typing import TYPE_CHECKING, Any

from renderers.family_renderers import add_family_modules

if TYPE_CHECKING:
    from renderers import errors
    from renderers.base import *
    from renderers.bridging.refusals import *
    from renderers.configs import *
    from renderers.custom import *
    from renderers.errors import *
    from renderers.family_options import *
    from renderers.family_renderers import *
    from renderers.loading import load_renderer
    from renderers.media.item import *
    from renderers.media.policy import *
    from renderers.media.store import *
    from renderers.messages import *
    from renderers.model_tokenizer import *
    from renderers.options import *
    from renderers.parsing.format import *
    from renderers.parsing.parser import *
    from renderers.parsing.response import *
    from renderers.pool import RendererPool
    from renderers.protocol import *
    from renderers.rendered import *
    from renderers.template_renderer import *
    from renderers.training_sample import *
    from renderers.vision.processor import *

#: Tells this package from the other distribution that installs an import package of the same name.
__distribution__ = "mmrollouts"

add_family_modules(sys.modules[__name__])

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

#: The modules in which a name is looked for. The last ones take a time of their own to import: asyncio (the
#: pool) a tenth of that of all others, pydantic (the typed configurations) a third.
_MODULES = (
    "rendered",
    "template_renderer",
    "bridging.refusals",
    "model_tokenizer",  # before `loading`, whose `load_tokenizer` gives tokenizers of templates
    "loading",
    "messages",
    "parsing.response",
    "parsing.parser",
    "protocol",
    "family_renderers",
    "training_sample",
    "vision.processor",
    "base",
    "pool",
    "custom",
    "family_options",
    "errors",
)


def __getattr__(name: str) -> Any:
    """A name of `__all__`, imported when it is first read."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    modules = ("configs",) if name.endswith("RendererConfig") or name == "config_from_name" else _MODULES
    for module in modules:
        members = vars(importlib.import_module(f"{__name__}.{module}"))
        if name in members:
            globals()[name] = members[name]
            break
    return globals()[name]
