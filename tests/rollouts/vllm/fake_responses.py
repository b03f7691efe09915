"""Steps of `FakeVLLM`: delays, faults and edits that a real server cannot be made to produce."""

import asyncio
import json
from collections.abc import Callable

from fake_http import Connection, Json, Response, Seen
from fake_server import DONE, FakeVLLM, Step, first_of


def hold(until: asyncio.Event, arrived: asyncio.Event | None = None, *, tokens_before: int = 1) -> Step:
    """Answer as usual, but only after `until`; `arrived` is set when the request has come.

    A held generation that is aborted in the meantime (by id, or by a pause) answers at once, with finish reason abort
    and its first `tokens_before` tokens.
    """

    async def step(server: FakeVLLM, seen: Seen, connection: Connection) -> Response:
        if arrived is not None:
            arrived.set()
        await first_of(until, seen.aborted)
        if seen.aborted.is_set():
            return server.generated(seen, cut=tokens_before)
        return await server.respond(seen)

    return step


def change(edit: Callable[[Json], None]) -> Step:
    """The usual answer after `edit`, which changes the decoded JSON of it, or of each event of a stream."""

    def edited(text: bytes) -> bytes:
        content = json.loads(text)
        edit(content)
        return json.dumps(content).encode()

    def edited_event(chunk: bytes) -> bytes:
        return chunk if chunk == DONE else b"data: " + edited(chunk.removeprefix(b"data: ")) + b"\n\n"

    async def step(server: FakeVLLM, seen: Seen, connection: Connection) -> Response:
        response = await server.respond(seen)
        if response.chunks is None:
            response.body = edited(response.body)
        else:
            response.chunks = [edited_event(chunk) for chunk in response.chunks]
        return response

    return step


def reset() -> Step:
    """The connection is reset before anything was answered."""

    async def step(server: FakeVLLM, seen: Seen, connection: Connection) -> None:
        connection.reset()

    return step


def raw(data: bytes, *, close: bool = True) -> Step:
    """These bytes, HTTP or not."""

    async def step(server: FakeVLLM, seen: Seen, connection: Connection) -> None:
        connection.write(data)
        if close:
            connection.close()

    return step
