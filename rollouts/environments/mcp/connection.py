"""An open connection to a server of MCP."""

import asyncio
import logging
import os
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from rollouts.engines.http.address import key_remover
from rollouts.environments.mcp.results import protocol_error_text
from rollouts.environments.mcp.servers import HttpServer, StdioServer, process_arguments
from rollouts.environments.tools import ToolArgumentsError, ToolFailedError, ToolUnavailableError
from rollouts.episodes.errors import single_errors
from rollouts.errors import describe_exception

log = logging.getLogger("rollouts")


class Connection:
    """An open connection: the server's tools, and calls of them.

    The client of MCP must be opened and closed by one task, and episodes come and go: a task of the
    connection opens it, waits for `close`, and closes it. `open` and `close` are called once each; `call` may
    be called by many tasks.
    """

    def __init__(self, name: str, server: StdioServer | HttpServer) -> None:
        self._name = name
        self._server = server
        headers = server.headers.values() if isinstance(server, HttpServer) else ()
        # Without the scheme before it: "Bearer KEY".
        self._without_key = key_remover(*(value.rpartition(" ")[2] for value in headers))
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
                # Shielded: the timeout must not cancel the future, which `_hold` sets.
                return await asyncio.shield(self._tools)
        except TimeoutError:
            await self.close()
            raise self._error(f"was not ready within {seconds:g} seconds") from None
        except BaseException:
            await self.close()
            raise

    async def call(self, tool: str, arguments: dict[str, Any]) -> Any:
        """Call a tool; the result is a `mcp.types.CallToolResult`.

        Raises `ToolArgumentsError` for arguments that cannot be sent, `ToolFailedError` where the server
        refuses the arguments, and `ToolUnavailableError` for any other error of the protocol and where the
        server has ended.
        """
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED, INVALID_PARAMS, INVALID_REQUEST

        if asyncio.get_running_loop() is not self._task.get_loop():
            raise self._error("was opened on another event loop; open McpTools on the one that uses it")
        _check_can_be_sent(tool, arguments)
        try:
            return await self._client.session.call_tool(tool, arguments)
        except MCPError as error:
            reason = protocol_error_text(error)
            if error.code == INVALID_PARAMS:
                raise ToolFailedError(self._without_key(reason)) from error
            # A server over HTTP that has forgotten the session refuses every request.
            has_no_session = error.code == INVALID_REQUEST and isinstance(self._server, HttpServer)
            ended = (error.code == CONNECTION_CLOSED or has_no_session) and not await self._responds()
            self._ended = self._ended or ended
            what = "the connection ended during" if ended and not has_no_session else "there was an error in"
            raise self._error(f"{what} a call of {tool!r}: {reason} ({error.code})") from error
        except Exception as error:
            raise self._error(f"a call of {tool!r} failed: {describe_exception(error)}") from error

    async def _responds(self) -> bool:
        """Whether the connection is still open, which calls of other episodes may be waiting on.

        The code of the error does not say: servers use the one of a closed connection for errors of their
        own.
        """
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED, INVALID_REQUEST

        try:
            async with asyncio.timeout(5.0):
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
            # The client's own limit of an event, 1 MiB, is less than the base64 of many images.
            async with (
                create_mcp_http_client(headers=dict(server.headers)) as http,
                Client(streamable_http_client(server.url, http_client=http, max_sse_event_size=64 * 2**20)) as client,
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
        # Not `readline`, which raises for a line that is longer than the limit of the reader.
        while chunk := await reader.read(4096):
            for line in chunk.decode("utf-8", "replace").splitlines():
                self._stderr.append(line[:500])
                log.debug("MCP server %s: %s", self._name, line)

    def _error(self, reason: str) -> ToolUnavailableError:
        stderr = f"; its standard error ends with:\n{chr(10).join(self._stderr)}" if self._stderr else ""
        return ToolUnavailableError(f"MCP server {self._name!r:.80}: {self._without_key(reason)}{stderr}")


def _check_can_be_sent(tool: str, arguments: dict[str, Any]) -> None:
    """Raise `ToolArgumentsError` for half of a surrogate pair, and for what is nested too deeply."""
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
