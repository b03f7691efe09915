"""docs/run.md describes every key of the files of a run, and no others."""

import re
from pathlib import Path

import pytest
from run_config_files import CONFIG, rows_of, run, summary_of, write_run

DOCS = Path(__file__).parents[3] / "docs/run.md"


def documented_keys(heading: str) -> set[str]:
    """The names in the first column of the table below a heading."""
    section = DOCS.read_text().split(f"### `{heading}`\n")[1].split("\n### ")[0]
    cells = re.findall(r"^\| (`[^|]*) \|", section, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("run")
    assert run(write_run(directory, CONFIG)).exit_code == 0
    return directory


@pytest.mark.slow
def test_the_keys_of_the_lines_of_groups_are_those_of_the_documentation(directory: Path) -> None:
    for row in rows_of(directory):
        assert set(row) | {"teacher_kl"} == documented_keys("metrics.jsonl")  # test_teacher_of_run.py has it


def test_the_keys_of_the_summary_are_those_of_the_documentation(directory: Path) -> None:
    assert set(summary_of(directory)) | {"teacher_kl_mean"} == documented_keys("summary.json")


def test_the_durations_of_a_run_are_what_the_documentation_says(directory: Path) -> None:
    rows, summary = rows_of(directory), summary_of(directory)
    for name in ("episode_seconds", "engine_seconds"):
        assert summary[name] == pytest.approx(sum(row[name] for row in rows))
    for row in rows:
        assert 0 < row["engine_seconds"] <= row["episode_seconds"]
        assert row["group_seconds"] <= row["episode_seconds"] + summary["process_seconds"]
    assert summary["metrics"]["run_seconds"] <= summary["process_seconds"]
