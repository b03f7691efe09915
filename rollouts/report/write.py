"""Writes the report of a run as a page."""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from renderers import TemplateRenderer
from rollouts.files import replaced_file
from rollouts.report.figures import collect
from rollouts.report.page import Cell, html_page
from rollouts.report.run_files import open_run
from rollouts.report.sections import best_and_worst, sections_of
from rollouts.report.viewer_page import write_viewer_page

REPORT_FILE: Final = "report.html"


@dataclass(frozen=True, slots=True)
class WrittenReport:
    """What was written. `viewer` is None for a directory without episodes; `problems` name what cannot be read.

    `steps`: how many training steps it shows.
    """

    path: Path
    viewer: Path | None
    episodes: int
    problems: tuple[str, ...]
    steps: int


def write_report(
    directory: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    *,
    renderer: TemplateRenderer | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    seconds: float | None = None,
) -> WrittenReport:
    """Write the report of the directory of a run to `out`, by default `report.html` in it, and the viewer beside it.

    The directory may be that of a run which goes on, was interrupted or was killed: the report has what is
    written. The viewer is `viewer.html`, and `NAME-viewer.html` beside another NAME.html; `renderer` and
    `tools` are for it, as for `rollouts.view.write_html`. `seconds` bounds the time for reading: a report
    that reached it covers the first episodes, and says so. Files of earlier reports are replaced.

    Raises `RolloutsError` for a path that is no such directory, and `OSError`.
    """
    started = time.monotonic()
    files = open_run(Path(directory))
    path = files.path / REPORT_FILE if out is None else Path(out)
    reading = None if seconds is None else started + seconds / 2  # the rest is for the page of the viewer
    collected = collect(files, reading)
    best, worst = best_and_worst(collected.succeeded)
    linked = [*best, *worst, *(example for _, _, example in collected.error_kinds())]
    viewer_path = path.with_name("viewer.html" if path.name == REPORT_FILE else f"{path.stem}-viewer.html")
    deadline = None if seconds is None else started + seconds
    viewer = write_viewer_page(viewer_path, files, collected, linked, renderer=renderer, tools=tools, deadline=deadline)
    link = None
    if viewer.places:
        count = "all" if len(viewer.places) == len(collected.episodes) else f"{len(viewer.places):,}"
        link = Cell(f"{count} episodes in the viewer", viewer.name)
    page = html_page(f"{collected.title}: report", sections_of(collected, viewer), link)
    with replaced_file(path) as file:
        file.write(page)
    written = viewer_path if viewer.places else None
    problems = tuple(collected.problems)
    return WrittenReport(path, written, len(collected.episodes), problems, collected.training_steps)
