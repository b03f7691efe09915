"""Reports of directories: what they show, what they say where something is absent, and directories that are refused."""

import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_runs import episode, failing_run, group_line, trained_run
from typer.testing import CliRunner, Result

from rollouts import Trajectory
from rollouts.cli.main import app
from rollouts.errors import RolloutsError, ServerTimeoutError
from rollouts.observability import JsonLinesSink, TrainingLog
from rollouts.report import write_report
from rollouts.report.charts import Chart, Line
from rollouts.report.curves import episode_charts
from rollouts.report.figures import collect
from rollouts.report.page import Text, charts_of, html_page
from rollouts.report.run_files import open_run
from rollouts.report.viewer_page import MAX_EPISODES, choose_episodes
from transport import RecordWriter


class Reader(HTMLParser):
    """The elements and the text of a page. `unclosed` has elements that are open at the end."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.unclosed: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "img", "br"):
            self.unclosed.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.unclosed.pop() == tag

    def handle_data(self, data):
        self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def read(path: Path) -> Reader:
    page = Reader(path.read_text("utf-8"))
    assert page.unclosed == []
    return page


def drawn(chart: Chart) -> str:
    """The main part of a page with a chart."""
    return html_page("title", [("section", charts_of([chart]))]).decode().partition("<main>")[2]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def test_a_report_has_curves_mismatch_and_links_into_the_viewer_beside_it(tmp_path: Path) -> None:
    directory = trained_run(tmp_path / "run")
    result = run(directory)
    assert result.exit_code == 0, result.output
    page = read(directory / "report.html")
    for title in ("Environment reward", "Entropy, estimated", "loss", "mismatch max", "Staleness"):
        assert f"values: {title}" in page.text, title
    source = (directory / "report.html").read_text("utf-8")
    headings = re.findall(r'<h2 id="h\d+">(.*?)</h2>', source)
    assert re.findall(r'<a href="#s\d+">(.*?)</a>', source) == headings
    assert "viewer.html#e=0" in [link["href"] for link in page.all("a")]
    assert (directory / "viewer.html").read_text("utf-8").startswith("<!doctype html>")
    assert page.all("script") == page.all("link") == page.all("iframe") == []


def test_tokens_of_older_weights_count_in_no_figure_of_the_mismatch_and_have_a_row_of_their_own(
    tmp_path: Path,
) -> None:
    directory = trained_run(tmp_path / "run")  # 1e-6 nats, and 1e-3 where weights of before have sampled
    write_report(directory)
    rows = [json.loads(line)["metrics"] for line in (directory / "training.jsonl").read_text().splitlines()]
    assert all(row["mismatch_mean"] <= row["mismatch_max"] < 2e-6 for row in rows)
    text = read(directory / "report.html").text
    assert re.search(r"largest mismatch\d\.\d\de-0[67] nats", text)
    assert re.search(r"tokens after image32\d\.\d\de-0[67]\d\.\d\de-0[67]", text)
    assert re.search(r"tokens of older weights161.00e-031.00e-03", text)


def only_runner(directory: Path) -> Path:
    directory.mkdir()
    JsonLinesSink(directory / "runner_metrics.jsonl").write("runner", 0, {"groups_delivered": 0})
    RecordWriter(directory / "trajectories.mmr").close()
    return directory


@pytest.mark.parametrize(
    ("make", "sections"),
    [
        (trained_run, ["Summary", "Curves", "Training", "Mismatch", "Staleness and queues", "Episodes"]),
        (failing_run, ["Summary", "Curves", "Errors", "Episodes"]),
        (only_runner, ["Summary"]),
    ],
)
def test_a_report_has_the_name_of_its_run_and_no_section_without_anything_to_show(
    tmp_path: Path, make, sections: list[str]
) -> None:
    write_report(make(tmp_path / "my-run"))
    source = (tmp_path / "my-run" / "report.html").read_text("utf-8")
    assert re.findall(r"<title>(.*?)</title>", source)[0] == "my-run: report"
    assert re.findall(r'<h2 id="h\d+">(.*?)</h2>', source) == sections


def test_the_viewer_has_the_mismatch_that_the_trainer_wrote(tmp_path: Path) -> None:
    directory = trained_run(tmp_path / "run")
    write_report(directory)
    index = re.search(r'id="index">(.*?)</script>', (directory / "viewer.html").read_text("utf-8"))
    assert index is not None
    assert [round(one["mismatch"], 6) for one in json.loads(index[1])["episodes"][:2]] == [1e-6, 1e-6]


@pytest.mark.slow
def test_another_file_name_has_a_viewer_of_its_own(tmp_path: Path) -> None:
    directory = trained_run(tmp_path / "run")
    result = run(directory, "--out", tmp_path / "mine.html")
    assert result.exit_code == 0, result.output
    assert "mine.html, mine-viewer.html" in result.output.replace("\n", "")
    assert any(link["href"].startswith("mine-viewer.html#e=") for link in read(tmp_path / "mine.html").all("a"))
    assert not (directory / "report.html").exists()


def test_errors_are_counted_with_an_example_and_a_cure(tmp_path: Path) -> None:
    directory = failing_run(tmp_path / "run")
    write_report(directory)
    page = read(directory / "report.html")
    assert "ServerTimeoutError" in page.text
    cure = (ServerTimeoutError.__doc__ or "").partition("Cure: ")[2]
    assert len(cure) > 20
    assert " ".join(cure.split()) in page.text
    assert "MyError" in page.text
    assert "The text of the error and the episode show the cause" in page.text
    assert "3 failed" in page.text
    assert "max_turns" in page.text


def test_failed_episodes_do_not_count_in_the_curve_of_rewards(tmp_path: Path) -> None:
    episodes = collect(open_run(failing_run(tmp_path / "run"))).episodes
    (line,) = episode_charts(episodes)[0].lines
    expected = [math.nan if episode.failed else episode.environment_reward for episode in episodes]
    np.testing.assert_array_equal(line.ys, expected)
    assert 0 < np.isnan(expected).sum() < len(episodes)


def test_a_directory_of_a_trainer_alone_has_a_report_without_a_viewer(tmp_path: Path) -> None:
    directory = trained_run(tmp_path / "run")
    (directory / "trajectories.mmr").unlink()
    written = write_report(directory)
    assert (written.viewer, written.episodes) == (None, 0)
    page = read(directory / "report.html")
    assert "values: loss" in page.text
    assert not (directory / "viewer.html").exists()


def test_a_report_whose_time_is_over_covers_the_first_episodes_and_says_so(tmp_path: Path) -> None:
    directory = trained_run(tmp_path / "run")
    assert write_report(directory, seconds=0.0).episodes == 1
    page = read(directory / "report.html")
    assert "the report covers the first episodes only" in page.text
    assert [link["href"] for link in page.all("a") if "#e=" in link["href"]] == ["viewer.html#e=0"]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: None, "there is no such directory"),
        (lambda path: path.write_text("x"), "there is no such directory"),
        (lambda path: path.mkdir(), "or of `rollouts tinker` after a step"),
    ],
)
def test_a_path_that_is_no_directory_of_a_run_is_one_line_with_the_cure(tmp_path: Path, make, reason: str) -> None:
    make(tmp_path / "run")
    result = run(tmp_path / "run")
    assert result.exit_code == 2
    assert reason in result.output


def test_a_file_of_another_kind_in_place_of_the_episodes_is_named(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    (directory / "trajectories.mmr").write_bytes(b"hello " * 100)
    with pytest.raises(RolloutsError, match="not a trajectory file"):
        write_report(directory)
    assert not (directory / "report.html").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("summary.json", b'{"complete": tr', "it is no JSON, or was cut off after 15 bytes"),
        ("summary.json", b"[true]", 'it is no object with "complete": true or false'),
        ("summary.json", b"[" * 200_000, "it is no JSON"),
        ("metrics.jsonl", b'{"total_rewards": [1.0], "reward_pa', "line 1: the last 35 bytes are incomplete"),
        ("metrics.jsonl", b'{"total_rewards": "12", "reward_parts": {}}\n', "line 1: no line of a group (task_id: "),
        ("runner_metrics.jsonl", b'{"step": 1, "time"', "line 1: the last 18 bytes are incomplete"),
        ("runner_metrics.jsonl", b"{}\n", "line 1: no object with step, time and metrics"),
        # As after a kill.
        ("training.jsonl", lambda whole: whole + b'{"step": 9', "line 4: the last 10 bytes are incomplete"),
        ("trajectories.mmr", lambda whole: whole[:-100], "bytes are an incomplete record"),
        ("mismatch.mmr", lambda whole: whole[:-50], "bytes of mismatch.mmr are incomplete"),
    ],
)
def test_a_file_that_cannot_be_read_is_listed_with_its_reason_and_the_rest_is_reported(
    tmp_path: Path, name: str, content: Any, reason: str
) -> None:
    directory = trained_run(tmp_path / "run")
    whole = (directory / name).read_bytes() if callable(content) else b""
    (directory / name).write_bytes(content(whole) if callable(content) else content)
    result = run(directory)
    assert result.exit_code == 0, result.output
    (listed,) = [line for line in result.output.splitlines() if "not in the report" in line]
    assert f"{name}" in listed
    assert reason in listed
    page = read(directory / "report.html")
    assert reason in page.text
    assert "values: Environment reward" in page.text
    assert ("which does not say whether it is complete" in page.text) == (name == "summary.json")


def test_directories_in_place_of_files_are_listed_and_the_rest_is_reported(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    with RecordWriter(directory / "trajectories.mmr") as writer:
        writer.append([episode(0)])
    names = ("summary.json", "metrics.jsonl", "training.jsonl", "runner_metrics.jsonl", "mismatch.mmr")
    for name in names:
        (directory / name).mkdir()
    problems = write_report(directory).problems
    assert sorted(problem.partition(":")[0] for problem in problems) == sorted(names)
    assert "values: Length" in read(directory / "report.html").text


@pytest.mark.filterwarnings("error")
def test_times_and_entropies_of_any_size_are_reported(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    times = [(1e308, 1e308), (-1e308, 0.0), (1e9, 1e300), (1e9, 1.5), (1e300, 1e300)]
    with RecordWriter(directory / "trajectories.mmr") as writer:
        for number, (started_at, seconds) in enumerate(times):
            one = episode(number)
            one.started_at, one.seconds = started_at, seconds
            one.nodes[1] = replace(one.nodes[1], extras={"entropy": np.array([1e308, 1e308])})
            writer.append(one)
    result = run(directory)
    assert result.exit_code == 0, result.output
    page = read(directory / "report.html")
    assert "nan" not in page.text


@pytest.mark.filterwarnings("error")
def test_rewards_up_to_the_largest_float_have_a_mean_and_those_of_1e150_are_not_drawn(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    overflows = episode(2, reward=1.5e308)
    overflows.turns.append(replace(overflows.turns[0]))
    with RecordWriter(directory / "trajectories.mmr") as writer:
        writer.append([episode(0, reward=1e308), episode(1, reward=1.6e308), overflows])
    row = group_line({"part": [1e308] * 4}, 1e308, 1.6e308, math.inf, math.nan)
    (directory / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    result = run(directory)
    assert result.exit_code == 0, result.output
    page = read(directory / "report.html")
    assert "mean environment reward1.30e+308" in page.text
    assert "standard deviation of the environment reward3.00e+307" in page.text
    assert "episodes whose environment reward is not finite, left out of the mean1" in page.text
    assert "each is unknown, infinite, or 1e150 or more" in page.text
    assert "infinite" in page.text  # in the row of the episode
    assert [line for tag, line in page.elements if tag in ("polyline", "circle")]
    index = re.search(r'id="index">(.*?)</script>', (directory / "viewer.html").read_text("utf-8"))
    assert index is not None
    assert [one["reward"] for one in json.loads(index[1])["episodes"]] == [1e308, 1.6e308, None]


def test_steps_of_a_warm_start_and_evaluations_are_no_training_steps(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    with TrainingLog(directory) as log:
        for step in (-1, 0):
            log.write(step, {"supervised_loss": 1.0})
        log.write(0, {"held_out_reward": 0.1, "held_out_success": 0.1})
        log.write(1, {"loss": 0.5, "held_out_reward": 0.2})
    assert write_report(directory).steps == 1


@given(st.text())
def test_a_text_has_no_markup_and_no_invisible_character(text: str) -> None:
    page = html_page("title", [("section", [Text(text)])]).decode()
    (found,) = re.findall(r"<p>(.*)</p>", page, re.DOTALL)
    assert not set(found) & set("<>\"'\x00\x1b\u202e\u2066\u200b\u3164")
    assert found.replace("\n", "").isprintable()


def test_an_axis_of_steps_has_no_tick_between_two_steps() -> None:
    html = drawn(Chart("t", "step", [1, 2, 3], [Line("y", [0.5, 1.5, 0.5])]))
    bottom = [label for label in re.findall(r'text-anchor="middle">(.*?)</text>', html) if label != "step"]
    assert bottom == ["1", "2", "3"]


@given(st.lists(st.floats(), min_size=1, max_size=30))
def test_every_list_of_numbers_can_be_drawn(values: list[float]) -> None:
    html = drawn(Chart("title", "x", list(range(len(values))), [Line("line", values)]))
    assert Reader(f"<main>{html.partition('</main>')[0]}</main>").unclosed == []
    assert not re.search(r'"[^"]*\b(nan|inf)\b', html)


def figures_of(count: int, **changed: object):
    from rollouts.report.figures import episode_figures

    one = episode_figures(Trajectory("one"), 0, 0, 0)
    return [replace(one, number=number, episode_id=str(number), **changed) for number in range(count)]


@pytest.mark.slow
@given(st.integers(1, 300))
def test_the_points_of_a_curve_cover_every_episode_once(count: int) -> None:
    episodes = [replace(each, environment_reward=float(each.number)) for each in figures_of(count)]
    reward = episode_charts(episodes)[0]
    covered = [int(end) for name in reward.names for end in re.findall(r"\d+", name)]
    assert (min(covered), max(covered)) == (0, count - 1)
    assert len(reward.xs) == min(count, 48)


def test_each_metric_of_the_episodes_has_a_curve_with_a_gap_where_an_episode_lacks_it() -> None:
    episodes = [*figures_of(1, metrics={"steps": 3.0}), *figures_of(1, metrics={})]
    chart = episode_charts(episodes)[-1]
    assert chart.title == "Metric steps"
    np.testing.assert_array_equal(chart.lines[0].ys, [3.0, math.nan])


def test_the_viewer_gets_the_linked_episodes_first_and_no_more_than_it_holds() -> None:
    episodes = figures_of(2000)
    linked = [episodes[7], episodes[1999]]
    chosen = choose_episodes(episodes, linked)
    numbers = [each.number for each in chosen]
    assert numbers == sorted(numbers)
    assert len(chosen) == MAX_EPISODES
    assert {7, 1999} <= set(numbers)
    long = [replace(each, tokens=2_000_000) for each in episodes]
    assert [each.number for each in choose_episodes(long, [long[7]])] == [7]
