"""Log records on a terminal: what they quote of environments, servers and models does not act on it."""

from __future__ import annotations

import logging

from rollouts.terminal.text import printable

#: Characters of a record; an error may quote a whole response or message.
_MOST_CHARACTERS = 20_000


class PrintableFormatter(logging.Formatter):
    """Formats a record, traceback included, with control and invisible characters as visible symbols.

    A text longer than 20,000 characters is cut in its middle: the beginning has the message, the end the last line of
    the traceback.
    """

    def format(self, record: logging.LogRecord) -> str:
        return printable(_shortened(super().format(record)))


def make_log_printable() -> None:
    """Use `PrintableFormatter` for records of a program that has set up no logging, which Python prints to stderr."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(PrintableFormatter())


def _shortened(text: str) -> str:
    if len(text) <= _MOST_CHARACTERS:
        return text
    half = _MOST_CHARACTERS // 2
    return f"{text[:half]} [{len(text) - 2 * half:,} characters left out] {text[-half:]}"
