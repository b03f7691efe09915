"""Directories of runs for the tests of comparisons."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollouts.evaluation import Tally
from rollouts.observability.group_metrics import GroupMetrics

CONFIGURATION: dict[str, Any] = {
    "engine": {"kind": "local", "directory": "model"},
    "sampling": {"max_tokens": 64, "temperature": 1.0},
    "template": "0123456789abcdef",
    "group_size": 4,
}


def line(task_id: str, rewards: Sequence[float], failed: Sequence[int] = (), **values: Any) -> dict[str, Any]:
    """A line of metrics.jsonl of a group whose rewards are those of its environment."""
    count = len(rewards)
    return {
        "task_id": task_id,
        "task_data": {"question": task_id},
        "total_rewards": list(rewards),
        "environment_rewards": list(rewards),
        "group_rewards": [0.0] * count,
        "reward_parts": {"exact": list(rewards)},
        "attempts": [1] * count,
        "done": count - len(failed),
        "truncated": 0,
        "failed": len(failed),
        "failed_episodes": list(failed),
        "errors": ["EngineError: it broke"] * len(failed),
        "turns": count,
        "tokens": 10 * count,
        "sampled_tokens": 5 * count,
        "images": 0,
        "oldest_version": "0",
        **values,
    }


def write_run(
    directory: Path,
    groups: Mapping[str, Sequence[float]] | Sequence[Mapping[str, Any]],
    *,
    complete: bool = True,
    configuration: Mapping[str, Any] | None = CONFIGURATION,
) -> Path:
    """A run of `rollouts run` with these rewards by task, or these lines."""
    directory.mkdir(parents=True)
    lines = [line(*group) for group in groups.items()] if isinstance(groups, Mapping) else list(groups)
    (directory / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines), "utf-8")
    summary = (
        {"complete": complete} if configuration is None else {"complete": complete, "configuration": configuration}
    )
    (directory / "summary.json").write_text(json.dumps(summary), "utf-8")
    return directory


def add_results(directory: Path, *, samples: int, **options: Any) -> None:
    """The results.json that `rollouts eval` writes for the groups of the directory."""
    tally = Tally(samples=samples, **options)
    for text in (directory / "metrics.jsonl").read_text("utf-8").splitlines():
        tally.add(GroupMetrics.model_validate_json(text))
    tally.results(complete=True, configuration=CONFIGURATION).write(directory / "results.json")
