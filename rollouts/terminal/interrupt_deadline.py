"""Ends a process within a bounded time after Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

T = TypeVar("T")

INTERRUPTED: Final = 130


def run_with_deadline(main: Coroutine[Any, Any, T], seconds: float) -> T:
    """Run a coroutine as `asyncio.run` does. Called in the main thread.

    The first SIGINT cancels it; it raises `KeyboardInterrupt` when it has ended. A process that is still there
    `seconds` after it exits with code 130, whatever its threads and its event loop are doing, and so does one that
    receives a second SIGINT. Files that must be complete at every moment have to be written with one call each.
    """
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        tasks: list[asyncio.Task[T]] = []
        interrupts: list[int] = []

        def interrupt(number: int, _: object) -> None:
            interrupts.append(number)
            if len(interrupts) > 1:
                os._exit(INTERRUPTED)
            deadline = threading.Timer(seconds, os._exit, (INTERRUPTED,))
            deadline.daemon = True
            deadline.start()
            for task in tasks:
                loop.call_soon_threadsafe(task.cancel)

        async def run() -> T:
            task = asyncio.current_task()
            assert task is not None
            tasks.append(task)
            if interrupts:
                main.close()
                raise asyncio.CancelledError
            return await main

        before = signal.signal(signal.SIGINT, interrupt)
        try:
            return runner.run(run())
        except asyncio.CancelledError:
            if interrupts:
                raise KeyboardInterrupt from None
            raise
        finally:
            if not interrupts:
                signal.signal(signal.SIGINT, before)
