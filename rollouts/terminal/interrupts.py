"""SIGINT and other signals: deferred where code must not be interrupted, and the end of a run in a bounded time."""

import asyncio
import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any, Final, NoReturn, TypeVar


@contextlib.contextmanager
def defer_interrupts() -> Iterator[None]:
    """Handle a SIGINT that arrives in the block after it; in other threads than the main one, do nothing.

    Two things need it. A `KeyboardInterrupt` inside the import of a C++ extension module (torch, scipy) can
    abort the process. And a process whose start is interrupted waits for its first message without a parent
    that knows of it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    deferred = threading.Event()
    handler = signal.signal(signal.SIGINT, lambda *_: deferred.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if deferred.is_set() and callable(handler):
            handler(signal.SIGINT, None)  # not the signal again, of which `run_with_deadline` has heard already


T = TypeVar("T")

INTERRUPTED: Final = 130
_STOPS: Final = (signal.SIGINT, signal.SIGTERM)


def run_with_deadline(main: Coroutine[Any, Any, T], seconds: float, message: str) -> T:
    """Run a coroutine as `asyncio.run` does. Called in the main thread.

    The first SIGINT, SIGTERM (of a scheduler or container) or SIGHUP (of a terminal that is closed; not after
    `nohup`) cancels it; when it has ended, `KeyboardInterrupt` is raised. A process that still runs `seconds`
    after the signal, or receives a second SIGINT or SIGTERM, prints `message` to standard error and exits
    with code 130, whatever its threads and its event loop are doing: files must be readable at every moment.
    """
    signals = [*_STOPS]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signals.append(signal.SIGHUP)
    interrupted = threading.Event()
    tasks: list[asyncio.Task[Any]] = []
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)

    def received(wait: float | None, numbers: Sequence[int]) -> bool:
        """Whether one of these signals arrives within `wait` seconds, and before the pipe is closed."""
        end = None if wait is None else time.monotonic() + wait
        while select.select([read_end], [], [], None if end is None else max(0.0, end - time.monotonic()))[0]:
            number = int.from_bytes(os.read(read_end, 1))  # 0 where the pipe is closed
            if number in (0, *numbers):  # programs may handle others
                return number != 0
        return False

    def watch() -> None:
        # In a thread, because Python calls the handlers of signals in the main one, which may be in a call that no
        # signal ends; it is told by the wakeup descriptor, which is written where the signal arrives.
        if not received(None, signals):
            os.close(read_end)
            return
        interrupted.set()
        for task in tasks:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the task has ended
                loop.call_soon_threadsafe(task.cancel)
        received(seconds, _STOPS)  # a terminal that is closed may send several
        # Not through `sys.stderr`, whose lock another thread may hold. A progress display has hidden the cursor.
        show_cursor = "\x1b[?25h" if os.isatty(2) else ""
        os.write(2, f"{show_cursor}{message}\n".encode(errors="replace"))
        os._exit(INTERRUPTED)

    async def run() -> T:
        task = asyncio.current_task()
        assert task is not None
        tasks.append(task)
        if interrupted.is_set():
            main.close()
            raise asyncio.CancelledError
        return await main

    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        threading.Thread(target=watch, daemon=True).start()
        before = {number: signal.signal(number, lambda *_: None) for number in signals}
        descriptor = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        try:
            return runner.run(run())
        except asyncio.CancelledError:
            if interrupted.is_set():
                raise KeyboardInterrupt from None
            raise
        finally:
            if not interrupted.is_set():
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
