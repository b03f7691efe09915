"""Writes the comparison of runs as a page, with a page of the viewer for the tasks of each run that changed most."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from renderers import TemplateRenderer
from rollouts.evaluation.comparison import ComparedRun, Comparison, RunDifference, compare_runs
from rollouts.evaluation.run_scores import task_of
from rollouts.files import replaced_file
from rollouts.report.charts import Chart, Line
from rollouts.report.comparison import (
    changes,
    counting_line,
    figure_table,
    note_lines,
    pairing_line,
    run_table,
    title_of,
)
from rollouts.report.page import Block, Cell, Heading, Items, Section, Table, Text, charts_of, html_page
from rollouts.report.viewer_page import MAX_EPISODES
from rollouts.report.write import REPORT_FILE
from rollouts.trajectory.tree import Trajectory
from rollouts.trajectory_files import episodes_of_record, is_run_directory, open_reader, read_episodes
from rollouts.view import write_html
from transport import TransportError


def write_comparison(
    runs: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    unpaired: bool = False,
    renderer: TemplateRenderer | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> list[Path]:
    """Write the comparison of `runs` (`rollouts.evaluation.compare_runs`, with `unpaired`) to `out`, an HTML file.

        write_comparison(["evaluations/before", "evaluations/after"], "comparison.html")

    Beside it is a page of the viewer for each run that has a trajectories.mmr, `NAME-viewer-N.html` of NAME.html with
    the number N of the run, with the episodes of the tasks that changed most; `renderer` and `tools` are for these, as
    for `rollouts.view.write_html`. Returns the paths of all files; files of these names are replaced. Raises what
    `compare_runs` raises, and `OSError`.
    """
    path = Path(out)
    comparison = compare_runs(runs, unpaired=unpaired)
    links: dict[str, dict[str, str]] = {}
    written = [path]
    for number, run in enumerate(comparison.runs):
        viewer = path.with_name(f"{path.stem}-viewer-{number}.html")
        episodes = _write_viewer(viewer, run, _changed_tasks(comparison, run), renderer, tools)
        links[run.name] = {task_id: f"{quote(viewer.name)}#e={first}" for task_id, first in episodes.items()}
        written += [viewer] if episodes else []
    page = _page(comparison, links, path.parent)
    with replaced_file(path) as file:
        file.write(page)
    return written


def _changed_tasks(comparison: Comparison, run: ComparedRun) -> set[str]:
    pairs = [one for one in comparison.against_baseline if run is comparison.runs[0] or one.name == run.name]
    return {task.task_id for pair in pairs for found in changes(comparison, pair) for task in found.tasks}


def _write_viewer(
    path: Path,
    run: ComparedRun,
    task_ids: Collection[str],
    renderer: TemplateRenderer | None,
    tools: Sequence[Mapping[str, Any]] | None,
) -> dict[str, int]:
    """Write the page with the episodes of these tasks; returns the number of the first of each. Empty: no page."""
    if not task_ids or not is_run_directory(Path(run.directory)):
        return {}
    first: dict[str, int] = {}

    def trajectories() -> Iterator[Trajectory]:
        for number, trajectory in enumerate(islice(_episodes_of(run, task_ids), MAX_EPISODES)):
            first.setdefault(task_of(trajectory), number)
            yield trajectory

    title = f"{run.name}: tasks that changed most"
    write_html(trajectories(), path, renderer=renderer, tools=tools, title=title)
    if not first:
        path.unlink()
    return first


def _episodes_of(run: ComparedRun, task_ids: Collection[str]) -> Iterator[Trajectory]:
    """The episodes of these tasks, of the run's version of weights if it is one; what cannot be read is left out."""
    with open_reader(Path(run.directory)) as reader:
        # Few records have such a task, and media are most of the bytes.
        without_media = read_episodes(reader, [], media=False)
        for record in sorted({one.record for one in without_media if task_of(one.trajectory) in task_ids}):
            with suppress(TransportError):
                for episode in episodes_of_record(reader, record, 0, []):
                    trajectory = episode.trajectory
                    if episode.violation is None and task_of(trajectory) in task_ids and _is_of(run, trajectory):
                        yield trajectory


def _is_of(run: ComparedRun, trajectory: Trajectory) -> bool:
    spans = [span.version for node in trajectory.nodes for span in node.weight_spans]
    return run.weight_version is None or run.weight_version in spans


def _page(comparison: Comparison, links: Mapping[str, Mapping[str, str]], folder: Path) -> bytes:
    """The HTML of a comparison for a file in `folder`. `links` has for each run the addresses of its tasks."""
    title = f"{' and '.join(run.name for run in comparison.runs[1:])} against {comparison.runs[0].name}"
    reports = [(run.name, Path(run.directory) / REPORT_FILE) for run in comparison.runs]
    linked = [Cell(f"report of {name}", _address(path, folder)) for name, path in reports if path.is_file()]
    sections: list[Section] = [
        ("What differs between the runs", [Items(note_lines(comparison))]),
        ("Runs", [run_table(comparison), Text(counting_line(comparison)), *([Items(linked)] if linked else [])]),
    ]
    sections += [
        (title_of(comparison, one), list(_pair(comparison, one, links))) for one in comparison.against_baseline
    ]
    return html_page(title, sections)


def _address(path: Path, folder: Path) -> str:
    return quote(Path(os.path.relpath(os.path.realpath(path), os.path.realpath(folder))).as_posix())


def _pair(comparison: Comparison, against: RunDifference, links: Mapping[str, Mapping[str, str]]) -> Iterator[Block]:
    yield Text(pairing_line(comparison, against))
    yield figure_table(comparison, against)
    if against.quantiles:
        shares = np.linspace(0, 100, len(against.quantiles)).tolist() if len(against.quantiles) > 1 else [50.0]
        lines = [Line("change of the total reward", against.quantiles)]
        note = "total reward, tasks in ascending order"
        yield from charts_of([Chart("Change of each task", "share of the tasks, %", shares, lines, note=note)])
    of_runs = links[comparison.runs[0].name], links[against.name]
    for found in changes(comparison, against):
        rows: list[list[str | Cell]] = [
            [task_id, *(Cell(text, one.get(task_id, "")) for text, one in zip(rewards, of_runs, strict=True)), change]
            for task_id, *rewards, change in found.rows
        ]
        yield Heading(found.title)
        yield Table(found.title, found.headings, rows)
