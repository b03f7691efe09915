"""`rollouts run CONFIG`: the episodes that a configuration file describes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollouts.terminal.text import print_error


def run(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A TOML file; docs/run.md describes its keys.")],
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in the output directory, where it stopped.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Check the file, print the first prompt, start no engine, write nothing."),
    ] = False,
    limit: Annotated[int | None, typer.Option(min=1, metavar="N", help="Only the first N tasks.")] = None,
) -> None:
    """Run the episodes of a configuration file; write trajectories, metrics and a summary to its output directory."""
    from rich.console import Console

    from rollouts.cli.run.dry_run import print_first_prompt
    from rollouts.cli.run.parts import make_parts
    from rollouts.run_config.config_file import read_config
    from rollouts.run_config.errors import RunConfigError

    try:
        parts = make_parts(read_config(config), offline=dry_run)
        if dry_run:
            print_first_prompt(parts, Console())
            return
        raise typer.Exit(2)
    except RunConfigError as error:
        for problem in error.problems:
            print_error(problem.text(error.path))
        raise typer.Exit(2) from None
