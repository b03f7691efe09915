"""Turns an error of any command into a line on stderr and an exit code.

Commands let errors pass, unless they add information to one. A traceback is a defect of mmrollouts.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Any, Final

from typer.core import TyperGroup

from renderers import RendererError
from rollouts.errors import RolloutsError
from rollouts.terminal.text import print_error
from transport import TransportError

FAILED: Final = 2
PIPE_CLOSED: Final = 1  # as in `rich` and `click`; the reader of the pipe closed it, which needs no message
INTERRUPTED: Final = 130

_EXPECTED_ERRORS: Final = (RendererError, RolloutsError, TransportError, OSError, MemoryError, RecursionError)


class CommandGroup(TyperGroup):
    """All commands. Each ends with an exit code, and with a line on stderr where that is 2."""

    def main(self, *args: Any, **options: Any) -> Any:
        if not options.get("standalone_mode", True):
            return super().main(*args, **options)
        if sys.stdout is None:  # closed by the parent process
            print_error("standard output is closed; send it to a file, or to /dev/null")
            sys.exit(FAILED)
        _install_named_output()
        if isinstance(sys.stdout, io.TextIOWrapper):  # characters that its encoding lacks are written as escapes
            sys.stdout.reconfigure(errors="backslashreplace")
        code: int | str | None
        try:
            super().main(*args, **options)
            code = 0
        except SystemExit as exiting:
            code = exiting.code
        except KeyboardInterrupt:
            code = INTERRUPTED
        except _EXPECTED_ERRORS as error:
            code = _report(error)
        try:
            sys.stdout.flush()
        except OSError as error:
            code = _report(error)
        sys.exit(code)


def _report(error: Exception) -> int:
    """Print what went wrong and where; returns the exit code."""
    if isinstance(error, OSError):
        _discard_output()
        if error.errno == errno.EPIPE:
            return PIPE_CLOSED
        reason = error.strerror or str(error)
        message = f"{os.fsdecode(error.filename)}: {reason}" if error.filename else reason
    elif isinstance(error, MemoryError):
        message = "not enough memory"
    elif isinstance(error, RecursionError):
        message = "a value in the file is nested too deep"
    else:
        message = str(error)
    print_error("; ".join([message, *getattr(error, "__notes__", ())]))
    return FAILED


class _NamedOutput(io.FileIO):
    """Standard output; its errors carry its name as their file name."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            error.filename = "standard output"
            raise


def _install_named_output() -> None:
    """Let `sys.stdout` write through `_NamedOutput`, unless it is another stream (in a test or a notebook)."""
    stream = sys.stdout
    if stream is sys.__stdout__ and isinstance(stream, io.TextIOWrapper):
        stream.flush()
        sys.stdout = io.TextIOWrapper(
            io.BufferedWriter(_NamedOutput(stream.fileno(), "w", closefd=False)),
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )


def _discard_output() -> None:
    """Redirect buffered output that cannot be written to the null device: the interpreter writes it again at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        null_device = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null_device, sys.stdout.fileno())
        os.close(null_device)
