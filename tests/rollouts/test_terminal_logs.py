"""Log records that a command prints on a terminal."""

import logging
import subprocess
import sys

import pytest

from rollouts.terminal.text import PrintableFormatter

#: As a command runs: without any logging that is set up.
PROGRAM = """
import logging, sys
import typer
from rollouts.cli.command_group import APP_SETTINGS, Command, CommandGroup

app = typer.Typer(cls=CommandGroup, **APP_SETTINGS)

@app.callback()
def commands() -> None: ...

@app.command(cls=Command)
def fail() -> None:
    try:
        raise ValueError("\x1b]0;title\x07 \u202eevil")
    except ValueError:
        logging.getLogger("rollouts.runner").warning("failed: %s", "\x1b[2J\x1b[31m", exc_info=True)

app(["fail"])
"""


@pytest.mark.slow
def test_a_log_record_of_a_command_sends_no_control_character_to_the_terminal() -> None:
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=True)
    assert "failed: ␛[2J␛[31m\nTraceback" in result.stderr
    assert "ValueError: ␛]0;title␇ <U+202E>evil" in result.stderr
    assert not {"\x1b", "\x07", "\u202e"} & set(result.stderr)


@pytest.mark.parametrize("length", [19_999, 20_000, 20_001, 1_000_000])
def test_a_long_record_keeps_its_beginning_and_its_end(length: int) -> None:
    record = logging.LogRecord("name", logging.WARNING, __file__, 1, "begin" + "W" * (length - 8) + "end", None, None)
    text = PrintableFormatter().format(record)
    assert text.startswith("beginW")
    assert text.endswith("Wend")
    assert len(text) <= 20_100
    assert ("characters left out" in text) is (length > 20_000)
