"""The files of a run: its summary, and the line of a group with the data of its task."""

import json
from typing import Any

import numpy as np
import pytest

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


# Lines of metrics.jsonl.


@pytest.mark.parametrize("column", ["attempts", "environment_rewards", "group_rewards", "reward_parts"])
def test_a_line_with_a_reward_for_each_of_other_episodes_is_refused(column: str) -> None:
    row = {**ROW, "total_rewards": [0.0, 1.0], "environment_rewards": [0.0, 1.0], "group_rewards": [0.0, 0.0]}
    row["attempts"] = [1, 1]
    assert GroupMetrics.model_validate_json(json.dumps(row)).total_rewards == [0.0, 1.0]
    short: Any = {"reward_parts": {"part": [0.0]}, "attempts": [1]}.get(column, [0.0])
    with pytest.raises(ValueError, match=f"1 {column}.* for 2 total rewards"):
        GroupMetrics.model_validate_json(json.dumps({**row, column: short}))


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
