"""Writes the comparison of runs as a page, with a page of the viewer for the tasks of each run that changed most."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from renderers import TemplateRenderer
from rollouts.evaluation.comparison import ChangedTask, ComparedRun, Comparison, RunDifference, compare_runs
from rollouts.evaluation.run_scores import task_of
from rollouts.files import replaced_file
from rollouts.report.charts import Chart, Figures, Interval, Line, escaped, scrolling, table
from rollouts.report.comparison import (
    RUN_HEADINGS,
    RunLinks,
    changed_headings,
    changed_rows,
    changes,
    counting_line,
    figure_headings,
    figure_rows,
    links_of_run,
    note_lines,
    pairing_line,
    run_rows,
)
from rollouts.report.viewer_page import MAX_EPISODES
from rollouts.report.write import html_page
from rollouts.trajectory.tree import Trajectory
from rollouts.trajectory_files import episodes_of_record, is_run_directory, open_reader
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
    links: dict[str, RunLinks] = {}
    written = [path]
    for number, run in enumerate(comparison.runs):
        links[run.name] = links_of_run(Path(run.directory), path.parent)
        viewer = path.with_name(f"{path.stem}-viewer-{number}.html")
        episodes = _write_viewer(viewer, run, _changed_tasks(comparison, run), renderer, tools)
        if episodes:
            links[run.name] = RunLinks(links[run.name].report, quote(viewer.name), episodes)
            written.append(viewer)
    with replaced_file(path) as file:
        file.write(comparison_page(comparison, links))
    return written


def _changed_tasks(comparison: Comparison, run: ComparedRun) -> set[str]:
    pairs = [one for one in comparison.against_baseline if run is comparison.runs[0] or one.name == run.name]
    return {task.task_id for pair in pairs for _, tasks in changes(pair) for task in tasks}


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
        for record in range(len(reader)):
            try:
                held = reader.without_media(record)  # few records have such a task, and media are most of the bytes
                members = held if isinstance(held, list) else [held]
                if not any(isinstance(one, Trajectory) and task_of(one) in task_ids for one in members):
                    continue
                episodes = list(episodes_of_record(reader, record, 0, []))
            except TransportError:
                continue
            for episode in episodes:
                trajectory = episode.trajectory
                if episode.violation is None and task_of(trajectory) in task_ids and _is_of(run, trajectory):
                    yield trajectory


def _is_of(run: ComparedRun, trajectory: Trajectory) -> bool:
    spans = [span.version for node in trajectory.nodes for span in node.weight_spans]
    return run.weight_version is None or run.weight_version in spans


def comparison_page(comparison: Comparison, links: Mapping[str, RunLinks]) -> bytes:
    """The HTML of a comparison. `links` are those of each run, by its name."""
    figures = Figures()
    baseline = comparison.runs[0].name
    pairs = [
        (f"{against.name} against {baseline}", _pair_section(comparison, against, links, figures))
        for against in comparison.against_baseline
    ]
    title = f"{' and '.join(run.name for run in comparison.runs[1:])} against {baseline}"
    notes = "".join(f"<li>{escaped(note)}</li>" for note in note_lines(comparison))
    runs = "Runs", _runs_section(comparison, links)
    return html_page(title, "", [("What differs between the runs", f"<ul>{notes}</ul>"), runs, *pairs])


def _pair_section(
    comparison: Comparison, against: RunDifference, links: Mapping[str, RunLinks], figures: Figures
) -> str:
    parts = [f"<p>{escaped(pairing_line(comparison, against))}</p>"]
    title = f"{against.name} against {comparison.runs[0].name}"
    parts.append(table(figure_headings(comparison, against), figure_rows(comparison, against), title))
    intervals = [
        Interval(label, one.difference.value, one.difference.low, one.difference.high)
        for label, one in against.differences.labelled()
    ]
    rates = [one for one in intervals if one.label.startswith("pass@")]
    rewards = [one for one in intervals if one not in rates]
    charts = [figures.intervals(f"Difference of {what}", "difference", rows) for what, rows in
              (("rewards", rewards), ("pass@k", rates))]  # fmt: skip
    if against.quantiles:
        shares = np.linspace(0, 100, len(against.quantiles)).tolist() if len(against.quantiles) > 1 else [50.0]
        lines = [Line("change of the total reward", against.quantiles)]
        note = "total reward, tasks in ascending order"
        charts.append(figures.chart(Chart("Change of each task", "share of the tasks, %", shares, lines, note=note)))
    parts.append(f'<div class="charts">{"".join(charts)}</div>')
    for heading, tasks in changes(against):
        names = comparison.runs[0].name, against.name
        rows = "".join(_task_row(task, cells, [links[name] for name in names])
                       for task, cells in zip(tasks, changed_rows(tasks), strict=True))  # fmt: skip
        head = "".join(f'<th scope="col">{escaped(one)}</th>' for one in changed_headings(comparison, against))
        whole = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
        parts.append(f"<h3>{heading}</h3>{scrolling(whole, heading)}")
    return "".join(parts)


def _task_row(task: ChangedTask, cells: Sequence[str], links: Sequence[RunLinks]) -> str:
    addresses = ["", *(one.of_task(task.task_id) for one in links), ""]
    shown = [
        f'<a href="{escaped(address)}">{escaped(cell, 200)}</a>' if address else escaped(cell, 200)
        for cell, address in zip(cells, addresses, strict=True)
    ]
    return f"<tr>{''.join(f'<td>{one}</td>' for one in shown)}</tr>"


def _runs_section(comparison: Comparison, links: Mapping[str, RunLinks]) -> str:
    reports = "".join(
        f'<li><a href="{escaped(links[run.name].report)}">report of {escaped(run.name)}</a></li>'
        for run in comparison.runs
        if links[run.name].report
    )
    counting = f"<p>{escaped(counting_line(comparison))}</p>"
    return f"{table(RUN_HEADINGS, run_rows(comparison), 'runs')}{counting}{f'<ul>{reports}</ul>' if reports else ''}"
