"""`rollouts compare`: what it prints and writes, names with control characters, and what it refuses."""

import json
import re
from pathlib import Path

import pytest
from click.testing import Result
from evaluation.compared_runs import add_results, line, write_run
from report.report_runs import HOSTILE
from run_config.run_config_files import CONFIG
from run_config.run_config_files import write_run as write_configuration
from typer.testing import CliRunner

from rollouts.cli.main import app
from rollouts.evaluation import Comparison


def compare(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["compare", *map(str, arguments)])


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    first = write_run(tmp_path / "before", {"1": [0, 1], "2": [0, 0], "3": [1, 1], "4": [1, 0]})
    second = write_run(tmp_path / "after", {"1": [1, 1], "2": [1, 1], "3": [1, 0], "4": [1, 0]}, complete=False)
    return [first, second]


def rows_of(output: str, title: str) -> list[list[str]]:
    """The cells of the table whose first heading is `title`."""
    lines = output.splitlines()
    first = next(number for number, text in enumerate(lines) if text.split("  ")[0] == title)
    return [re.split(r"\s{2,}", text) for text in lines[first:] if text]


def test_what_differs_is_printed_before_any_number_and_nothing_is_written(runs: list[Path], tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    result = compare(*runs)
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0] == "- after: it is not complete: not all of its tasks were run"
    assert rows_of(result.output, "figure")[1][:4] == ["total reward", "0.500", "0.750", "+0.250"]
    increases = next(number for number, text in enumerate(lines) if "Largest increases" in text)
    assert lines[increases + 2].split() == ["2", "0.000", "1.000", "+1.000"]
    assert sorted(tmp_path.rglob("*")) == before


def test_the_smallest_p_that_few_tasks_allow_is_printed_for_paired_runs(tmp_path: Path) -> None:
    for name, reward in (("a", 0), ("b", 1)):
        write_run(tmp_path / name, {str(number): [reward] for number in range(8)})
    said = "The smallest p that so few tasks allow is 0.008:"
    for options, is_said in ((), True), (("--unpaired",), False):
        assert (said in " ".join(compare(tmp_path / "a", tmp_path / "b", *options).output.split())) == is_said


def test_json_on_standard_output_is_all_that_is_printed(runs: list[Path], tmp_path: Path) -> None:
    result = compare(*runs, "--json", "-")
    comparison = Comparison.model_validate_json(result.output)
    against = comparison.against_baseline[0]
    assert against.differences.pass_at_k[1].difference.value == 0.25
    assert json.loads(result.output)["version"] == 1
    compare(*runs, "--json", tmp_path / "c.json")
    assert Comparison.model_validate_json((tmp_path / "c.json").read_text("utf-8")) == comparison


def test_options_of_the_comparison_arrive(runs: list[Path]) -> None:
    options = ["--threshold", 0.5, "--failed", "exclude", "--k", 2, "--unpaired", "--json", "-"]
    comparison = Comparison.model_validate_json(compare(*runs, *options).output)
    against = comparison.against_baseline[0]
    assert (comparison.threshold, comparison.failed_episodes, against.paired) == (0.5, "exclude", False)
    assert list(against.differences.pass_at_k) == [2]


def test_control_characters_in_names_do_nothing_on_a_terminal(tmp_path: Path) -> None:
    hostile = HOSTILE.text.replace("\x00", "")
    first = write_run(tmp_path / "a", [line(hostile, [0.0], reward_parts={hostile: [0.0]}), line("2", [0.0])])
    second = write_run(
        tmp_path / "b",
        [line(hostile, [1.0], reward_parts={hostile: [1.0]}), line("2", [0.0])],
        configuration={"sampling": {hostile: hostile}},
    )
    result = compare(first, second)
    assert result.exit_code == 0, result.output
    assert not set(result.output) & {"\x1b", "\u202e"}


@pytest.mark.slow
def test_a_run_of_rollouts_run_stores_its_configuration_for_comparisons(tmp_path: Path) -> None:
    hotter = CONFIG.replace("temperature = 0.5", "temperature = 0.25")
    assert hotter != CONFIG
    for name, config in (("a", CONFIG), ("b", hotter)):
        path = write_configuration(tmp_path / name, config)
        assert CliRunner().invoke(app, ["run", str(path)]).exit_code == 0
    outputs = [next((tmp_path / name).rglob("summary.json")).parent for name in "ab"]
    result = compare(*outputs)
    assert result.exit_code == 0, result.output
    assert "sampling.temperature: 0.5 in" in result.output
    assert "not known" not in result.output


def test_bad_input_is_one_line_with_value_place_and_cure_and_exit_code_2(runs: list[Path], tmp_path: Path) -> None:
    old = write_run(tmp_path / "old", {"1": [1]})
    add_results(old, samples=1)
    values = json.loads((old / "results.json").read_text("utf-8"))
    (old / "results.json").write_text(json.dumps({**values, "version": 0}), "utf-8")
    for arguments, reason in {
        (runs[0],): "pass at least two directories, the baseline first",
        (runs[0], runs[0]): "name each run once",
        (runs[0], tmp_path / "none"): "there is no such directory; name the output directory",
        (runs[0], runs[0] / "metrics.jsonl"): "there is no such directory",
        (runs[0], tmp_path): "it has no metrics.jsonl and no trajectories.mmr",
        (runs[0], f"{runs[0]}@7"): "no group was sampled by the weights of version '7'; it has groups of the versions",
        (runs[0], f"{runs[0]}x@7"): "of RUN@VERSION the part before @",
        (runs[0], old): "version: Input should be 1); `rollouts eval ... --resume`",
        (*runs, "--failed", "no"): "failed is 'no'; pass one of zero, exclude",
        (*runs, "--k", 3): "k is 3; pass at most 2",
        (*runs, "--threshold", "nan"): "threshold is nan",
        (*runs, "--json", tmp_path / "none" / "c.json"): "No such file or directory",
    }.items():
        result = compare(*arguments)
        assert result.exit_code == 2, arguments
        assert reason in " ".join(result.stderr.split())
