"""`rollouts report RUN_DIR`: the report of a run, or the comparison of several, as HTML with the viewer beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from renderers import TemplateRenderer, load_renderer
from rollouts.errors import RolloutsError
from rollouts.terminal.text import counted, exit_with_error, print_error, print_line, print_note


def report(
    directories: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN_DIR",
            help="The output directory of a run or demo, or of `rollouts tinker`: a report for each model; several: "
            "they are compared with the first one, as by `rollouts compare`.",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="HTML_FILE",
            help="The HTML file, which is replaced if it exists; default, of one run: report.html in its directory.",
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="The model's directory or repository, for texts in the viewer.")
    ] = None,
    tools: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A JSON list of the episodes' tools, for the viewer."),
    ] = None,
    unpaired: Annotated[
        bool, typer.Option("--unpaired", help="Of several runs: compare the means over all tasks of each.")
    ] = False,
) -> None:
    """Write a report of a run: curves, mismatch, staleness, errors, best and worst episodes.

    The run may still be going, or may have been interrupted or killed. The viewer of its episodes is written
    beside the report, which links to it. Of several runs, the report is their comparison.
    """
    from rollouts.cli.render.conversation_file import read_tools
    from rollouts.report import write_comparison, write_report
    from rollouts.report.run_files import run_directories

    if len(directories) > 1 and out is None:
        exit_with_error("--out: name the HTML file of the comparison; it belongs to none of the runs' directories")
    if len(directories) == 1 and unpaired:
        exit_with_error("--unpaired is for the comparison of several runs; name them, the baseline first")
    if tools is not None and model is None:
        exit_with_error("--tools is used by the viewer's full render only: pass --model, too")
    if out is not None and len(directories) > 1:
        if model is not None:
            exit_with_error("--model is for the viewer of one run, which a comparison does not have; leave it out")
        write_comparison(directories, out, unpaired=unpaired)
        print_line(f"comparison of {len(directories)} runs in {out}; open it in a browser")
        return
    renderer = None if model is None else load_renderer(model)
    offered = None if tools is None else read_tools(tools)
    found = run_directories(Path(directories[0]))
    if out is not None:
        if len(found) > 1 and found[0] != Path(directories[0]):
            exit_with_error(f"--out: {directories[0]} has {len(found)} models; name the directory of one: {found[0]}")
        found = found[:1]
    for directory in found:
        written = write_report(directory, out, renderer=renderer, tools=offered)
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
