"""Messages <-> tokens: a model's own chat template, run under provenance tracing. Knows no engine and no network."""

import importlib
from typing import TYPE_CHECKING, Any

from renderers import errors
from renderers.bridging.refusals import BridgeRefusal, BridgeStats, ThinkingRetention
from renderers.errors import RendererError
from renderers.loading import create_renderer, load_renderer
from renderers.media.item import MediaItem
from renderers.media.policy import MediaPolicy
from renderers.media.source import MediaSource
from renderers.media.store import MediaStore
from renderers.messages import ContentPart, Message, ToolCall, ToolSpec
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

if TYPE_CHECKING:
    from renderers.pool import RendererPool
    from renderers.training_sample import RenderedTrainingSample, build_training_sample, build_training_samples

#: Tells this package from the other distribution that installs an import package of the same name.
__distribution__ = "mmrollouts"

# Imported on first access: the pool imports asyncio, which takes a tenth of the time of all other imports.
_MODULE_OF = {
    "RenderedTrainingSample": "training_sample",
    "RendererPool": "pool",
    "build_training_sample": "training_sample",
    "build_training_samples": "training_sample",
}

__all__ = [
    "BridgeRefusal",
    "BridgeStats",
    "ContentDelta",
    "ContentPart",
    "Format",
    "MediaItem",
    "MediaPolicy",
    "MediaSource",
    "MediaStore",
    "Message",
    "MultiModalData",
    "MultimodalRenderer",
    "ParsedResponse",
    "ParsedToolCall",
    "PlaceholderRange",
    "ReasoningDelta",
    "RenderedTokens",
    "RenderedTrainingSample",
    "Renderer",
    "RendererError",
    "RendererOptions",
    "RendererPool",
    "ResponseParser",
    "TemplateRenderer",
    "ThinkingRetention",
    "TokenSpan",
    "ToolCall",
    "ToolCallDelta",
    "ToolCallParseStatus",
    "ToolSpec",
    "build_training_sample",
    "build_training_samples",
    "create_renderer",
    "errors",
    "is_multimodal",
    "load_renderer",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
