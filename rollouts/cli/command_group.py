"""The classes of all commands: an error becomes a line on stderr and an exit code, and help is plain text.

Commands let errors pass, unless they add information to one. A traceback is a defect of mmrollouts.
"""

import errno
import io
import os
import sys
from collections.abc import Mapping
from typing import Any, Final

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup

from renderers import RendererError
from rollouts.errors import RolloutsError, text_with_notes
from rollouts.terminal.text import make_log_printable, print_error
from transport import TransportError

FAILED: Final = 2
PIPE_CLOSED: Final = 1  # as in `rich` and `click`; the reader of the pipe closed it, which needs no message
INTERRUPTED: Final = 130

_ANY_LENGTH: Final = 1000
_EXPECTED_ERRORS: Final = (RendererError, RolloutsError, TransportError, OSError, MemoryError, RecursionError)


# Of every `typer.Typer` here. Without rich's tables, names of options are never cut, however narrow the terminal.
APP_SETTINGS: Final[Mapping[str, Any]] = {
    "no_args_is_help": True,
    "pretty_exceptions_show_locals": False,
    "rich_markup_mode": None,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}


class Command(TyperCommand):
    """A command, whose help shows `FILE` for typer's `{FILE}`, and in a list its whole first sentence."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        for parameter in self.params:
            if isinstance(parameter, TyperArgument):
                setattr(parameter, "display_type_rich", lambda ctx: "")  # noqa: B010

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [piece.replace("{", "").replace("}", "") for piece in super().collect_usage_pieces(ctx)]

    def get_short_help_str(self, limit: int = 0) -> str:
        return super().get_short_help_str(_ANY_LENGTH)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            error.message = error.message.removeprefix("Value error, ")  # pydantic's, which typer passes on
            raise


class CommandGroup(TyperGroup):
    """Commands that end with an exit code, 2 with a line on stderr; help lists them by `rich_help_panel`."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command: Any = self.get_command(ctx, name)
            sections.setdefault(command.rich_help_panel or "Commands", []).append((name, command.get_short_help_str()))
        for title, rows in sections.items():
            with formatter.section(title):
                formatter.write_dl(rows)

    def get_short_help_str(self, limit: int = 0) -> str:
        return super().get_short_help_str(_ANY_LENGTH)

    def main(self, *args: Any, **options: Any) -> Any:
        if not options.get("standalone_mode", True):
            return super().main(*args, **options)
        if sys.stdout is None:  # closed by the parent process
            print_error("standard output is closed; send it to a file, or to /dev/null")
            sys.exit(FAILED)
        _install_named_output()
        make_log_printable()
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
        if isinstance(error, IsADirectoryError):
            reason = f"{reason}; name a file"
        elif isinstance(error, FileExistsError):
            reason = f"{reason}; name another path"
        name = error.filename2 or error.filename  # of a file that was renamed, its new name
        message = f"{os.fsdecode(name)}: {reason}" if name else reason
    elif isinstance(error, MemoryError):
        message = "not enough memory"
    elif isinstance(error, RecursionError):
        message = "a value in the file is nested too deep"
    else:
        message = str(error)
    print_error(text_with_notes(error, message))
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
