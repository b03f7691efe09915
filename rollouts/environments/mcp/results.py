"""The results of MCP tools as content of a message."""

import base64
import json
from typing import Any

from rollouts.environments.tools import ToolUnavailableError


def result_content(server: str, tool: str, result: Any) -> str | list[Any]:
    """The content of a `mcp.types.CallToolResult`: text, or a list of texts, images (bytes) and audio parts.

    Images and sounds are those of the result and of embedded resources, all in their order. A link to a
    resource becomes its address and name. Structured content without other content becomes JSON. Raises
    `ToolUnavailableError` for other data, which no message can hold, and for data that are not base64.
    """
    parts = [_part(server, tool, block) for block in result.content]
    if not any(parts) and result.structured_content is not None:
        return _json(result.structured_content)
    texts = [part for part in parts if isinstance(part, str)]
    return "\n".join(texts) if len(texts) == len(parts) else parts


def error_text(result: Any) -> str:
    """The texts of an error, and structured content that no text repeats; no images and sounds."""
    texts = [text for block in result.content if (text := _text(block))]
    structured = result.structured_content
    if structured is not None and structured not in map(_loaded, texts):
        texts.append(_json(structured))
    return "\n".join(texts) or "the tool gave no reason"


def protocol_error_text(error: Any) -> str:
    """The message of a `mcp.MCPError`, with the data that the server sent beside it."""
    return str(error.message) if error.data is None else f"{error.message}: {_json(error.data)}"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _text(block: Any) -> str | None:
    """What a block of a result says; None for a medium."""
    match block.type:
        case "text":
            return str(block.text)
        case "resource_link":
            return f"{block.name}: {block.uri}"
        case "resource" if hasattr(block.resource, "text"):
            return str(block.resource.text)
    return None


def _part(server: str, tool: str, block: Any) -> str | bytes | dict[str, Any]:
    if (text := _text(block)) is not None:
        return text
    match block.type:
        case "image":
            return _decoded(server, tool, block.data)
        case "audio":
            return {"type": "audio", "audio": _decoded(server, tool, block.data)}
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
