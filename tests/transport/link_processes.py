"""Worker processes of the link tests."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import transport

WORKER = Path(__file__).with_name("link_worker.py")
TREE = str(Path(transport.__file__).parents[1])
PATIENCE = 120  # seconds that a loaded machine may take for anything; nothing is measured by it


class Process:
    """A worker process; killed at the end of the block whatever happens."""

    def __init__(self, *arguments: object) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(WORKER), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": TREE},  # the code under test, and not another that is installed
        )
        self.pid = self._process.pid

    def line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def ask(self) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self.line()

    def ended(self, timeout: float) -> int:
        return self._process.wait(timeout)

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)
        self.kill()


def until(condition: Callable[[], Any], *needed: Process) -> None:
    """Wait for something that the needed processes make true."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert all(process.running for process in needed), "a process that should bring it about has ended"
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)
