"""`rollouts run --resume` where journal, trajectories and metrics have lost different groups, as after a power cut."""

import itertools
import json
import os
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
from run_config_files import FOURS, groups_of, rows_of, run, summary_of, write_run

from rollouts.runner.journal_file import JOURNAL_FILE
from transport import RecordReader, RecordWriter, read_records

NUMBERS = (4, 7, 1, 2, 3, 5)
TASKS = [f"number {number}" for number in NUMBERS]
GROUP_REWARD = '[[group_rewards]]\nname = "first"\nfunction = "first_env:first"\nweight = 2.0\n'
FIRST = "def first(episodes):\n    return [1.0] + [0.0] * (len(episodes) - 1)\n"


def write_run_of_six(directory: Path) -> Path:
    path = write_run(directory, FOURS + GROUP_REWARD)
    (directory / "first_env.py").write_text(FIRST)
    lines = [json.dumps({"name": name, "number": number}) for name, number in zip(TASKS, NUMBERS, strict=True)]
    (directory / "tasks.jsonl").write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def complete_run(tmp_path: Path) -> Path:
    """The configuration of a run of six tasks that is complete."""
    path = write_run_of_six(tmp_path)
    assert run(path).exit_code == 0
    return path


def figures_of(directory: Path) -> dict[str, dict[str, Any]]:
    """The lines of metrics.jsonl by task, without what depends on the clock; every task has one line."""
    rows = rows_of(directory)
    figures = {
        row["task_id"]: {key: value for key, value in row.items() if key != "time" and not key.endswith("_seconds")}
        for row in rows
    }
    assert len(figures) == len(rows)
    return figures


def change_records(path: Path, change: Callable[[Any], Any]) -> None:
    """Write a file anew, with what `change` makes of each record; None: without it."""
    with RecordReader(path) as reader:
        changed = [change(record) for record in reader]
    path.unlink()
    with RecordWriter(path) as writer:
        for record in changed:
            if record is not None:
                writer.append(record)


