"""The `rollouts` command: all its subcommands."""

from __future__ import annotations

import typer

from rollouts.cli.command_group import CommandGroup
from rollouts.cli.demo_command import demo
from rollouts.cli.doctor.command import doctor
from rollouts.cli.env_command import env
from rollouts.cli.media.commands import media_commands
from rollouts.cli.render.command import render
from rollouts.cli.traj.commands import traj_commands

app = typer.Typer(cls=CommandGroup, no_args_is_help=True, add_completion=False, pretty_exceptions_show_locals=False)
app.add_typer(media_commands, name="media")
app.add_typer(traj_commands, name="traj")
app.command()(doctor)
app.command()(demo)
app.command()(env)
app.command()(render)


@app.callback()
def commands() -> None:
    """Exact multi-turn, multimodal rollouts."""


def main() -> None:
    app()
