"""`rollouts env`: which packages that work with mmrollouts are installed, and which `renderers` a program imports."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from platform import python_version

import typer

import renderers
from rollouts.terminal.table import Column, print_table

_PACKAGES = ("mmrollouts", "renderers", "verifiers", "vllm", "torch", "transformers", "tokenizers", "numpy", "pillow")
#: The local part of the version of our distribution `renderers` (`packaging/renderers`).
_STAND_IN = "+mmrollouts"


def env() -> None:
    """Print the installed versions; exit with 1 if another distribution's `renderers` is installed beside ours."""
    versions = {name: installed_version(name) for name in _PACKAGES}
    rows = [
        ("python", python_version()),
        *((name, version or "not installed") for name, version in versions.items()),
    ]
    print_table([Column("package"), Column("version", min_width=20)], rows)
    installed = versions["renderers"]
    place = Path(renderers.__file__).parent
    if installed is None:
        typer.echo(
            f"`import renderers` gives mmrollouts ({place}). To install verifiers or prime-rl with it, see "
            "docs/migrating-from-renderers.md: they require a distribution named renderers."
        )
    elif _STAND_IN in installed:
        typer.echo(f"`import renderers` gives mmrollouts ({place}); the distribution renderers {installed} names it.")
    else:
        typer.echo(
            f"`import renderers` gives mmrollouts ({place}), and the distribution renderers {installed} of PyPI, whose "
            "files have the same place, is installed too: some files may be of either. Run `pip uninstall -y renderers "
            "mmrollouts`, then install mmrollouts and the distribution of packaging/renderers."
        )
        raise typer.Exit(1)


def installed_version(name: str) -> str | None:
    """The version of an installed distribution; None if it is not installed."""
    try:
        return distribution(name).version
    except PackageNotFoundError:
        return None
