"""The results of MCP tools as content of a message."""

from __future__ import annotations

import base64
import json
from typing import Any

from rollouts.environments.tools import ToolUnavailableError


def result_content(server: str, tool: str, result: Any) -> str | list[Any]:
    """The content of a `mcp.types.CallToolResult`: text, or a list of texts, images (bytes) and audio parts.

    Images and sounds are those of the result and of embedded resources, all in their order. A link to a resource
    becomes its address and name. Structured content without other content becomes JSON. Raises `ToolUnavailableError`
    for other data, which no message can hold, and for data that are not base64.
    """
    if not result.content and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    parts = [_part(server, tool, block) for block in result.content]
    texts = [part for part in parts if isinstance(part, str)]
    return "\n".join(texts) if len(texts) == len(parts) else parts


def error_text(result: Any) -> str:
    """The texts of a result that is an error; images and sounds in it are left out."""
    return "\n".join(block.text for block in result.content if block.type == "text") or "the tool gave no reason"


def _part(server: str, tool: str, block: Any) -> str | bytes | dict[str, Any]:
    match block.type:
        case "text":
            return str(block.text)
        case "image":
            return _decoded(server, tool, block.data)
        case "audio":
            return {"type": "audio", "audio": _decoded(server, tool, block.data)}
        case "resource_link":
            return f"{block.name}: {block.uri}"
        case "resource" if hasattr(block.resource, "text"):
            return str(block.resource.text)
        case "resource" if (block.resource.mime_type or "").startswith("image/"):
            return _decoded(server, tool, block.resource.blob)
        case "resource" if (block.resource.mime_type or "").startswith("audio/"):
            return {"type": "audio", "audio": _decoded(server, tool, block.resource.blob)}
        case _:
            kind = getattr(block, "mime_type", None) or getattr(getattr(block, "resource", None), "mime_type", None)
            reason = f"the tool {tool!r} returned {block.type} ({kind}), which is no text, image or sound"
            raise ToolUnavailableError(f"MCP server {server!r:.80}: {reason}")


def _decoded(server: str, tool: str, data: str) -> bytes:
    try:
        return base64.b64decode(data, validate=True)
    except ValueError as error:
        raise ToolUnavailableError(
            f"MCP server {server!r:.80}: the tool {tool!r} returned data that are not base64: {error}"
        ) from error
