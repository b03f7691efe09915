"""Tools of servers of the Model Context Protocol (MCP). Needs the extra `mcp`."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import shutil
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Self

from rollouts.calls import StartAndClose, gathered
from rollouts.environments.tools import Tool, ToolArgumentsError, ToolFailedError, ToolUnavailableError
from rollouts.episodes.errors import single_errors
from rollouts.errors import ArgumentError, MissingExtraError, RolloutsError, describe_exception
from rollouts.values import check_positive

__all__ = ["HttpServer", "McpTools", "StdioServer"]


@dataclass(frozen=True, slots=True)
class StdioServer:
    """A server that is started as a process and spoken to over its standard input and output.

    `command` is a program, found in this process's PATH; `args` are its arguments; `cwd` is its working directory.
    `env` is its whole environment: the process receives no other variable of this one, neither PATH nor HOME. A
    program that starts others needs `env={"PATH": os.environ["PATH"]}`. Not on Windows. Raises `ArgumentError`.
    """

    command: str
    args: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict, repr=False)  # the values may be secret
    cwd: str | Path | None = None

    def __post_init__(self) -> None:
        if isinstance(self.args, str) or not all(isinstance(arg, str) for arg in self.args):
            raise ArgumentError("args", self.args, "pass a list of texts, one for each argument")
        texts = isinstance(self.env, Mapping) and all(
            isinstance(text, str) for pair in self.env.items() for text in pair
        )
        if not texts:
            names = list(self.env) if isinstance(self.env, Mapping) else self.env  # not the values: they may be secret
            raise ArgumentError("env", names, "pass a mapping from names to texts")


@dataclass(frozen=True, slots=True)
class HttpServer:
    """A server that is reached over HTTP (the transport "streamable HTTP"). `headers` are sent with every request."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)


def process_arguments(server: StdioServer, inherited: Sequence[str]) -> tuple[str, list[str]]:
    """The program to start, and its arguments, so that the process has no variables but those of `server.env`.

    `inherited` are the variables that the client of MCP passes on from this process; `env -u` removes them again.
    Raises `FileNotFoundError` if the program, or `env`, is not found.
    """
    program = _found(server.command)
    removed = [name for name in inherited if name in os.environ and name not in server.env]
    if not removed:
        return program, list(server.args)
    unset = [argument for name in removed for argument in ("-u", name)]
    return _found("env"), [*unset, program, *server.args]


def _found(command: str) -> str:
    program = shutil.which(command)
    if program is None:
        raise FileNotFoundError(f"there is no program {command!r} that can be run; pass its path")
    return os.path.abspath(program)


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


log = logging.getLogger("rollouts")

#: A server that does not respond to a ping within this time after an error has ended.
_PING_SECONDS = 5.0

#: The largest event of a server over HTTP. The client's own limit, 1 MiB, is less than the base64 of many images.
_MAX_EVENT_BYTES = 64 * 2**20


