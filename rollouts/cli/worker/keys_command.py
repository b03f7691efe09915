"""`rollouts keys DIRECTORY`: the keys with which workers and their orchestrator know each other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollouts.terminal.text import print_line


def keys(
    directory: Annotated[Path, typer.Argument(metavar="DIRECTORY", help="Where the two files are written.")],
) -> None:
    """Make keys for `rollouts run --workers` and `rollouts worker`: a file for the run, and one for its workers."""
    from rollouts.workers.link.key_files import write_key_files

    orchestrator, worker = write_key_files(directory)
    print_line(f'{orchestrator}: for the run; key_file = "..." in the table [workers]')
    print_line(f"{worker}: for each machine with workers; rollouts worker --key-file")
