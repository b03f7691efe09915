"""Defers Ctrl-C while code runs that must not be interrupted."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def defer_interrupts() -> Iterator[None]:
    """Raise a SIGINT that arrives in the block again after it; in other threads than the main one, do nothing.

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
        if deferred:
            signal.raise_signal(signal.SIGINT)
