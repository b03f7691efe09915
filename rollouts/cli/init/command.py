"""`rollouts init DIR`: a small project that runs at once."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from rollouts.cli.init.project import Model, Template, next_commands, project_files, write_project
from rollouts.terminal.text import exit_with_error, print_line


def init(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The directory of the project; new, or any other.")],
    template: Annotated[
        Template,
        typer.Option(
            help="images: several turns, each with an image; scoring: one turn and functions that score it; tools: a "
            "tool that returns an image."
        ),
    ] = Template.IMAGES,
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Your model's directory, or with --base-url also its repository."),
    ] = None,
    base_url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="The vLLM server that serves --model."),
    ] = None,
) -> None:
    """Write a project: an environment with images, its test, tasks, and the configuration of a run.

    Without --model, it has a program that writes a tiny model with random weights, and needs no GPU and no download.
    No file is replaced.
    """
    if base_url is not None and model is None:
        exit_with_error("--base-url needs --model, the directory or repository of the model that the server serves")
    own = None if model is None else Model(model, base_url)
    files = project_files(directory.resolve().name or "project", template, own)
    write_project(directory, files)
    print_line(f"in {directory}: {', '.join(sorted(files))}")
    print_line("next:")
    commands = next_commands(has_tiny_model=own is None)
    lines = [] if directory.resolve() == Path.cwd() else [(f"cd {shlex.quote(str(directory))}", "")]
    width = max(len(command) for command, _ in (*lines, *commands))
    for command, meaning in (*lines, *commands):
        print_line(f"  {command:<{width}}  # {meaning}" if meaning else f"  {command}")
