"""Runs a function again and again on a thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

log = logging.getLogger("rollouts.observability")


class PeriodicThread:
    """Calls `function` every `seconds` on a thread of its own, from `start` to `stop`.

    A thread runs also while something blocks the event loop. After an exception the function is called again; it is
    logged, unless the call before it failed too.
    """

    def __init__(self, function: Callable[[], object], seconds: float, name: str) -> None:
        self._function = function
        self._seconds = seconds
        self._name = name
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin. Has no effect on a thread that runs."""
        if self._thread is None:
            self._stopped.clear()
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End, after the call that is running. Has no effect on a thread that does not run."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._stopped.set()
            thread.join()

    def _run(self) -> None:
        failed = False
        while not self._stopped.wait(self._seconds):
            try:
                self._function()
                failed = False
            except Exception:
                if not failed:
                    log.exception("%s failed", self._name)
                failed = True