class Connection:
    """An open connection: the server's tools, and calls of them.

    The client of MCP must be opened and closed by one task, and episodes come and go: a task of the connection opens
    it, waits for `close`, and closes it. `open` and `close` are called once each; `call` may be called by many tasks.
    """

    def __init__(self, name: str, server: StdioServer | HttpServer) -> None:
        self._name = name
        self._server = server
        self._client: Any = None
        self._stderr: deque[str] = deque(maxlen=8)  # the last lines, for the text of an error
        self._closing = asyncio.Event()
        self._ended = False
        self._tools: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._hold(), name=f"mcp-server-{name}")

    async def open(self, seconds: float) -> list[Any]:
        """The tools, as `mcp.types.Tool`. Raises `ToolUnavailableError`; the connection is closed then."""
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.shield(self._tools)
        except TimeoutError:
            await self.close()
            raise self._error(f"was not ready within {seconds:g} seconds") from None
        except BaseException:
            await self.close()
            raise

    async def call(self, tool: str, arguments: dict[str, Any]) -> Any:
        """Call a tool; the result is a `mcp.types.CallToolResult`.

        Raises `ToolArgumentsError` for arguments that cannot be sent, `ToolFailedError` where the server refuses the
        arguments, and `ToolUnavailableError` for any other error of the protocol and where the server has ended.
        """
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED, INVALID_PARAMS, INVALID_REQUEST

        if asyncio.get_running_loop() is not self._task.get_loop():
            raise self._error("was opened on another event loop; open McpTools on the one that uses it")
        _check_can_be_sent(tool, arguments)
        try:
            return await self._client.session.call_tool(tool, arguments)
        except MCPError as error:
            if error.code == INVALID_PARAMS:
                raise ToolFailedError(error.message) from error
            # A server over HTTP that has forgotten the session refuses every request.
            has_no_session = error.code == INVALID_REQUEST and isinstance(self._server, HttpServer)
            ended = (error.code == CONNECTION_CLOSED or has_no_session) and not await self._responds()
            self._ended = self._ended or ended
            what = "the connection ended during" if ended and not has_no_session else "there was an error in"
            raise self._error(f"{what} a call of {tool!r}: {error.message} ({error.code})") from error
        except Exception as error:
            raise self._error(f"a call of {tool!r} failed: {describe_exception(error)}") from error

    async def _responds(self) -> bool:
        """Whether the connection is still open, which calls of other episodes may be waiting on.

        The code of the error does not say: servers use the one of a closed connection for errors of their own.
        """
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED, INVALID_REQUEST

        try:
            async with asyncio.timeout(_PING_SECONDS):
                await self._client.session.send_ping()
        except MCPError as error:
            return error.code not in (CONNECTION_CLOSED, INVALID_REQUEST)
        except OSError:  # TimeoutError is one
            return False
        return True

    @property
    def is_usable(self) -> bool:
        return not self._ended and not self._task.done()

    async def close(self) -> None:
        """Close the connection and end the server's process. Takes a few seconds where the process does not end."""
        self._closing.set()
        if not self._tools.done():
            self._task.cancel("the connection is closed before it is open")
        await asyncio.wait([self._task])

    async def _hold(self) -> None:
        try:
            async with self._opened() as client:
                self._client = client
                tools = await _all_tools(client.session)
                if not self._tools.done():
                    self._tools.set_result(tools)
                await self._closing.wait()
        except BaseException as error:
            failed = self._error(f"could not be opened: {describe_exception(next(single_errors(error)))}")
            failed.__cause__ = error
            if not self._tools.done():
                self._tools.set_exception(failed)
                self._tools.exception()  # `open` may no longer wait for it
            elif isinstance(error, Exception):
                log.warning("MCP server %s: closing the connection failed: %s", self._name, describe_exception(error))
            if not isinstance(error, Exception):
                raise

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator[Any]:
        from mcp import Client, StdioServerParameters
        from mcp.client.stdio import DEFAULT_INHERITED_ENV_VARS, stdio_client
        from mcp.client.streamable_http import streamable_http_client
        from mcp.shared._httpx_utils import create_mcp_http_client

        server = self._server
        if isinstance(server, HttpServer):
            async with (
                create_mcp_http_client(headers=dict(server.headers)) as http,
                Client(
                    streamable_http_client(server.url, http_client=http, max_sse_event_size=_MAX_EVENT_BYTES)
                ) as client,
            ):
                yield client
            return
        program, arguments = process_arguments(server, DEFAULT_INHERITED_ENV_VARS)
        parameters = StdioServerParameters(
            command=program, args=arguments, env=dict(server.env), cwd=server.cwd, encoding="utf-8"
        )
        async with self._reading_stderr() as stderr, Client(stdio_client(parameters, errlog=stderr)) as client:
            yield client

    @asynccontextmanager
    async def _reading_stderr(self) -> AsyncIterator[Any]:
        """A file for the standard error of a process; its lines are logged, and the last ones kept."""
        read_end, write_end = os.pipe()
        reader = asyncio.StreamReader(limit=2**16)
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_end, "rb", 0)
        )
        lines = asyncio.create_task(self._keep_lines(reader))
        try:
            with os.fdopen(write_end, "w") as file:
                yield file
        finally:
            transport.close()
            lines.cancel()
            await asyncio.wait([lines])

    async def _keep_lines(self, reader: asyncio.StreamReader) -> None:
        while chunk := await reader.read(4096):
            for line in chunk.decode("utf-8", "replace").splitlines():
                self._stderr.append(line[:500])
                log.debug("MCP server %s: %s", self._name, line)

    def _error(self, reason: str) -> ToolUnavailableError:
        stderr = f"; its standard error ends with:\n{chr(10).join(self._stderr)}" if self._stderr else ""
        return ToolUnavailableError(f"MCP server {self._name!r:.80}: {reason}{stderr}")


