"""`rollouts init DIRECTORY`: a project with an environment, its test and a configuration, that runs at once."""

from __future__ import annotations

import json
import shlex
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from renderers.installation import install_command
from rollouts.errors import CommandFileError
from rollouts.files import made_directory
from rollouts.terminal.text import exit_with_error, print_line

_TEMPLATES = Path(__file__).parent / "templates"


class Template(StrEnum):
    """What the environment of a new project does."""

    IMAGES = "images"
    SCORING = "scoring"
    TOOLS = "tools"


_ABOUT = {
    Template.IMAGES: "The model names the colour of a square in an image, in up to three turns.",
    Template.SCORING: "The model counts the squares in an image; functions score its one answer.",
    Template.TOOLS: "The model calls a tool that returns an enlarged part of an image.",
}

_TINY_MODEL = """\
[engine]
kind = "local"               # transformers in this process: {install}
directory = "model"          # of `python tiny_model.py`: random weights. Write the directory of your own model here
# kind = "vllm"              # or "sglang": a server that serves renderer.model; then remove the two lines above
# base_url = "http://127.0.0.1:8000"
# api_key_env = "VLLM_API_KEY"   # the environment variable with the server's key, if it requires one

[renderer]
model = "model"              # the same directory; with a server, the directory or repository that it serves
"""

_LOCAL_MODEL = """\
[engine]
kind = "local"               # transformers in this process: {install}
directory = {model}

[renderer]
model = {model}
"""

_SERVED_MODEL = """\
[engine]
kind = "vllm"                # or "sglang"
base_url = {base_url}        # check it with: rollouts doctor {base_url} --model {model}
# api_key_env = "VLLM_API_KEY"   # the environment variable with the server's key, if it requires one

[renderer]
model = {model}              # the directory or repository that the server serves
"""


def engine_tables(model: str, base_url: str | None) -> str:
    """The tables `[engine]` and `[renderer]`: with `base_url` of a vLLM server, else of a model directory.

    Exits with an error for an address that has a user name or is none, and for a directory that is no model.
    """
    name = _toml_text(str(Path(model).resolve()) if Path(model).is_dir() else model)
    if base_url is None:
        if not (Path(model) / "config.json").is_file():
            exit_with_error(f"--model: {model} is no directory with config.json; correct it, or add --base-url")
        return _LOCAL_MODEL.format(model=name, install=install_command("torch"))
    from rollouts.run_config.sections import checked_address

    try:
        address = checked_address(base_url)
    except ValueError as error:
        exit_with_error(f"--base-url: {error}")
    return _SERVED_MODEL.format(model=name, base_url=_toml_text(address))


def project_files(name: str, template: Template, tables: str | None) -> dict[str, str]:
    """The texts of the files of a new project, by file name.

    `tables` are those of engine and renderer; without them, `tiny_model.py` writes a model.
    """
    folder = _TEMPLATES / template.value
    files = {path.name.removesuffix(".txt"): path.read_text("utf-8") for path in sorted(folder.iterdir())}
    files["run.toml"] = _common("run.toml").format(
        environment=files.pop("environment.toml"),
        engine=_TINY_MODEL.format(install=install_command("torch")) if tables is None else tables,
        # Of a tiny model, whose completions are random and never end by themselves, and of a model of the user.
        max_tokens={"images": 8, "scoring": 8, "tools": 64}[template.value] if tables is None else 512,
    )
    if tables is None:
        files["tiny_model.py"] = _common("tiny_model.py")
    files[".gitignore"] = _common("gitignore")
    files["pytest.ini"] = _common("pytest.ini")
    files["README.md"] = _readme(name, template, has_tiny_model=tables is None)
    return files


def next_commands(*, has_tiny_model: bool) -> list[tuple[str, str]]:
    """The commands that a new project is for, each with what it does."""
    return [
        ("pytest", "tests the environment, without a model"),
        *([("python tiny_model.py", "writes the model directory `model`")] if has_tiny_model else ()),
        ("rollouts run run.toml --dry-run", "checks everything and prints the first prompt"),
        ("rollouts run run.toml", "writes trajectories and metrics to `out`"),
    ]


def write_project(directory: Path, files: dict[str, str]) -> None:
    """Write the files of a project; no file is replaced, and after an error none of them is left.

    Raises `CommandFileError` if one of the files exists, or cannot be written.
    """
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


def _readme(name: str, template: Template, *, has_tiny_model: bool) -> str:
    commands = next_commands(has_tiny_model=has_tiny_model)
    width = max(len(command) for command, _ in commands)
    rows = [
        ("`environment.py`", "the environment, and what rewards the episodes"),
        ("`test_environment.py`", "its tests"),
        ("`pytest.ini`", "ends the search of pytest for a configuration, which directories above may have"),
        ("`tasks.jsonl`", "the tasks, one a line"),
        ("`run.toml`", "the run: engine, model, sampling, limits, output"),
    ]
    if has_tiny_model:
        rows.append(("`tiny_model.py`", "writes a tiny model with random weights to `model`"))
        model = (
            "The tiny model answers at random. For your own model, `run.toml` has two places to change: the table "
            "`[engine]`\n(a model directory, or the address of a server of vLLM or SGLang) and `renderer.model`. "
            "`rollouts doctor URL --model DIR` checks\na server first."
        )
    else:
        model = "The model is named in `run.toml`, in the tables `[engine]` and `[renderer]`."
    return _common("README.md").format(
        name=name,
        about=_ABOUT[template],
        commands="\n    ".join(f"{command:<{width}}  # {meaning}" for command, meaning in commands),
        files="\n".join(f"| {file} | {content} |" for file, content in rows),
        model=model,
    )


def _common(name: str) -> str:
    return (_TEMPLATES / "common" / f"{name}.txt").read_text("utf-8")


def _toml_text(text: str) -> str:
    """A basic string of TOML, whose escapes are those of JSON."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


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

    Without --model, it has a program that writes a tiny model with random weights, and needs no GPU and no
    download. No file is replaced.
    """
    if base_url is not None and model is None:
        exit_with_error("--base-url needs --model, the directory or repository of the model that the server serves")
    own = None if model is None else engine_tables(model, base_url)
    files = project_files(directory.resolve().name or "project", template, own)
    write_project(directory, files)
    print_line(f"in {directory}: {', '.join(sorted(files))}")
    print_line("next:")
    commands = next_commands(has_tiny_model=own is None)
    lines = [] if directory.resolve() == Path.cwd() else [(f"cd {shlex.quote(str(directory))}", "")]
    width = max(len(command) for command, _ in (*lines, *commands))
    for command, meaning in (*lines, *commands):
        print_line(f"  {command:<{width}}  # {meaning}" if meaning else f"  {command}")
