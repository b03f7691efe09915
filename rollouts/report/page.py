"""The document of a report. It has no script: numbers under the pointer are `<title>`s of its SVG."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib import resources

from rollouts.report.charts import Figures
from rollouts.report.collected import Collected
from rollouts.report.html_text import escaped
from rollouts.report.sections import (
    curves_section,
    errors_section,
    examples_section,
    mismatch_section,
    staleness_section,
    summary_section,
    throughput_section,
)
from rollouts.report.viewer_page import ViewerPage


def report_page(collected: Collected, viewer: ViewerPage) -> bytes:
    """The HTML of a report. Its content security policy allows its own style and images in data URLs, nothing else."""
    figures = Figures()
    sections = [
        ("Summary", summary_section(collected)),
        ("Curves", curves_section(collected, figures)),
        ("Mismatch", mismatch_section(collected, figures)),
        ("Throughput", throughput_section(collected, figures)),
        ("Staleness and queues", staleness_section(collected, figures)),
        ("Errors", errors_section(collected, viewer)),
        ("Episodes", examples_section(collected, viewer)),
    ]
    style = _style()
    policy = f"default-src 'none'; style-src '{_hash(style)}'; img-src data:; base-uri 'none'; form-action 'none'"
    title = f"Report of {escaped(collected.title, 200)}"
    all_episodes = f'<a href="{escaped(viewer.name)}">all episodes in the viewer</a>' if viewer.places else ""
    if viewer.places and len(viewer.places) < len(collected.episodes):
        all_episodes = f'<a href="{escaped(viewer.name)}">{len(viewer.places):,} episodes in the viewer</a>'
    contents = "".join(f'<li><a href="#s{number}">{name}</a></li>' for number, (name, _) in enumerate(sections))
    body = "".join(
        f'<section id="s{number}" aria-labelledby="h{number}"><h2 id="h{number}">{name}</h2>{content}</section>\n'
        for number, (name, content) in enumerate(sections)
    )
    document = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escaped(policy)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer">\n<meta name="color-scheme" content="light dark">\n'
        f"<title>{title}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        f"<header><h1>{title}</h1>{all_episodes}</header>\n"
        f'<nav aria-label="sections"><ul>{contents}</ul></nav>\n<main>\n{body}</main>\n</body>\n</html>\n'
    )
    return document.encode("utf-8", "replace")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


@cache
def _style() -> str:
    return resources.files("rollouts.report").joinpath("static", "report.css").read_text("utf-8").strip()
