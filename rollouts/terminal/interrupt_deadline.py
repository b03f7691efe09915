"""Ends a process within a bounded time after Ctrl-C or SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Coroutine
from typing import Any, Final, NoReturn, TypeVar

T = TypeVar("T")

INTERRUPTED: Final = 130
_SHOW_CURSOR: Final = "\x1b[?25h"


def run_with_deadline(main: Coroutine[Any, Any, T], seconds: float, message: str) -> T:
    """Run a coroutine as `asyncio.run` does. Called in the main thread.

    The first SIGINT or SIGTERM (of a scheduler or container) cancels it; when it has ended, `KeyboardInterrupt` is
    raised. A process that still runs `seconds` after the signal, or receives a second one, prints `message` to standard
    error and exits with code 130, whatever its threads and its event loop are doing: files must be readable at every
    moment.
    """

    def exit_now() -> None:
        # Not through `sys.stderr`, whose lock another thread may hold. A progress display has hidden the cursor.
        os.write(2, f"{_SHOW_CURSOR if os.isatty(2) else ''}{message}\n".encode(errors="replace"))
        os._exit(INTERRUPTED)

    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        tasks: list[asyncio.Task[Any]] = []
        interrupts: list[int] = []

        def interrupt(number: int, _: object) -> None:
            interrupts.append(number)
            if len(interrupts) > 1:
                exit_now()
            deadline = threading.Timer(seconds, exit_now)
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

        before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            return runner.run(run())
        except asyncio.CancelledError:
            if interrupts:
                raise KeyboardInterrupt from None
            raise
        finally:
            if not interrupts:
                for number, handler in before.items():
                    signal.signal(number, handler)


def exit_interrupted() -> NoReturn:
    """Exit with code 130, without the end of the interpreter, which takes seconds once torch is loaded."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(INTERRUPTED)
