"""`rollouts eval` of an adapter, in this process and at a server, with and without a configuration."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_server import EngineVLLM
from fake_server import LOAD
from make_adapter import make_adapter, merged_checkpoint
from run_config.conftest import forgotten_modules as forgotten_modules  # as for the tests of runs
from server_thread import served
from typer.testing import CliRunner

from rollouts.cli.main import app
from rollouts.engines.local import LocalEngine
from rollouts.scoring import score
from rollouts.trajectory.tree import Trajectory
from transport import read_records

CONFIG = """
tasks = { kind = "jsonl", path = "tasks.jsonl" }
environment = { kind = "scored_prompt", rewards = [{ name = "score", function = "score.py:score" }] }
engine = { kind = "local", directory = "base" }
renderer = { model = "base" }
sampling = { max_tokens = 8 }
output = { directory = "out" }

[train]
steps = 1
groups = 1
"""


@pytest.fixture
def project(tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: a file of a training, its base model, and an adapter."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base").symlink_to(tiny_model_dir)
    (tmp_path / "train.toml").write_text(CONFIG)
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "2 + 2?"}\n{"prompt": "Sing."}\n')
    (tmp_path / "score.py").write_text("def score(completion, task):\n    return len(completion['content'])\n")
    config = make_adapter(tmp_path / "best", tiny_model_dir, seed=1) / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "base_model_name_or_path": str(tmp_path / "base")}))
    return tmp_path


def evaluated(*arguments: str, out: str) -> list[Trajectory]:
    """The episodes of `rollouts eval`, which writes them to `out`."""
    result = CliRunner().invoke(app, ["eval", *arguments])
    assert result.exit_code == 0, result.output
    return [episode for group in read_records(f"{out}/trajectories.mmr") for episode in group]


def mismatch(episodes: list[Trajectory], directory: Path) -> float:
    """The largest difference between the log-probabilities of sampled tokens and those of a checkpoint, in nats."""

    async def differences() -> list[Any]:
        engine = LocalEngine.from_pretrained(directory)
        found = []
        for episode in episodes:
            (scores,) = await score(episode, engine)
            sampled = np.concatenate([node.logprobs for node in episode.nodes])
            found.append(np.abs(scores.logprobs[-len(sampled) :] - sampled).max())
        await engine.close()
        return found

    return float(max(asyncio.run(differences())))


@pytest.mark.slow
def test_the_tokens_of_an_evaluated_adapter_have_its_log_probabilities(project: Path) -> None:
    merged = merged_checkpoint(project / "merged", project / "base", project / "best")
    of_file = evaluated("train.toml", "--model", "best", out="evaluations/train-best")
    of_options = evaluated("tasks.jsonl", "--score", "score.py", "--model", "best", out="evaluations/tasks-best")
    for episodes in (of_file, of_options):
        assert len(episodes) == 2
        assert mismatch(episodes, merged) < 1e-4
        assert mismatch(episodes, project / "base") > 1e-1  # what the episodes of the model alone would have
    results = json.loads((project / "evaluations/train-best/results.json").read_text())
    assert results["configuration"]["engine"]["adapter"] == str(project / "best")


@pytest.mark.slow
def test_a_server_samples_with_the_adapter_and_has_none_after_the_evaluation(project: Path) -> None:
    with served(EngineVLLM(project / "base", lora=True)) as server:
        evaluated("train.toml", "--model", "best", "--base-url", server.base_url, out="evaluations/train-best")
    assert [seen.json["lora_path"] for seen in server.requests if seen.path == LOAD] == [str(project / "best")]
    (sampled_by,) = {seen.json["model"] for seen in server.generations[-2:]}  # before them, what the server can
    assert sampled_by.startswith("adapter-")
    assert not server.adapters


def test_a_run_that_trains_refuses_a_model_with_an_adapter(project: Path) -> None:
    result = CliRunner().invoke(app, ["train", "train.toml", "--set", "engine.adapter=best"])
    assert result.exit_code == 2
    assert "engine.adapter: a new adapter is trained; remove the key" in result.output
