"""Environment reward, group reward and total reward have these names, and equal values, in all outputs of a run."""

import json
import re
from pathlib import Path

import pytest
from run_config_files import FOURS, rows_of, run, summary_of, write_run
from typer.testing import CliRunner

from rollouts.cli.main import app

# The total reward of the first episode of each group is higher by 2: on average by 1 in groups of two.
GROUP_REWARD = '[[group_rewards]]\nname = "first"\nfunction = "first_env:first"\nweight = 2.0\n'
FIRST = "def first(episodes):\n    return [1.0] + [0.0] * (len(episodes) - 1)\n"
MEANS = {"environment": 0.5, "group": 1.0, "total": 1.5}


@pytest.mark.slow
def test_every_output_of_a_run_with_group_rewards_names_its_rewards_alike(tmp_path: Path) -> None:
    (tmp_path / "first_env.py").write_text(FIRST)
    result = run(write_run(tmp_path, FOURS + GROUP_REWARD))
    assert result.exit_code == 0, result.output
    solved, unsolved = sorted(rows_of(tmp_path), key=lambda row: row["task_id"])
    assert (solved["environment_rewards"], unsolved["environment_rewards"]) == ([1.0, 1.0], [0.0, 0.0])
    assert (solved["total_rewards"], unsolved["total_rewards"]) == ([3.0, 1.0], [2.0, 0.0])
    for row in (solved, unsolved):
        assert (row["group_rewards"], row["reward_parts"]) == ([2.0, 0.0], {"first": [1.0, 0.0]})
    summary = summary_of(tmp_path)
    last = json.loads((tmp_path / "out/runner_metrics.jsonl").read_text().splitlines()[-1])["metrics"]
    report = (tmp_path / "out/report.html").read_text()
    for name, mean in MEANS.items():
        assert summary[f"{name}_reward_mean"] == mean
        assert last[f"{name}_reward_mean"] == mean
        assert re.search(rf"^{name} reward mean +{mean:.3f}$", result.stdout, re.MULTILINE)
        assert f"<dt>mean {name} reward</dt><dd>{mean:g}</dd>" in report
    assert "reward total 1.500, environment 0.500, group 1.000, first 0.500" in result.stdout
    listed = json.loads(CliRunner().invoke(app, ["traj", "ls", str(tmp_path / "out"), "--json"]).stdout)
    assert sum(episode["environment_reward"] for episode in listed) / len(listed) == MEANS["environment"]
