"""The reference of the `rollouts` command, made of its help by typer's own generator (`typer ... utils docs`)."""

import typer
from typer.cli import get_docs_for_click

from rollouts.cli.main import app

PAGE = "reference/commands.md"
_NAME = "rollouts"


def command_page() -> str:
    """The page in Markdown: a section for each command, with its arguments and options."""
    command = typer.main.get_command(app)
    context = typer.Context(command, info_name=_NAME, **command.context_settings)
    text = get_docs_for_click(obj=command, ctx=context, name=_NAME)
    return text.replace(f"# `{_NAME}`", "# The command `rollouts`", 1)
