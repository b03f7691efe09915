"""What all outputs of a run have: the numbers of cut turns, and environment, group and total rewards by these names."""

import json
import re
from pathlib import Path

import pytest
from run_config_files import FOURS, groups_of, rows_of, run, summary_of, write_run
from typer.testing import CliRunner

from rollouts.cli.main import app
from rollouts.observability.run_metrics import length_stops_warning


@pytest.mark.slow
@pytest.mark.parametrize(("max_tokens", "share"), [(16, 0), (1, 1)])
def test_every_output_of_a_run_has_the_number_of_cut_turns(tmp_path: Path, max_tokens: int, share: int) -> None:
    result = run(write_run(tmp_path, FOURS.replace("max_tokens = 16", f"max_tokens = {max_tokens}")))
    assert result.exit_code == 0, result.output
    episodes = [episode for group in groups_of(tmp_path) for episode in group]
    turns = sum(episode.num_turns for episode in episodes)
    cut = turns * share
    assert sum(episode.length_stops for episode in episodes) == cut
    assert sum(row["length_stops"] for row in rows_of(tmp_path)) == cut
    assert summary_of(tmp_path)["length_stops"] == cut
    last = json.loads((tmp_path / "out" / "runner_metrics.jsonl").read_text().splitlines()[-1])
    assert last["metrics"]["length_stops"] == cut
    report = (tmp_path / "out" / "report.html").read_text()
    assert f"{cut:,} ({share:.1%} of the turns)" in report
    warning = f"{cut} of {turns} turns (100%) were cut"
    assert (warning in report, f"warning: {warning}" in result.stdout) == (bool(cut), bool(cut))
    assert (f"{cut} cut at max_tokens" in result.stdout) == bool(cut)
    listed = CliRunner().invoke(app, ["traj", "ls", str(tmp_path / "out"), "--json"])
    assert sum(episode["length_stops"] for episode in json.loads(listed.stdout)) == cut


@pytest.mark.parametrize(
    ("cut", "turns", "warned"), [(0, 0, False), (0, 5, False), (1, 6, False), (1, 5, True), (5, 5, True)]
)
def test_the_warning_begins_at_a_fifth_of_the_turns(cut: int, turns: int, warned: bool) -> None:
    assert bool(length_stops_warning(cut, turns)) == warned


# Rewards.

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
