"""A scripted server in a thread of its own, for tests that run more than one event loop, as commands do."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar


class Served(Protocol):
    async def start(self) -> None: ...
    async def stop(self) -> None: ...


Server = TypeVar("Server", bound=Served)


@contextmanager
def served(server: Server) -> Iterator[Server]:
    """The server, running until the end of the block."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    asyncio.run_coroutine_threadsafe(server.start(), loop).result(10)
    yield server
    asyncio.run_coroutine_threadsafe(server.stop(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()
