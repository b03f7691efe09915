"""`rollouts report RUN_DIR`: the report of a run as an HTML file, with the viewer beside it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollouts.errors import RolloutsError
from rollouts.terminal.table import counted, exit_with_error, print_error, print_line, print_note

if TYPE_CHECKING:
    from renderers import TemplateRenderer


#: Of the problems of a directory, this many are printed; the report has more.
_PRINTED_PROBLEMS = 5


def report(
    directory: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The output directory of a run or demo.")],
    out: Annotated[
        Path | None,
        typer.Option(metavar="HTML_FILE", help="The HTML file, which is replaced if it exists; default: report.html."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="The model's directory or repository, for texts in the viewer.")
    ] = None,
    tools: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A JSON list of the episodes' tools, for the viewer."),
    ] = None,
) -> None:
    """Write a report of a run: curves, mismatch, throughput, staleness, errors, best and worst episodes.

    The run may still be going, or may have been interrupted or killed. The viewer of its episodes is written beside
    the report, which links to it.
    """
    from renderers import load_renderer
    from rollouts.cli.render import read_tools
    from rollouts.report import write_report

    if tools is not None and model is None:
        exit_with_error("--tools is used by the viewer's full render only: pass --model, too")
    renderer = None if model is None else load_renderer(model)
    offered = None if tools is None else read_tools(tools)
    written = write_report(directory, out, renderer=renderer, tools=offered)
    for problem in written.problems[:_PRINTED_PROBLEMS]:
        print_error(f"not in the report: {problem}")
    viewer = f", {written.viewer.name}" if written.viewer else ""
    print_line(f"{counted(written.episodes, 'episode')} in {written.path}{viewer}; open it in a browser")


def write_report_at_the_end(
    directory: Path, *, renderer: TemplateRenderer | None = None, seconds: float | None = None
) -> None:
    """Write the report of a run that has ended, and print its path. A failure is printed: the run itself is written."""
    from rollouts.report import write_report

    try:
        written = write_report(directory, renderer=renderer, seconds=seconds)
    except (OSError, RolloutsError) as error:
        print_error(f"no report was written: {error}; `rollouts report {directory}` tries again")
        return
    except KeyboardInterrupt:
        print_note(f"interrupted while the report was written; `rollouts report {directory}` writes it")
        raise
    print_line(f"report: {written.path}")
