"""Lines of text for standard output and standard error.

The text may quote a file or a server: it is never read as markup, and control characters never reach the
terminal.
"""

import contextlib
import json
import logging
import sys
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.text import Text


def printable(text: str) -> str:
    """`text` with each control character and each invisible character, except the line feed, as a visible symbol."""
    return text if text.isprintable() else "".join(map(_printable_character, text))


def printable_line(text: str) -> str:
    """`text` on one line, with visible symbols for what is invisible; a line feed becomes `⏎`."""
    return printable(text).replace("\n", "⏎")


def shortened(text: str, most: int) -> str:
    """`text`, or of a text with more than `most` characters its beginning and its end, and how many are left out."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} [{len(text) - 2 * half:,} characters left out] {text[-half:]}"


def counted(count: int, noun: str, plural: str = "") -> str:
    """A number and its noun: "1 token", "1,200 tokens"."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def print_line(text: str) -> None:
    """Print to standard output, without wrapping, at once: another program may wait for the line."""
    Console().print(Text(printable(text)), soft_wrap=True)


def print_json(value: Any) -> None:
    """Print a value as one line of JSON, of ASCII characters alone, to standard output."""
    sys.stdout.write(json.dumps(value) + "\n")


def print_error(message: str) -> None:
    """Print one line to standard error; an error in that is ignored, because there is nowhere to report it."""
    _print_on_stderr(f"error: {message}")


def print_note(message: str) -> None:
    """Print one line that is no error to standard error."""
    _print_on_stderr(f"note: {message}")


def print_warning(message: str) -> None:
    """Print one line to standard error about what went wrong and did not end the command."""
    _print_on_stderr(f"warning: {message}")


def _print_on_stderr(message: str) -> None:
    with contextlib.suppress(OSError):
        Console(stderr=True).print(Text(printable_line(message)), soft_wrap=True)


def exit_with_error(message: str) -> NoReturn:
    """Print one line to standard error and exit with code 2."""
    print_error(message)
    raise typer.Exit(2) from None


def _printable_character(character: str) -> str:
    if character.isprintable() or character == "\n":
        return character
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)  # the Unicode symbols for control characters
    return "␡" if code == 0x7F else f"<U+{code:04X}>"


class PrintableFormatter(logging.Formatter):
    """Formats a record, traceback included, with control and invisible characters as visible symbols.

    A text longer than 20,000 characters is cut in its middle: the beginning has the message, the end the last
    line of the traceback.
    """

    def format(self, record: logging.LogRecord) -> str:
        return printable(shortened(super().format(record), 20_000))  # it may quote a whole response or message


def make_log_printable() -> None:
    """Use `PrintableFormatter` for records of a program that has set up no logging, which Python prints to stderr."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(PrintableFormatter())