def lose(directory: Path, file: str, tasks: Collection[str]) -> None:
    """Lose what a file has of tasks: "journal" all of it, "deliveries" that they were delivered."""
    out = directory / "out"
    if file == "metrics":
        lines = (out / "metrics.jsonl").read_text().splitlines()
        lines = [line for line in lines if json.loads(line)["task_id"] not in tasks]
        (out / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    elif file == "trajectories":
        change_records(out / "trajectories.mmr", lambda group: None if group[0].group_id in tasks else group)
    else:

        def without(record: Any) -> Any:
            kind, value, *_ = record
            if kind == "closed":
                return kind, {task: reason for task, reason in value.items() if task not in tasks}
            name = value.task_id if kind == "task" else value
            return None if file == "journal" and kind in ("task", "attempt", "group") and name in tasks else record

        change_records(out / "journal" / JOURNAL_FILE, without)


LOSSES = [
    losses
    for count in (1, 2, 3)
    for losses in itertools.combinations(("deliveries", "trajectories", "metrics", "journal"), count)
    if not {"journal", "deliveries"} <= set(losses)
]


@pytest.mark.slow
@pytest.mark.parametrize("losses", LOSSES, ids="+".join)
def test_every_task_has_one_record_and_one_line_whatever_the_files_have_lost(
    tmp_path: Path, complete_run: Path, losses: tuple[str, ...]
) -> None:
    before = figures_of(tmp_path)
    for file in losses:
        lose(tmp_path, file, TASKS[1:4])
    assert run(complete_run, "--resume").exit_code == 0
    assert figures_of(tmp_path) == before
    assert sorted(group[0].group_id for group in groups_of(tmp_path)) == sorted(TASKS)
    assert summary_of(tmp_path)["groups"] == len(TASKS)
    assert summary_of(tmp_path)["complete"] is True


@pytest.mark.slow
@pytest.mark.parametrize("is_journal_lost", [False, True])
def test_files_that_have_lost_different_tails_agree_after_the_run_is_continued(
    tmp_path: Path, complete_run: Path, is_journal_lost: bool
) -> None:
    before = figures_of(tmp_path)
    files = [tmp_path / "out" / name for name in ("trajectories.mmr", "metrics.jsonl")]
    shutil.copytree(tmp_path / "out", tmp_path / "whole")
    for kept in ((0.4, 0.6), (0.8, 0.6), (1.0, 0.4), (0.6, 1.0)):
        shutil.rmtree(tmp_path / "out")
        shutil.copytree(tmp_path / "whole", tmp_path / "out")
        for file, part in zip(files, kept, strict=True):
            os.truncate(file, int(file.stat().st_size * part))
        if is_journal_lost:
            (tmp_path / "out/journal" / JOURNAL_FILE).unlink()
        result = run(complete_run, "--resume")
        assert result.exit_code == 0, result.stderr
        assert figures_of(tmp_path) == before
        assert sorted(group[0].group_id for group in groups_of(tmp_path)) == sorted(TASKS)


@pytest.mark.slow
def test_what_one_file_lacks_is_taken_from_the_others_and_only_lost_groups_are_run_again(
    tmp_path: Path, complete_run: Path
) -> None:
    lose(tmp_path, "deliveries", TASKS[2:3])
    lose(tmp_path, "trajectories", TASKS[:3])
    lose(tmp_path, "metrics", TASKS[2:])
    lose(tmp_path, "journal", TASKS[4:])
    result = run(complete_run, "--resume")
    assert "trajectories.mmr has lost the groups of 2 tasks, which are run again" in result.stderr
    assert "the journal still has them: number 4, number 7\n" in result.stderr
    assert "metrics.jsonl lacked the lines of 3 groups" in result.stderr
    assert summary_of(tmp_path)["metrics"]["episodes_started"] == 2 * 2
    assert run(complete_run, "--resume").stderr == ""


@pytest.mark.slow
def test_a_group_leaves_the_journal_when_its_record_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_run_of_six(tmp_path)
    flushed: list[set[str]] = []
    flush = RecordWriter.flush

    def note(writer: RecordWriter) -> None:
        flush(writer)
        flushed.append({group[0].group_id for group in groups_of(tmp_path)})
        records = list(read_records(tmp_path / "out/journal" / JOURNAL_FILE))
        closed = {task for kind, *values in records if kind == "closed" for task in values[0]}
        (last,) = flushed[-1] - closed
        assert last in {values[0] for kind, *values in records if kind == "group"}
        assert closed == flushed[-1] - {last}

    monkeypatch.setattr(RecordWriter, "flush", note)
    assert run(path).exit_code == 0
    assert len(flushed) == len(TASKS)


@pytest.mark.slow
def test_tasks_that_are_lost_and_not_run_again_are_named_and_the_run_is_not_complete(
    tmp_path: Path, complete_run: Path
) -> None:
    lose(tmp_path, "trajectories", TASKS[4:])
    result = run(complete_run, "--resume", "--limit", 4)
    (warning,) = (line for line in result.stderr.splitlines() if line.startswith("warning: "))
    assert "the groups of 2 tasks were lost" in warning
    assert warning.endswith("number 3, number 5")
    assert summary_of(tmp_path)["complete"] is False
    assert list(figures_of(tmp_path)) == [group[0].group_id for group in groups_of(tmp_path)]
    assert run(complete_run, "--resume").exit_code == 0
    assert summary_of(tmp_path)["complete"] is True
    assert sorted(figures_of(tmp_path)) == sorted(TASKS)


@pytest.mark.slow
def test_a_group_with_a_damaged_record_is_written_again(tmp_path: Path, complete_run: Path) -> None:
    file = tmp_path / "out/trajectories.mmr"
    before, content = figures_of(tmp_path), file.read_bytes()
    file.write_bytes(content.replace(b"number 1", b"number 8", 1))
    result = run(complete_run, "--resume")
    assert "trajectories.mmr has lost the groups of 1 task, which are run again" in result.stderr
    assert figures_of(tmp_path) == before


DAMAGES = {
    "bytes that are not UTF-8": (lambda line: line.replace(b"number", b"n\xffmber", 1), "Invalid JSON"),
    "a key is missing": (lambda line: line.replace(b'"total_rewards"', b'"rewardz"'), "total_rewards: Field required"),
}


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_line_is_an_error_before_anything_is_run_and_removing_it_cures_it(
    tmp_path: Path, damage: str
) -> None:
    path = write_run_of_six(tmp_path)
    assert run(path, "--limit", 3).exit_code == 0
    before = figures_of(tmp_path)
    summary = summary_of(tmp_path)
    metrics = tmp_path / "out/metrics.jsonl"
    lines = metrics.read_bytes().splitlines()
    change, reason = DAMAGES[damage]
    metrics.write_bytes(b"\n".join([lines[0], change(lines[1]), lines[2]]) + b"\n")
    result = run(path, "--resume")
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert f"{metrics}, line 2: " in line
    assert reason in line
    assert "remove the line" in line
    assert summary_of(tmp_path) == summary
    assert len(groups_of(tmp_path)) == 3
    metrics.write_bytes(b"\n".join([lines[0], lines[2]]) + b"\n")
    assert run(path, "--resume").exit_code == 0
    after = figures_of(tmp_path)
    assert sorted(after) == sorted(TASKS)
    assert {task: after[task] for task in before} == before
