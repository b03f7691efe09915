"""The summary of a run: its figures for rewards of any size, its errors, and its file."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from rollouts.cli.run.summary import print_summary, summarise, write_summary
from rollouts.observability.group_metrics import GroupMetrics, stored_task_data

ROW: dict[str, Any] = {
    **dict.fromkeys(("done", "truncated", "failed", "turns", "tokens", "sampled_tokens", "images"), 1),
    "task_id": "t",
    "attempts": [1],
    "failed_episodes": [0],
    "errors": [],
    "total_rewards": [0.0],
    "environment_rewards": [0.0],
    "group_rewards": [0.0],
    "reward_parts": {},
}


def summary_of_rows(*rows: dict[str, Any]) -> dict[str, Any]:
    groups = [GroupMetrics.model_validate(row) for row in rows]
    return summarise(groups, complete=True, process_seconds=1.0, metrics={})


@pytest.mark.filterwarnings("error")
def test_rewards_of_any_size_have_a_mean_and_those_that_are_not_finite_are_counted(tmp_path: Path) -> None:
    rewards = [1e308, 1.6e308, math.inf, math.nan]
    parts = {"part": [1e308, 1e308, math.nan, math.nan], "lost": [math.inf] * 4}
    row = {**ROW, "total_rewards": rewards, "environment_rewards": rewards, "group_rewards": [0.0] * 4}
    row["attempts"] = [1] * 4
    summary = summary_of_rows({**row, "reward_parts": parts})
    assert summary["total_reward_mean"] == pytest.approx(1.3e308)
    assert summary["total_reward_std"] == pytest.approx(3e307)
    assert summary["rewards_not_finite"] == 2
    assert summary["reward_parts"] == {"lost": None, "part": pytest.approx(1e308)}
    write_summary(tmp_path / "summary.json", summary)
    json.loads((tmp_path / "summary.json").read_text(), parse_constant=pytest.fail)
    printed = io.StringIO()
    print_summary(summary, Console(file=printed, width=80))
    assert "1.3e+308" in printed.getvalue()


def test_a_summary_that_cannot_be_written_leaves_the_earlier_one(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_summary(path, {"complete": True})
    with pytest.raises(TypeError):
        write_summary(path, {"complete": object()})
    assert json.loads(path.read_text()) == {"complete": True}
    assert [file.name for file in tmp_path.iterdir()] == ["summary.json"]


# The errors in the summary of a run.


# Lines of metrics.jsonl.


@pytest.mark.parametrize("column", ["attempts", "environment_rewards", "group_rewards", "reward_parts"])
def test_a_line_with_a_reward_for_each_of_other_episodes_is_refused(column: str) -> None:
    row = {**ROW, "total_rewards": [0.0, 1.0], "environment_rewards": [0.0, 1.0], "group_rewards": [0.0, 0.0]}
    row["attempts"] = [1, 1]
    assert GroupMetrics.of_line(json.dumps(row)).total_rewards == [0.0, 1.0]
    short: Any = {"reward_parts": {"part": [0.0]}, "attempts": [1]}.get(column, [0.0])
    with pytest.raises(ValueError, match=f"1 {column}.* for 2 total rewards"):
        GroupMetrics.of_line(json.dumps({**row, column: short}))


# The data of a task in a line.


def test_what_json_has_of_the_data_of_a_task_is_in_its_line() -> None:
    data = {"question": "how many?", "answer": np.int64(3), 7: [1.5, None, True], "image": b"PNG", "pixels": np.ones(2)}
    expected = {"question": "how many?", "answer": 3, "7": [1.5, None, True], "image": None, "pixels": None}
    assert stored_task_data(data) == expected
    assert stored_task_data(object()) is None


def test_the_data_of_a_task_has_an_end() -> None:
    (text,) = stored_task_data(["x" * 1_000_000])
    assert len(text) < 10_100
    assert stored_task_data(["x" * 10_000] * 200) is None
    endless: list[Any] = []
    endless.append(endless)
    json.dumps(stored_task_data(endless))
