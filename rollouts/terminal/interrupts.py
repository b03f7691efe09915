"""Defers Ctrl-C while code runs that must not be interrupted."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Coroutine, Iterator
from typing import Any, Final, NoReturn, TypeVar

from rollouts.terminal.table import printable, shortened


@contextlib.contextmanager
def defer_interrupts() -> Iterator[None]:
    """Handle a SIGINT that arrives in the block after it; in other threads than the main one, do nothing.

    Two things need it. A `KeyboardInterrupt` inside the import of a C++ extension module (torch, scipy) can abort the
    process. And a process whose start is interrupted waits for its first message without a parent that knows of it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    deferred: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, _: deferred.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if deferred and callable(handler):
            handler(signal.SIGINT, None)  # not the signal again, of which `run_with_deadline` has heard already


T = TypeVar("T")

INTERRUPTED: Final = 130
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
_SHOW_CURSOR: Final = "\x1b[?25h"


def run_with_deadline(main: Coroutine[Any, Any, T], seconds: float, message: str) -> T:
    """Run a coroutine as `asyncio.run` does. Called in the main thread.

    The first SIGINT or SIGTERM (of a scheduler or container) cancels it; when it has ended, `KeyboardInterrupt` is
    raised. A process that still runs `seconds` after the signal, or receives a second one, prints `message` to standard
    error and exits with code 130, whatever its threads and its event loop are doing: files must be readable at every
    moment.
    """
    interrupts: list[int] = []
    tasks: list[asyncio.Task[Any]] = []
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)

    def received(wait: float | None) -> int:
        """The next of the signals; 0 if there is none within `wait` seconds, or the pipe is closed."""
        end = None if wait is None else time.monotonic() + wait
        while select.select([read_end], [], [], None if end is None else max(0.0, end - time.monotonic()))[0]:
            number = int.from_bytes(os.read(read_end, 1))
            if number in (0, *_SIGNALS):  # programs may handle others
                return number
        return 0

    def watch() -> None:
        # In a thread, because Python calls the handlers of signals in the main one, which may be in a call that no
        # signal ends; it is told by the wakeup descriptor, which is written where the signal arrives.
        if not (number := received(None)):
            os.close(read_end)
            return
        interrupts.append(number)
        for task in tasks:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the task has ended
                loop.call_soon_threadsafe(task.cancel)
        received(seconds)
        # Not through `sys.stderr`, whose lock another thread may hold. A progress display has hidden the cursor.
        os.write(2, f"{_SHOW_CURSOR if os.isatty(2) else ''}{message}\n".encode(errors="replace"))
        os._exit(INTERRUPTED)

    async def run() -> T:
        task = asyncio.current_task()
        assert task is not None
        tasks.append(task)
        if interrupts:
            main.close()
            raise asyncio.CancelledError
        return await main

    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        threading.Thread(target=watch, daemon=True).start()
        before = {number: signal.signal(number, lambda *_: None) for number in _SIGNALS}
        descriptor = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        try:
            return runner.run(run())
        except asyncio.CancelledError:
            if interrupts:
                raise KeyboardInterrupt from None
            raise
        finally:
            if not interrupts:
                signal.set_wakeup_fd(descriptor)
                for number, handler in before.items():
                    signal.signal(number, handler)
                os.close(write_end)


def exit_interrupted() -> NoReturn:
    """Exit with code 130, without the end of the interpreter, which takes seconds once torch is loaded."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(INTERRUPTED)


# Log records on a terminal: what they quote of environments, servers and models does not act on it.


#: Characters of a record; an error may quote a whole response or message.
_MOST_CHARACTERS = 20_000


class PrintableFormatter(logging.Formatter):
    """Formats a record, traceback included, with control and invisible characters as visible symbols.

    A text longer than 20,000 characters is cut in its middle: the beginning has the message, the end the last line of
    the traceback.
    """

    def format(self, record: logging.LogRecord) -> str:
        return printable(shortened(super().format(record), _MOST_CHARACTERS))


def make_log_printable() -> None:
    """Use `PrintableFormatter` for records of a program that has set up no logging, which Python prints to stderr."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(PrintableFormatter())
