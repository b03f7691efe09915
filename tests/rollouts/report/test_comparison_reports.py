"""`rollouts report` of several runs: the page of their comparison."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from evaluation.compared_runs import line, write_run
from report_runs import HOSTILE
from test_reports import read, run

from rollouts.cli.main import app  # noqa: F401  the commands that `run` invokes
from rollouts.report import write_comparison


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    same = {f"same {number}": [1.0, 1.0] for number in range(3)}
    first = write_run(tmp_path / "before", {**same, "up": [0.0, 0.0], "down": [1.0, 1.0]})
    return [first, write_run(tmp_path / "after", {**same, "up": [1.0, 0.0], "down": [0.0, 0.0]})]


def test_a_comparison_has_what_differs_then_figures_charts_and_changed_tasks(runs: list[Path], tmp_path: Path) -> None:
    (runs[0] / "report.html").touch()
    result = run(*runs, "--out", tmp_path / "c.html")
    assert result.exit_code == 0, result.output
    assert "comparison of 2 runs in" in result.output
    page = read(tmp_path / "c.html")
    headings = re.findall(r'<h2 id="h\d+">(.*?)</h2>', (tmp_path / "c.html").read_text("utf-8"))
    assert headings == ["What differs between the runs", "Runs", "after against before"]
    assert "values: Change of each task" in page.text
    assert "Largest increases of the total reward" in page.text
    links = [link["href"] for link in page.all("a")]
    assert "before/report.html" in links
    assert "after/report.html" not in links
    assert page.all("script") == page.all("link") == page.all("iframe") == []


def test_texts_of_runs_are_no_markup(tmp_path: Path) -> None:
    text = HOSTILE.text
    lines = [line(text, [0.0], reward_parts={text: [0.0]}), line("2", [1.0], reward_parts={text: [1.0]})]
    first = write_run(tmp_path / "a<b>", lines)
    second = write_run(tmp_path / "b", [line(text, [1.0], reward_parts={text: [1.0]}), line("3", [1.0])])
    write_comparison([first, second], tmp_path / "c.html")
    page = read(tmp_path / "c.html")
    assert page.all("script") == page.all("iframe") == page.all("b") == page.all("img") == []
    assert not set(HOSTILE.invisible) & set(page.text)


def test_wrong_uses_are_named(runs: list[Path], tmp_path: Path) -> None:
    assert "--out: name the HTML file of the comparison" in run(*runs).stderr
    assert "--unpaired is for the comparison of several runs" in run(runs[0], "--unpaired").stderr
    assert "name each run once" in run(runs[0], runs[0], "--out", tmp_path / "c.html").stderr
    assert "--model is for the viewer of one run" in run(*runs, "--model", "m", "--out", tmp_path / "c.html").stderr
    assert not (tmp_path / "c.html").exists()
