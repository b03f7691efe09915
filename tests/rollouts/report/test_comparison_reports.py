"""`rollouts report` of several runs: the page of their comparison, with a page of the viewer for each."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from evaluation.compared_runs import line, write_run
from report_runs import HOSTILE, episode
from test_reports import read, run

from rollouts.cli.main import app  # noqa: F401  the commands that `run` invokes
from rollouts.report import write_comparison
from transport import RecordWriter


def with_episodes(directory: Path, rewards: dict[str, list[float]]) -> Path:
    write_run(directory, rewards)
    with RecordWriter(directory / "trajectories.mmr") as writer:
        for task, (task_id, of_task) in enumerate(rewards.items()):
            group = [episode(4 * task + index, reward=reward) for index, reward in enumerate(of_task)]
            for one in group:
                one.group_id = task_id
            writer.append(group)
    return directory


def episodes_on(page: Path) -> list[str]:
    index = re.search(r'id="index">(.*?)</script>', page.read_text("utf-8"))
    assert index is not None
    return [one["group"] for one in json.loads(index[1])["episodes"]]


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    same = {f"same {number}": [1.0, 1.0] for number in range(3)}
    first = with_episodes(tmp_path / "before", {**same, "up": [0.0, 0.0], "down": [1.0, 1.0]})
    return [first, with_episodes(tmp_path / "after", {**same, "up": [1.0, 0.0], "down": [0.0, 0.0]})]


def test_a_comparison_has_what_differs_then_figures_charts_and_changed_tasks(runs: list[Path], tmp_path: Path) -> None:
    result = run(runs[0])
    assert result.exit_code == 0, result.output
    result = run(*runs, "--out", tmp_path / "c.html")
    assert result.exit_code == 0, result.output
    assert "c.html, c-viewer-0.html, c-viewer-1.html" in result.output.replace("\n", "")
    page = read(tmp_path / "c.html")
    headings = re.findall(r'<h2 id="h\d+">(.*?)</h2>', (tmp_path / "c.html").read_text("utf-8"))
    assert headings == ["What differs between the runs", "Runs", "after against before"]
    assert "values: Change of each task" in page.text
    assert "Largest increases of the total reward" in page.text
    links = [link["href"] for link in page.all("a")]
    assert "before/report.html" in links
    assert "after/report.html" not in links
    assert page.all("script") == page.all("link") == page.all("iframe") == []


def test_links_of_changed_tasks_lead_to_their_episodes_and_no_others_are_written(
    runs: list[Path], tmp_path: Path
) -> None:
    paths = write_comparison(runs, tmp_path / "c.html")
    assert [path.name for path in paths] == ["c.html", "c-viewer-0.html", "c-viewer-1.html"]
    assert [episodes_on(path) for path in paths[1:]] == [["up", "up", "down", "down"]] * 2
    rows = re.findall(r"<tr><td>(up|down)</td>(.*?)</tr>", paths[0].read_text("utf-8"))
    assert {task_id: re.findall(r'href="(.*?)"', cells) for task_id, cells in rows} == {
        "up": ["c-viewer-0.html#e=0", "c-viewer-1.html#e=0"],
        "down": ["c-viewer-0.html#e=2", "c-viewer-1.html#e=2"],
    }


def test_runs_without_episodes_have_a_comparison_without_viewers(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, {"1": [value], "2": [0.0]}) for name, value in (("a", 0.0), ("b", 1.0))]
    assert write_comparison(runs, tmp_path / "c.html") == [tmp_path / "c.html"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c.html"]


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
    assert not (tmp_path / "c.html").exists()
