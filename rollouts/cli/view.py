"""`rollouts view FILE`: the episodes of a trajectory file as one HTML file, or served while the file grows."""

import asyncio
import contextlib
import secrets
from pathlib import Path
from typing import Annotated, Any

import typer

from renderers import TemplateRenderer, load_renderer
from rollouts.cli.render.conversation_file import read_tools
from rollouts.terminal.text import counted, exit_with_error, print_error, print_line, print_note
from rollouts.trajectory_files import open_reader, read_episodes, title_of_file, trajectory_file
from rollouts.view import write_html


def view(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A trajectory file (.mmr), or the directory of a run or demo.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(metavar="HTML_FILE", help="The HTML file, which is replaced if it exists; default: FILE.html."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="The model's directory or repository: adds token texts, owners, tool calls and drift.",
        ),
    ] = None,
    tools: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A JSON list of the tools that the episodes had, for the drift.")
    ] = None,
    serve: Annotated[bool, typer.Option("--serve", help="Serve the page on 127.0.0.1, and follow the file.")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="PORT", help="With --serve; 0: any free one.")] = 0,
) -> None:
    """Look at episodes in a browser: messages with media, tokens with log-probabilities, branches, prompts, drift.

    Writes one HTML file that needs nothing else. With --serve, starts at once however large the file is, and
    shows the episodes that are written while it runs.
    """
    if serve and out is not None:
        exit_with_error("--serve writes no file: pass --out without it")
    path = trajectory_file(file)
    renderer, offered = renderer_and_tools(model, tools)
    if serve:
        _serve(path, port, renderer, offered)
    else:
        _write(path, out or path.with_name(f"{path.name}.html"), renderer, offered)


def renderer_and_tools(model: str | None, tools: Path | None) -> tuple[TemplateRenderer | None, list[Any] | None]:
    """What the viewer's full render needs, from --model and --tools. Exits with an error for tools alone."""
    if tools is not None and model is None:
        exit_with_error("--tools is used by the viewer's full render only: pass --model, too")
    return None if model is None else load_renderer(model), None if tools is None else read_tools(tools)


def _serve(path: Path, port: int, renderer: TemplateRenderer | None, tools: list[Any] | None) -> None:
    from rollouts.view.growing_file import GrowingFile
    from rollouts.view.server import serve_viewer, viewer_app

    def report_ready(url: str) -> None:
        print_line(f"{path} at {url} (only from this machine; Ctrl-C ends it)")

    store = GrowingFile(path)
    secret = secrets.token_urlsafe(16)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            app = viewer_app(store, secret, renderer=renderer, tools=tools)
            asyncio.run(serve_viewer(app, secret, port, report_ready))
    finally:
        store.close()


def _write(path: Path, out: Path, renderer: TemplateRenderer | None, tools: list[Any] | None) -> None:
    problems: list[str] = []
    with open_reader(path) as reader:
        episodes = (episode.trajectory for episode in read_episodes(reader, problems))
        written = write_html(
            episodes, out, renderer=renderer, tools=tools, title=title_of_file(path), problems=problems
        )
    if not written and not problems:
        print_note(f"{path} holds no episodes yet")
    for problem in problems:
        print_error(f"not shown: {problem}")
    size = out.stat().st_size / 1e6
    print_line(f"{counted(written, 'episode')} in {out} ({size:.1f} MB); open it in a browser")
