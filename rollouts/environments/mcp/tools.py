"""Tools of servers of the Model Context Protocol (MCP)."""

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Self

from renderers.errors import MissingExtraError
from rollouts.calls import StartAndClose, gathered
from rollouts.environments.mcp.connection import Connection
from rollouts.environments.mcp.results import error_text, result_content
from rollouts.environments.mcp.servers import HttpServer, StdioServer
from rollouts.environments.tools import Tool, ToolFailedError, ToolUnavailableError
from rollouts.errors import ArgumentError, RolloutsError
from rollouts.values import check_positive


class McpTools(StartAndClose):
    """The tools of servers of the Model Context Protocol, as `Tool`s of a `ToolEnvironment`.

        async with McpTools({"files": StdioServer("mcp-files"), "web": HttpServer("http://127.0.0.1:8000/mcp")}) as mcp:
            run_episodes(lambda: ToolEnvironment(task, tools=mcp.tools, messages=messages), ...)

    `servers` are opened once, at the same time, and closed at the end; all episodes share them, so that a
    server should not keep a state that one episode changes and another one reads. Opened and used on one
    event loop.

    `tools` are the tools of all servers in their order. Two servers with a tool of the same name are an
    error, unless `prefix_names` puts the server's name before each: "files__read". The list is that of the
    moment of opening.

    What a model reads: results, an error that a tool reports (`isError`), arguments that the server refuses,
    and that a call was cancelled after `call_seconds`. A server that ends, cannot be reached or responds with
    any other error raises `ToolUnavailableError`, which fails the episode; the next call opens a new
    connection if there is none.

    Needs the extra `mcp`. Raises `MissingExtraError`, `ArgumentError`; when opened `ToolUnavailableError`,
    and `RolloutsError` for two tools of one name, after which no server is left open.
    """

    def __init__(
        self,
        servers: Mapping[str, StdioServer | HttpServer],
        *,
        prefix_names: bool = False,
        call_seconds: float = 60.0,
        open_seconds: float = 30.0,
    ) -> None:
        _check_installed()
        for argument, seconds in (("call_seconds", call_seconds), ("open_seconds", open_seconds)):
            check_positive(argument, seconds, "pass a number of seconds above 0")
        self._servers = {name: _SharedServer(name, server, open_seconds) for name, server in servers.items()}
        self._prefix_names = prefix_names
        self._call_seconds = call_seconds
        self._tools: list[Tool] | None = None

    @property
    def tools(self) -> list[Tool]:
        """The tools of all servers. Raises `ToolUnavailableError` before opening and after closing."""
        if self._tools is None:
            raise _not_open("tools")
        return list(self._tools)

    async def __aenter__(self) -> Self:
        self._refuse_if_open()  # before `start`, after whose errors the connections are closed
        return await super().__aenter__()

    async def start(self) -> None:
        """Open the connections. Raises `ToolUnavailableError`, `RolloutsError`, `ArgumentError` if open."""
        self._refuse_if_open()
        listed = await gathered(server.open() for server in self._servers.values())
        self._tools = self._named(dict(zip(self._servers, listed, strict=True)))

    async def close(self) -> None:
        """Close the connections and end the processes. Tools called afterwards raise `ToolUnavailableError`."""
        self._tools = None
        await asyncio.gather(*(server.close() for server in self._servers.values()))

    def _refuse_if_open(self) -> None:
        if self._tools is not None:
            raise ArgumentError("McpTools", "open", "open it once, and share its `tools`")

    def _named(self, listed: Mapping[str, list[Any]]) -> list[Tool]:
        servers_of = defaultdict(list)
        tools: list[Tool] = []
        for server, described in listed.items():
            for one in described:
                name = f"{server}__{one.name}" if self._prefix_names else one.name
                servers_of[name].append(server)
                call = partial(self._servers[server].call, one.name)
                tools.append(Tool(name, one.description or "", one.input_schema, call, self._call_seconds))
        twice = {name: servers for name, servers in servers_of.items() if len(servers) > 1}
        if twice:
            owners = ", ".join(map(repr, sorted({server for servers in twice.values() for server in servers})))
            raise RolloutsError(
                f"the MCP servers {owners} have tools of the same name: {', '.join(twice)}. Pass prefix_names=True, "
                "which puts the server's name before each"
            )
        return tools


def _not_open(tool: str) -> ToolUnavailableError:
    return ToolUnavailableError(
        f"the tool {tool!r:.80} was called while McpTools is not open; use `async with McpTools(...)`"
    )


class _SharedServer:
    """One server, and the connection to it that is open at the moment."""

    def __init__(self, name: str, server: StdioServer | HttpServer, open_seconds: float) -> None:
        self._name = name
        self._server = server
        self._open_seconds = open_seconds
        self._connection: Connection | None = None
        self._is_open = False
        self._opening = asyncio.Lock()

    async def open(self) -> list[Any]:
        self._is_open = True
        connection = Connection(self._name, self._server)
        tools = await connection.open(self._open_seconds)
        self._connection = connection
        return tools

    async def call(self, tool: str, arguments: dict[str, Any]) -> str | list[Any]:
        connection = await self._usable_connection(tool)
        result = await connection.call(tool, arguments)
        if result.is_error:
            raise ToolFailedError(error_text(result))
        return result_content(self._name, tool, result)

    async def close(self) -> None:
        self._is_open = False
        async with self._opening:
            connection, self._connection = self._connection, None
            if connection is not None:
                await connection.close()

    async def _usable_connection(self, tool: str) -> Connection:
        connection = self._connection
        if connection is not None and connection.is_usable:
            return connection
        async with self._opening:
            if not self._is_open:
                raise _not_open(tool)
            connection = self._connection
            if connection is None or not connection.is_usable:
                self._connection = None
                if connection is not None:
                    await connection.close()
                await self.open()
            assert self._connection is not None
            return self._connection


def _check_installed() -> None:
    try:
        installed = version("mcp")
    except PackageNotFoundError as error:
        raise MissingExtraError("McpTools", "mcp", "mcp") from error
    if [int(number) for number in installed.split(".")[:2]] < [2, 3]:
        needed = f"mcp 2.3 or later ({installed} cannot limit what a server sends)"
        raise MissingExtraError("McpTools", "mcp", needed)
