"""Runs a command and ends it, with all of its processes, when standard input ends.

    python supervisor.py SECONDS COMMAND ARGUMENT...

The process that started this one holds the other end of standard input. The pipe is closed when that process
ends, also if it is killed, so that no server outlives the program that it serves. The command gets SECONDS to
end by itself before it is killed. On Linux the command gets SIGTERM if this process is killed, too; then its
own processes end only if it ends them. This file is run as a script and imports the standard library only.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence

_PR_SET_PDEATHSIG = 1


def main(seconds: float, command: Sequence[str]) -> int:
    child = subprocess.Popen(  # noqa: S603  the user's own
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=_end_with_parent(),
    )

    signal.signal(signal.SIGTERM, lambda number, frame: _signal_group(child, signal.SIGTERM))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_input, args=(child, seconds), daemon=True).start()
    code = child.wait()
    _signal_group(child, signal.SIGKILL)  # what the command has left behind
    return code if code >= 0 else 128 - code


def _end_with_parent() -> Callable[[], None] | None:
    """What a child process calls so that it gets SIGTERM when this process ends; None except on Linux."""
    if sys.platform != "linux":
        return None
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it has ended before the call
            os.kill(os.getpid(), signal.SIGTERM)

    return ask


def _end_with_input(child: subprocess.Popen[bytes], seconds: float) -> None:
    while os.read(0, 4096):
        pass
    _signal_group(child, signal.SIGTERM)
    try:
        child.wait(seconds)
    except subprocess.TimeoutExpired:
        _signal_group(child, signal.SIGKILL)


def _signal_group(child: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, number)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
