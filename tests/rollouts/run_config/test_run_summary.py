"""The summary of a run: its figures for rewards of any size, its errors, and its file."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rollouts.cli.run.output import print_summary, summarise, write_summary

ROW: dict[str, Any] = {
    **dict.fromkeys(("done", "truncated", "failed", "turns", "tokens", "sampled_tokens", "images"), 1),
    "attempts": [1],
    "errors": [],
    "reward_parts": {},
}


@pytest.mark.filterwarnings("error")
def test_rewards_of_any_size_have_a_mean_and_those_that_are_not_finite_are_counted(tmp_path: Path) -> None:
    rewards = [1e308, 1.6e308, math.inf, math.nan]
    row = {**ROW, "rewards": rewards, "reward_parts": {"part": [1e308, 1e308], "lost": [math.inf]}}
    summary = summarise([row], complete=True, seconds=1.0, metrics={})
    assert summary["reward_mean"] == pytest.approx(1.3e308)
    assert summary["reward_std"] == pytest.approx(3e307)
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


def test_an_error_that_quotes_a_million_characters_is_shortened_in_the_summary() -> None:
    text = "EnvironmentFailedError: Game.step raised ValueError: begin" + "W" * 1_000_000 + "end"
    counts = dict.fromkeys(("done", "truncated", "turns", "tokens", "sampled_tokens", "images"), 0)
    row = {"attempts": [1], "failed": 1, "rewards": [0.0], "reward_parts": {}, "errors": [text], **counts}
    summary = summarise([row, row], complete=True, seconds=1.0, metrics={})
    error = summary["errors"]["EnvironmentFailedError"]
    assert error["episodes"] == 2
    assert error["example"].startswith("EnvironmentFailedError: Game.step raised ValueError: beginWWW")
    assert error["example"].endswith("WWWend")
    assert "characters left out" in error["example"]
    assert len(error["example"]) < 1100
    output = io.StringIO()
    print_summary(summary, Console(file=output, width=80))
    assert "characters left out" in output.getvalue()
    assert len(output.getvalue()) < 5000


def test_an_error_of_usual_length_is_whole_in_the_summary() -> None:
    text = "EngineFailedError: " + "x" * 500
    counts = dict.fromkeys(("done", "truncated", "turns", "tokens", "sampled_tokens", "images"), 0)
    row = {"attempts": [1], "failed": 1, "rewards": [0.0], "reward_parts": {}, "errors": [text], **counts}
    assert summarise([row], complete=True, seconds=1.0, metrics={})["errors"]["EngineFailedError"]["example"] == text
