"""Servers that sleep while a training step runs on their device."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from rollouts.errors import ServerUnreachableError


class SleepingServers:
    """Puts servers to sleep for training steps, and wakes them up for requests. `call` makes a control call.

    Steps and requests begin in the order of their arrival: a request waits for the steps before it, a step
    for the requests. Servers stay asleep after a step until the next request, because the next step often
    follows at once. Before the first call it is not known whether they sleep: a program that was killed may
    have left them so.
    """

    def __init__(self, call: Callable[[str], Awaitable[None]]) -> None:
        self._call = call
        self._changed = asyncio.Condition()
        self._turns = itertools.count()
        self._requests: set[int] = set()  # the turns of those that wait or run
        self._steps: set[int] = set()
        self._is_asleep: bool | None = None

    @asynccontextmanager
    async def awake(self) -> AsyncIterator[None]:
        """A request runs inside the block."""
        async with self._turn(self._requests, self._steps, self._wake_up):
            yield

    @asynccontextmanager
    async def asleep(self) -> AsyncIterator[None]:
        """A step runs inside the block."""
        async with self._turn(self._steps, self._requests, self._fall_asleep):
            yield

    @asynccontextmanager
    async def _turn(
        self, own: set[int], others: set[int], prepare: Callable[[], Awaitable[None]]
    ) -> AsyncIterator[None]:
        turn = next(self._turns)
        own.add(turn)
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: min(others, default=turn) >= turn)
                await prepare()
            yield
        finally:
            own.remove(turn)
            async with self._changed:
                self._changed.notify_all()

    async def end(self) -> None:
        """Leave the servers awake."""
        async with self._changed:
            if self._is_asleep:
                await self._wake_up()

    async def _fall_asleep(self) -> None:
        if self._is_asleep:
            return
        try:
            if self._is_asleep is None:
                await self._wake_up()
            await self._call("sleep")
        except ServerUnreachableError:  # a server that does not run has no memory
            return
        self._is_asleep = True

    async def _wake_up(self) -> None:
        if self._is_asleep is not False:
            await self._call("wake_up")
            self._is_asleep = False
