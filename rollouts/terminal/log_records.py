"""Log records on a terminal: what they quote of environments, servers and models does not act on it."""

from __future__ import annotations

import logging

from rollouts.terminal.text import printable, shortened


class PrintableFormatter(logging.Formatter):
    """Formats a record, traceback included, with control and invisible characters as visible symbols.

    A text longer than 20,000 characters is cut in its middle: the beginning has the message, the end the last line of
    the traceback.
    """

    def format(self, record: logging.LogRecord) -> str:
        return printable(shortened(super().format(record), 20_000))  # it may quote a whole response or message


def make_log_printable() -> None:
    """Use `PrintableFormatter` for records of a program that has set up no logging, which Python prints to stderr."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(PrintableFormatter())
