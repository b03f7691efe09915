"""Errors of servers of the Model Context Protocol (MCP)."""

from __future__ import annotations

from collections.abc import Sequence

from rollouts.environments.tools import ToolUnavailableError
from rollouts.errors import RolloutsError


class McpServerError(ToolUnavailableError):
    """A server could not be started or reached, ended, or returned something that the protocol does not allow.

    `server` is its name. This is no answer of a tool, and no message to the model is made of it.

    Cure: check the command or the URL of the server, and read its log.
    """

    def __init__(self, server: str, reason: str) -> None:
        self.server = server
        self.reason = reason
        super().__init__(f"MCP server {server!r:.80}: {reason}")


class McpToolNamesError(RolloutsError, ValueError):
    """Several servers have tools of one name. `names` are those names.

    Cure: pass `prefix_names=True`.
    """

    def __init__(self, names: Sequence[str], servers: Sequence[str]) -> None:
        self.names = tuple(names)
        super().__init__(
            f"the MCP servers {', '.join(map(repr, servers))} have tools of the same name: {', '.join(names)}. Pass "
            "prefix_names=True, which puts the server's name before each"
        )


class McpToolsClosedError(ToolUnavailableError):
    """A tool was called before `McpTools` was opened or after it was closed.

    Cure: call tools inside `async with McpTools(...)`.
    """

    def __init__(self, name: str) -> None:
        super().__init__(f"the tool {name!r:.80} was called while McpTools is not open; use `async with McpTools(...)`")