def _check_can_be_sent(tool: str, arguments: dict[str, Any]) -> None:
    """Raise `ToolArgumentsError` for half of a surrogate pair, and for what is nested too deeply.

    The client would find it while it writes to the server, and end the connection, which all episodes share.
    """
    from pydantic_core import to_json

    try:
        to_json(arguments)
    except ValueError as error:
        raise ToolArgumentsError(tool, [f"the arguments cannot be sent as JSON: {error}"]) from error


async def _all_tools(session: Any) -> list[Any]:
    """The tools of all pages of a server's list."""
    from mcp.types import PaginatedRequestParams

    tools: list[Any] = []
    cursor: str | None = None
    while True:
        page = await session.list_tools(params=PaginatedRequestParams(cursor=cursor) if cursor else None)
        tools += page.tools
        cursor = page.next_cursor
        if not cursor:
            return tools


class McpTools(StartAndClose):
    """The tools of servers of the Model Context Protocol, as `Tool`s of a `ToolEnvironment`.

        async with McpTools({"files": StdioServer("mcp-files"), "web": HttpServer("http://127.0.0.1:8000/mcp")}) as mcp:
            run_episodes(lambda: ToolEnvironment(task, tools=mcp.tools, messages=messages), ...)

    `servers` are opened once, at the same time, and closed at the end; all episodes share them, so that a server should
    not keep a state that one episode changes and another one reads. Opened and used on one event loop.

    `tools` are the tools of all servers in their order. Two servers with a tool of the same name are an error, unless
    `prefix_names` puts the server's name before each: "files__read". The list is that of the moment of opening.

    What a model reads: results, an error that a tool reports (`isError`), arguments that the server refuses, and that a
    call was cancelled after `call_seconds`. A server that ends, cannot be reached or responds with any other error
    raises `ToolUnavailableError`, which fails the episode; the next call opens a new connection if there is none.

    Needs the extra `mcp`. Raises `MissingExtraError`, `ArgumentError`; when opened `ToolUnavailableError`, and
    `RolloutsError` for two tools of one name, after which no server is left open.
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
        for name, server in servers.items():
            if not isinstance(server, StdioServer | HttpServer):
                raise ArgumentError(f"servers[{name!r}]", server, "pass a StdioServer or a HttpServer under a name")
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
                tools.append(self._tool(name, self._servers[server], one))
        twice = {name: servers for name, servers in servers_of.items() if len(servers) > 1}
        if twice:
            owners = ", ".join(map(repr, sorted({server for servers in twice.values() for server in servers})))
            raise RolloutsError(
                f"the MCP servers {owners} have tools of the same name: {', '.join(twice)}. Pass prefix_names=True, "
                "which puts the server's name before each"
            )
        return tools

    def _tool(self, name: str, server: _SharedServer, described: Any) -> Tool:
        async def call(arguments: dict[str, Any]) -> str | list[Any]:
            return await server.call(described.name, arguments)

        return Tool(name, described.description or "", described.input_schema, call, self._call_seconds)


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
        """The open connection; a new one where it has ended."""
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
