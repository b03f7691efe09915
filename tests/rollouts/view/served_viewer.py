"""`rollouts view --serve` as a process of its own."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PROGRAM = "from rollouts.cli.main import main; main()"


@contextmanager
def served(file: Path, *options: object) -> Iterator[str]:
    """The address of the page. At the end the command is interrupted, and must exit with 0."""
    command = [sys.executable, "-c", _PROGRAM, "view", str(file), "--serve", *map(str, options)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        line = process.stdout.readline()
        found = re.search(r"http://\S+/", line)
        try:
            assert found is not None, line + process.stderr.read()
            yield found[0]
        finally:
            process.send_signal(signal.SIGINT)
            errors = process.stderr.read()
        assert process.wait(timeout=30) == 0, errors
        assert errors == ""
