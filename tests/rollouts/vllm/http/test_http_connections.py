"""How connections are kept and closed, on one event loop, on another one after it, and after a fork."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import warnings
from pathlib import Path

import fake_server
import pytest
from fake_responses import hold, stream_pieces
from fake_server import GENERATE, FakeVLLM
from http_calls import GENERATION, generate

from rollouts.engines.http.connection import HttpLimits, ServerConnection
from rollouts.errors import (
    EngineClosedError,
    EngineError,
)

pytestmark = [pytest.mark.filterwarnings("error::ResourceWarning"), pytest.mark.usefixtures("nothing_leaks")]


async def test_idle_connections_are_closed_without_waiting_for_another_request(server: FakeVLLM) -> None:
    connection = ServerConnection(server.base_url, limits=HttpLimits(keepalive_seconds=0.02))
    await asyncio.gather(*(generate(connection) for _ in range(5)))
    for seen in server.requests:
        await seen.disconnected.wait()
    await connection.close()


async def test_closing_inside_of_a_stream_or_cancelled_closes_idle_connections_too(
    server: FakeVLLM, connection: ServerConnection
) -> None:
    await asyncio.gather(*(generate(connection) for _ in range(3)))
    server.script[GENERATE] += [stream_pieces(b"data: 1\n\n", asyncio.Event())]

    async def close_inside() -> None:
        async with connection.stream(GENERATE, name="s", body=GENERATION) as events:
            async for _ in events:
                await connection.close()

    with pytest.raises((EngineClosedError, asyncio.CancelledError)):
        await close_inside()
    for seen in server.requests:
        await seen.disconnected.wait()


def requests_on_a_loop_of_their_own(connection: ServerConnection, count: int) -> list[int]:
    async def run() -> list[int]:
        replies = await asyncio.gather(*(generate(connection, name=f"r{number}") for number in range(count)))
        return [reply.status for reply in replies]

    return asyncio.run(run())


async def test_another_loop_is_refused_while_the_first_one_is_open(server: FakeVLLM) -> None:
    connection = ServerConnection(server.base_url)
    assert (await generate(connection)).status == 200
    for _ in range(2):
        with pytest.raises(EngineError, match="request r0: the engine belongs to another event loop"):
            await asyncio.to_thread(requests_on_a_loop_of_their_own, connection, 1)
    assert (await generate(connection)).status == 200
    with pytest.raises(EngineError, match="another event loop"):
        await asyncio.to_thread(asyncio.run, connection.close())
    assert (await generate(connection)).status == 200
    await connection.close()
    for seen in server.requests:
        await seen.disconnected.wait()


async def test_the_connections_of_a_loop_are_closed_when_the_loop_ends(server: FakeVLLM) -> None:
    connection = ServerConnection(server.base_url)
    for _ in range(3):
        await asyncio.to_thread(requests_on_a_loop_of_their_own, connection, 3)
    for seen in server.requests:
        await seen.disconnected.wait()


async def test_closing_after_a_loop_was_closed_with_a_request_that_ran_ends(server: FakeVLLM) -> None:
    connection = ServerConnection(server.base_url)
    server.script[GENERATE] = [hold(asyncio.Event())]

    def careless() -> None:
        loop = asyncio.new_event_loop()
        task = loop.create_task(generate(connection))
        while not server.requests:
            loop.run_until_complete(asyncio.sleep(0.01))
        loop.close()
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # it is never run again

    await asyncio.to_thread(careless)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # of the loop that nobody wound up
        await asyncio.wait_for(connection.close(), 30)
        gc.collect()


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_process_is_refused_and_leaves_the_connections_of_its_parent_alone(tmp_path: Path) -> None:
    script = tmp_path / "forking.py"
    script.write_text(
        """
import asyncio, os, sys
from fake_server import GENERATE, FakeVLLM
from rollouts.engines.http.connection import ServerConnection
from rollouts.errors import EngineError

async def in_child(connection):
    try:
        await connection.request("GET", "/version", name="child")
    except EngineError as error:
        assert "make an engine for each event loop, thread and process" in str(error)
        os._exit(3)

async def main():
    async with FakeVLLM() as server:
        connection = ServerConnection(server.base_url)
        await connection.request("GET", "/version", name="before")
        if (child := os.fork()) == 0:
            asyncio._set_running_loop(None)
            asyncio.run(in_child(connection))
            os._exit(0)
        _, status = await asyncio.to_thread(os.waitpid, child, 0)
        assert os.waitstatus_to_exitcode(status) == 3
        await connection.request("GET", "/version", name="after")
        assert [seen.connection for seen in server.requests] == [1, 1], server.requests
        await connection.close()

asyncio.run(main())
print("done")
"""
    )
    paths = os.pathsep.join([str(Path(fake_server.__file__).parent), *filter(None, sys.path)])
    result = subprocess.run(
        [sys.executable, str(script)],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.stdout == "done\n", result.stderr
