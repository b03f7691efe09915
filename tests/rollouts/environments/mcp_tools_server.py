"""A server of the Model Context Protocol for tests: `python mcp_tools_server.py [PORT]`, by default over stdio."""

import asyncio
import io
import json
import os
import sys
import wave
from typing import Any

from mcp import MCPError
from mcp.server.mcpserver import Audio, Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import BlobResourceContents, CallToolResult, EmbeddedResource
from PIL import Image as PillowImage

server = MCPServer("test tools")


def png(side: int) -> bytes:
    buffer = io.BytesIO()
    PillowImage.new("RGB", (side, side), (200, 40, side % 256)).save(buffer, "PNG")
    return buffer.getvalue()


@server.tool()
def repeat(text: str, times: int = 1) -> str:
    """Repeat a text."""
    return text * times


@server.tool()
def picture(side: int) -> Image:
    return Image(data=png(side), format="png")


@server.tool()
def noise(side: int) -> Image:
    buffer = io.BytesIO()
    PillowImage.frombytes("L", (side, side), os.urandom(side * side)).save(buffer, "PNG")
    return Image(data=buffer.getvalue(), format="png")


@server.tool()
def captioned(side: int) -> list[str | Image]:
    return ["before", Image(data=png(side), format="png"), "after"]


@server.tool()
def counted(word: str) -> dict[str, int]:
    return {word: len(word)}


@server.tool()
def fail(reason: str) -> str:
    raise ToolError(reason)


@server.tool()
def variables() -> str:
    return json.dumps(dict(os.environ))


@server.tool()
def sound(samples: int) -> Audio:
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setparams((1, 2, 16_000, 0, "NONE", ""))
        file.writeframes(bytes(2 * samples))
    return Audio(data=buffer.getvalue(), format="wav")


@server.tool()
def blob(mime_type: str) -> EmbeddedResource:
    contents = BlobResourceContents(uri="file:///blob", mime_type=mime_type, blob="YmxvYg==")
    return EmbeddedResource(type="resource", resource=contents)


@server.tool()
def process() -> int:
    return os.getpid()


@server.tool()
def die() -> str:
    print("the disk is gone", file=sys.stderr, flush=True)
    os._exit(3)


@server.tool()
def respond_with(code: int, message: str = "no such thing") -> str:
    """Respond with an error of the protocol."""
    raise MCPError(code, message, {"missing": "a/b"})


@server.tool()
def result(fields: dict[str, Any]) -> CallToolResult:
    """Respond with exactly this result."""
    return CallToolResult.model_validate(fields)


@server.tool()
async def hang() -> str:
    await asyncio.Event().wait()
    return "never"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
