"""The errors in the summary of a run."""

from __future__ import annotations

import io

from rich.console import Console

from rollouts.cli.run.output import print_summary, summarise


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
