"""`rollouts report RUN_DIR`: the report of a run as HTML with the viewer beside it."""

from pathlib import Path
from typing import Annotated

import typer

from renderers import TemplateRenderer
from rollouts.errors import RolloutsError
from rollouts.terminal.text import counted, exit_with_error, print_error, print_line, print_note


def report(
    directory: Annotated[
        Path,
        typer.Argument(
            metavar="RUN_DIR",
            help="The output directory of a run or demo, or of `rollouts tinker`: a report for each model.",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="HTML_FILE",
            help="The HTML file, which is replaced if it exists; default: report.html in the directory.",
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="The model's directory or repository, for texts in the viewer.")
    ] = None,
    tools: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A JSON list of the episodes' tools, for the viewer."),
    ] = None,
) -> None:
    """Write a report of a run: curves, mismatch, staleness, errors, best and worst episodes.

    The run may still be going, or may have been interrupted or killed. The viewer of its episodes is written
    beside the report, which links to it.
    """
    from rollouts.cli.view import renderer_and_tools
    from rollouts.report import write_report
    from rollouts.report.run_files import run_directories

    renderer, offered = renderer_and_tools(model, tools)
    found = run_directories(directory)
    if out is not None:
        if len(found) > 1 and found[0] != directory:
            exit_with_error(f"--out: {directory} has {len(found)} models; name the directory of one: {found[0]}")
        found = found[:1]
    for each in found:
        written = write_report(each, out, renderer=renderer, tools=offered)
        # The report has more of them.
        for problem in written.problems[:5]:
            print_error(f"not in the report: {problem}")
        viewer = f", {written.viewer.name}" if written.viewer else ""
        counts = [counted(written.steps, "training step")] if written.steps else []
        if written.episodes or not counts:
            counts.insert(0, counted(written.episodes, "episode"))
        print_line(f"{' and '.join(counts)} in {written.path}{viewer}; open it in a browser")


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
