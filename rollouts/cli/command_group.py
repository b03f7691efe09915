"""The one place where the `rollouts` command turns an error into a line on stderr and an exit code.

Commands let errors pass, unless they have more to say about one. A traceback is a defect of ours.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from typing import Any, Final, NoReturn

from typer.core import TyperGroup

from renderers import RendererError
from rollouts.errors import RolloutsError
from rollouts.terminal.text import escape_unencodable_output, print_error
from transport import TransportError

FAILED: Final = 2
PIPE_CLOSED: Final = 1  # as `rich` and `click` have it; the reader of the pipe wanted no more, so nothing is said
INTERRUPTED: Final = 130

_FORESEEN: Final = (RendererError, RolloutsError, TransportError, OSError, MemoryError, RecursionError)


class CommandGroup(TyperGroup):
    """All commands. Each ends with an exit code, and with a line on stderr where that is 2."""

    def main(self, *args: Any, **options: Any) -> Any:
        if not options.get("standalone_mode", True):
            return super().main(*args, **options)
        if sys.stdout is None:  # closed by whoever started this process
            _say("standard output is closed; send it to a file, or to /dev/null")
            sys.exit(FAILED)
        _name_output()
        escape_unencodable_output()
        code: int | str | None
        try:
            super().main(*args, **options)
            code = 0
        except SystemExit as exiting:
            code = exiting.code
        except KeyboardInterrupt:
            code = INTERRUPTED
        except _FORESEEN as error:
            code = _explain(error)
        _leave(code)


def _explain(error: Exception) -> int:
    """Say what went wrong, and where; the exit code."""
    if isinstance(error, OSError):
        _drop_output()
        if error.errno == errno.EPIPE:
            return PIPE_CLOSED
        reason = error.strerror or str(error)
        words = f"{os.fsdecode(error.filename)}: {reason}" if error.filename else reason
    elif isinstance(error, MemoryError):
        words = "not enough memory"
    elif isinstance(error, RecursionError):
        words = "something in it is nested too deep"
    else:
        words = str(error)
    _say("; ".join([words, *getattr(error, "__notes__", ())]))
    return FAILED


class _NamedOutput(io.FileIO):
    """Standard output, whose errors say that they are about it."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            error.filename = "standard output"
            raise


def _name_output() -> None:
    """Put `_NamedOutput` behind `sys.stdout`, unless someone (a test, a notebook) has another stream there."""
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


def _leave(code: int | str | None) -> NoReturn:
    """Exit once everything is written; what cannot be written would otherwise be noticed by the interpreter alone."""
    try:
        sys.stdout.flush()
    except OSError as error:
        code = _explain(error)
    sys.exit(code)


def _drop_output() -> None:
    """Send what standard output could not take nowhere: the interpreter writes it once more when it exits."""
    try:
        sys.stdout.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _say(words: str) -> None:
    with contextlib.suppress(OSError):  # nobody can be told that stderr cannot be written to
        print_error(words)
