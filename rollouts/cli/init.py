"""`rollouts init DIRECTORY`: a project with an environment, its test and a configuration, that runs at once."""

import shlex
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from renderers.installation import install_command
from rollouts.errors import CommandFileError
from rollouts.files import made_directory
from rollouts.terminal.text import print_line

_TEMPLATES = Path(__file__).parent / "templates"


class Template(StrEnum):
    """What the environment of a new project does."""

    IMAGES = "images"
    SCORING = "scoring"
    TOOLS = "tools"


_ABOUT = {
    Template.IMAGES: "The model names the colour of a square in an image, in up to three turns.",
    Template.SCORING: "The model counts the squares in an image; functions score its one answer.",
    Template.TOOLS: "The model calls a tool that enlarges a dot in an image, and names its colour.",
}

_NEXT = """\
pytest                           # tests the environment, without a model
python tiny_model.py             # writes the model directory `model`
rollouts run run.toml --dry-run  # checks everything and prints the first prompt
rollouts run run.toml            # writes trajectories and metrics to `out`
rollouts train run.toml --set output.directory=trained  # a minute or two"""

#: Values of run.toml. Completions of the tiny model are random and never end by themselves; after
#: `supervised` steps it is right sometimes.
_VALUES = {
    Template.IMAGES: {"max_tokens": 8, "supervised": 30, "groups": 6},
    Template.SCORING: {"max_tokens": 8, "supervised": 30, "groups": 6},
    Template.TOOLS: {"max_tokens": 48, "supervised": 120, "groups": 16},
}


def project_files(name: str, template: Template) -> dict[str, str]:
    """The texts of the files of a new project, by file name."""
    files = {
        path.name.removesuffix(".txt"): path.read_text("utf-8")
        for folder in ("common", template.value)
        for path in sorted((_TEMPLATES / folder).iterdir())
    }
    files["run.toml"] = files["run.toml"].format(
        environment=files.pop("environment.toml"), install=install_command("torch"), **_VALUES[template]
    )
    commands = _NEXT.replace("\n", "\n    ")
    files["README.md"] = files["README.md"].format(name=name, about=_ABOUT[template], commands=commands)
    files[".gitignore"] = files.pop("gitignore")
    return files


def write_project(directory: Path, files: dict[str, str]) -> None:
    """Write new files, all or none. Raises `CommandFileError` if one exists, or cannot be written."""
    for name in files:
        path = directory / name
        if path.exists() or path.is_symlink():
            raise CommandFileError(path, "it exists, and no file is replaced; name a new directory, or move the file")
    try:
        with made_directory(directory) as written:
            for name, text in files.items():
                path = directory / name
                with path.open("x", encoding="utf-8", newline="\n") as file:
                    written.append(path)
                    file.write(text)
    except OSError as error:
        failed = Path(error.filename) if error.filename else directory
        raise CommandFileError(
            failed, f"{error.strerror or error}; nothing was written; name another directory"
        ) from error


def init(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The directory of the project; new, or any other.")],
    template: Annotated[
        Template,
        typer.Option(
            help="images: several turns, each with an image; scoring: one turn and functions that score it; tools: a "
            "tool that returns an image."
        ),
    ] = Template.IMAGES,
) -> None:
    """Write a project: an environment with images, its test, tasks, and the configuration of a run.

    It has a program that writes a tiny model with random weights, and needs no GPU and no download. No file is
    replaced.
    """
    files = project_files(directory.resolve().name or "project", template)
    write_project(directory, files)
    print_line(f"in {directory}: {', '.join(sorted(files))}")
    print_line("next:")
    change = [] if directory.resolve() == Path.cwd() else [f"cd {shlex.quote(str(directory))}"]
    for line in [*change, *_NEXT.splitlines()]:
        print_line(f"  {line}")
