"""Writes the report of a run as a page."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from renderers import TemplateRenderer
from rollouts.files import replaced_file
from rollouts.report.charts import Figures, escaped
from rollouts.report.figures import Collected, collect
from rollouts.report.run_files import open_run
from rollouts.report.sections import (
    best_and_worst,
    curves_section,
    errors_section,
    evaluation_section,
    examples_section,
    mismatch_section,
    staleness_section,
    summary_section,
    throughput_section,
    training_section,
)
from rollouts.report.viewer_page import ViewerPage, write_viewer_page
from rollouts.view.page import PAGE_END, content_hash, document_head, static_file

# The document of a report. It has no script: numbers under the pointer are `<title>`s of its SVG.


def report_page(collected: Collected, viewer: ViewerPage) -> bytes:
    """The HTML of a report."""
    figures = Figures()
    evaluation = collected.evaluation
    sections = [
        ("Summary", summary_section(collected)),
        *([] if evaluation is None else [("Evaluation", evaluation_section(evaluation))]),
        ("Curves", curves_section(collected, figures)),
        *([] if evaluation is not None else [("Training", training_section(collected, figures))]),
        *([] if evaluation is not None else [("Mismatch", mismatch_section(collected, figures))]),
        ("Throughput", throughput_section(collected, figures)),
        *([] if evaluation is not None else [("Staleness and queues", staleness_section(collected, figures))]),
        ("Errors", errors_section(collected, viewer)),
        ("Episodes", examples_section(collected, viewer)),
    ]
    all_episodes = f'<a href="{escaped(viewer.name)}">all episodes in the viewer</a>' if viewer.places else ""
    if viewer.places and len(viewer.places) < len(collected.episodes):
        all_episodes = f'<a href="{escaped(viewer.name)}">{len(viewer.places):,} episodes in the viewer</a>'
    return html_page(f"Report of {collected.title}", all_episodes, sections)


def html_page(title: str, links: str, sections: Sequence[tuple[str, str]]) -> bytes:
    """A page of sections, each with its name and its HTML; the names are texts. `links` is HTML below the title.

    Its content security policy allows its own style and images in data URLs, nothing else.
    """
    style = static_file("rollouts.report", "report.css")
    policy = (
        f"default-src 'none'; style-src '{content_hash(style)}'; img-src data:; base-uri 'none'; form-action 'none'"
    )
    contents = "".join(
        f'<li><a href="#s{number}">{escaped(name)}</a></li>' for number, (name, _) in enumerate(sections)
    )
    body = "".join(
        f'<section id="s{number}" aria-labelledby="h{number}"><h2 id="h{number}">{escaped(name)}</h2>{content}'
        "</section>\n"
        for number, (name, content) in enumerate(sections)
    )
    shown = escaped(title, 200)
    document = (
        f"<header><h1>{shown}</h1>{links}</header>\n"
        f'<nav aria-label="sections"><ul>{contents}</ul></nav>\n<main>\n{body}</main>\n'
    )
    return document_head(shown, policy, style) + document.encode("utf-8", "replace") + PAGE_END


REPORT_FILE: Final = "report.html"
VIEWER_FILE: Final = "viewer.html"

#: Of a bounded time, the share for the first reading of the episodes; the rest is for the page of the viewer.
_SHARE_OF_READING: Final = 0.5


@dataclass(frozen=True, slots=True)
class WrittenReport:
    """What was written. `viewer` is None for a directory without episodes; `problems` name what cannot be read."""

    path: Path
    viewer: Path | None
    episodes: int
    problems: tuple[str, ...]


def write_report(
    directory: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    *,
    renderer: TemplateRenderer | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    seconds: float | None = None,
) -> WrittenReport:
    """Write the report of the directory of a run to `out`, by default `report.html` in it, and the viewer beside it.

    The directory may be that of a run which goes on, was interrupted or was killed: the report has what is written. The
    viewer is `viewer.html`, and `NAME-viewer.html` beside another NAME.html; `renderer` and `tools` are for it, as for
    `rollouts.view.write_html`. `seconds` bounds the time for reading: a report that reached it covers the first
    episodes, and says so. Files of earlier reports are replaced.

    Raises `RolloutsError` for a path that is no such directory, and `OSError`.
    """
    started = time.monotonic()
    files = open_run(Path(directory))
    path = files.path / REPORT_FILE if out is None else Path(out)
    reading = None if seconds is None else started + seconds * _SHARE_OF_READING
    collected = collect(files, reading)
    best, worst = best_and_worst(collected.succeeded)
    linked = [*best, *worst, *(found.example for found in collected.error_kinds())]
    viewer_path = path.with_name(VIEWER_FILE if path.name == REPORT_FILE else f"{path.stem}-viewer.html")
    deadline = None if seconds is None else started + seconds
    viewer = write_viewer_page(viewer_path, files, collected, linked, renderer=renderer, tools=tools, deadline=deadline)
    page = report_page(collected, viewer)
    with replaced_file(path) as file:
        file.write(page)
    written = viewer_path if viewer.places else None
    return WrittenReport(path, written, len(collected.episodes), tuple(collected.problems))
