"""The `rollouts` command: all its subcommands."""

from typing import Annotated

import typer

from rollouts.cli.command_group import APP_SETTINGS, Command, CommandGroup
from rollouts.cli.compare import compare
from rollouts.cli.demo import demo
from rollouts.cli.doctor.command import doctor
from rollouts.cli.doctor.installation import installed_version
from rollouts.cli.evaluate import evaluate
from rollouts.cli.init import init
from rollouts.cli.render.command import render
from rollouts.cli.report import report
from rollouts.cli.run.command import run
from rollouts.cli.serve import serve
from rollouts.cli.tinker import tinker
from rollouts.cli.train import train
from rollouts.cli.traj.commands import traj_commands
from rollouts.cli.view import view

app = typer.Typer(cls=CommandGroup, **APP_SETTINGS)
app.add_typer(traj_commands, name="traj", rich_help_panel="Look at episodes")
for title, functions in {
    "Begin": (demo, init, doctor),
    "Run": (run, train, evaluate, serve, tinker),
    "Look at episodes": (report, compare, view, render),
}.items():
    for function in functions:
        name = "eval" if function is evaluate else None
        app.command(name, cls=Command, rich_help_panel=title)(function)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mmrollouts {installed_version('mmrollouts') or '(not installed)'}")
        raise typer.Exit


@app.callback()
def commands(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Exact multi-turn, multimodal rollouts."""


def main() -> None:
    app()
