"""Calls of functions on threads and at the same time, and objects that `async with` closes, or starts and closes."""

import asyncio
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Self, TypeVar

from renderers.process.threads import DaemonThreads

T = TypeVar("T")

#: A piece of a body takes about 10 microseconds, however small it is.
_PIECES, _PIECE_BYTES = 4096, 64


async def call_on_thread(
    function: Callable[..., Any], *arguments: Any, on_begin: Callable[[float], object] | None = None
) -> Any:
    """Call a function that may block on a thread, with the context variables of the caller.

    Up to 256 calls run at the same time; others wait. A cancelled call runs to its end without counting, so that calls
    that hang do not stop others, and it does not keep the process alive. One that is cancelled while it waits never
    runs. `on_begin` is called on the event loop with the loop's time at which a thread began the function, perhaps
    after the call was cancelled.
    """
    if on_begin is not None:
        function = _announced(function, on_begin)
    return await _threads().run(result_of, function, *arguments)


def _announced(function: Callable[..., Any], on_begin: Callable[[float], object]) -> Callable[..., Any]:
    loop = asyncio.get_running_loop()

    def announce_and_call(*arguments: Any) -> Any:
        loop.call_soon_threadsafe(on_begin, loop.time())
        return function(*arguments)

    return announce_and_call


def result_of(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a thread. A future cannot hold a StopIteration: the coroutine would wait forever."""
    try:
        return function(*arguments)
    except StopIteration as error:
        raise RuntimeError("the function raised StopIteration") from error


async def parse_body(nbytes: int, parse: Callable[..., T], *arguments: Any) -> T:
    """Call a function that parses a body of `nbytes` bytes, on a thread if it is larger than 256 KiB."""
    # Parsing a larger body would delay the other requests of an event loop.
    return await asyncio.to_thread(parse, *arguments) if nbytes > 256 * 2**10 else parse(*arguments)


def in_tiny_pieces(pieces: int, nbytes: int) -> bool:
    """Whether a body arrives in so many pieces of so few bytes that reading them would hold the event loop: more than
    4,096 of less than 64 bytes on average."""
    return pieces > _PIECES and nbytes < _PIECE_BYTES * pieces


@functools.cache
def _threads() -> DaemonThreads:
    # Such functions mostly wait for something outside of the process, so that their number may exceed that of the
    # cores.
    return DaemonThreads(256, "blocking-call")


async def gathered(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of calls that run at the same time, in their order. The first error cancels the others.

    A single call runs in the task of its caller: an event loop ends with the `SystemExit` of any other task.
    """
    calls = list(calls)
    if len(calls) == 1:
        return [await calls[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except BaseExceptionGroup as raised:
        raise raised.exceptions[0] from raised.exceptions[0].__cause__
    return [task.result() for task in tasks]


class ClosedAtEnd(ABC):
    """`async with` calls `close` at the end of the block."""

    @abstractmethod
    async def close(self) -> None:
        """Refuse further calls and release what the object holds."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()


class StartAndClose(ClosedAtEnd):
    """`async with` calls `start`, and `close` at the end of the block and after a start that failed."""

    @abstractmethod
    async def start(self) -> None:
        """Start; returns when the object can be used."""

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self
