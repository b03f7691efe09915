"""Messages <-> tokens: a model's own chat template, run under provenance tracing. Knows no engine and no network."""

from renderers import errors
from renderers.bridge import BridgeRefusal
from renderers.errors import RendererError
from renderers.formats.format import Format
from renderers.loading import load_renderer
from renderers.media.policy import MediaPolicy
from renderers.media.source import MediaSource
from renderers.media.store import MediaStore
from renderers.messages import ContentPart, Message, ToolCall, ToolSpec
from renderers.parsing.response import ParsedResponse, ParsedToolCall, ToolCallParseStatus
from renderers.protocol import MultimodalRenderer, Renderer, is_multimodal
from renderers.rendered import MediaItem, MultiModalData, PlaceholderRange, RenderedTokens, TokenSpan
from renderers.template_renderer import TemplateRenderer

#: Tells this package from the other distribution that installs an import package of the same name.
__distribution__ = "mmrollouts"

__all__ = [
    "BridgeRefusal",
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
    "RenderedTokens",
    "Renderer",
    "RendererError",
    "TemplateRenderer",
    "TokenSpan",
    "ToolCall",
    "ToolCallParseStatus",
    "ToolSpec",
    "errors",
    "is_multimodal",
    "load_renderer",
]
