"""`rollouts media ls|verify|export`: the media of a media store or of a trajectory file."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from rollouts.cli.command_group import APP_SETTINGS, Command, CommandGroup
from rollouts.cli.errors import CommandFileError, ExportError
from rollouts.cli.media.inventory import Inventory, open_inventory
from rollouts.replaced_file import replaced_file
from rollouts.terminal.text import exit_with_error, print_error, print_line

media_commands = typer.Typer(cls=CommandGroup, **APP_SETTINGS)

Target = Annotated[
    Path,
    typer.Argument(metavar="STORE", help="A trajectory file (.mmr), or the directory of a media store, run or demo."),
]


@media_commands.callback()
def commands() -> None:
    """List, verify and export the media of a store or of a trajectory file."""


@media_commands.command(cls=Command)
def ls(
    target: Target,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with whole digests.")] = False,
) -> None:
    """List each distinct medium: digest, type, size, bytes, and for trajectories its uses and its episodes.

    Exits with 1 if something could not be read and was left out.
    """
    from rollouts.cli.media.listing import media_as_json, print_media

    with open_inventory(target) as inventory:
        if as_json:
            sys.stdout.write(json.dumps(media_as_json(inventory)) + "\n")
        elif inventory.media:
            print_media(inventory)
        else:
            print_line(f"{target} holds no media")
    for problem in inventory.problems:
        print_error(f"not listed: {problem}")
    if inventory.problems:
        raise typer.Exit(1)


@media_commands.command(cls=Command)
def verify(target: Target) -> None:
    """Compare every medium with its digest and decode it. Exits with 1 and names the failures, if there are any."""
    from rollouts.cli.media.verification import find_problem

    with open_inventory(target) as inventory:
        failed = len(inventory.problems)
        for unreadable in inventory.problems:
            print_line(unreadable)
        for medium in inventory.media:
            if (problem := find_problem(medium)) is not None:
                failed += problem.fatal
                print_line(f"{medium.digest}: {problem.reason}")
    if failed:
        print_line(f"{failed} failed, {len(inventory.media)} media checked")
        raise typer.Exit(1)
    print_line(f"{len(inventory.media)} media match their digests and decode")


@media_commands.command(cls=Command)
def export(
    target: Target,
    out: Annotated[
        Path, typer.Option(metavar="DIRECTORY", help="The directory for the files; made if it does not exist.")
    ],
    contact_sheet: Annotated[
        Path | None, typer.Option(metavar="PNG", help="Also draw all media, at most 400, into this image.")
    ] = None,
) -> None:
    """Write each medium once to a file of its own; pixels that were never in a file become a PNG of the same pixels."""
    from rollouts.cli.media.export import export_medium

    with open_inventory(target) as inventory:
        is_new = not out.exists()
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            exit_with_error(f"{out} cannot be created: {error.strerror or error}")
        for problem in inventory.problems:
            print_error(f"not exported: {problem}")
        written = 0
        for medium in inventory.media:
            try:
                export_medium(medium, out)
                written += 1
            except ExportError as error:
                print_error(str(error))
            except CommandFileError as error:
                print_error(f"{medium.digest}: not exported: {error}")
            except OSError as error:
                print_error(f"{medium.digest}: not exported: {error.filename or out}: {error.strerror or error}")
        if is_new and not written:
            out.rmdir()
        print_line(f"{written} media in {out}")
        if contact_sheet is not None:
            _draw_contact_sheet(inventory, contact_sheet, str(target))
        if inventory.problems or written < len(inventory.media):
            raise typer.Exit(1)


def _draw_contact_sheet(inventory: Inventory, path: Path, title: str) -> None:
    from rollouts.cli.media.contact_sheet import contact_sheet

    png = io.BytesIO()
    contact_sheet(inventory, title).save(png, "PNG")
    try:
        if path.exists() and not path.is_file():
            exit_with_error(f"{path} cannot be written: it exists and is not a file")
        with replaced_file(path) as file:
            file.write(png.getvalue())
    except OSError as error:
        exit_with_error(f"{path} cannot be written: {error.strerror or error}")
    print_line(f"contact sheet in {path}")
