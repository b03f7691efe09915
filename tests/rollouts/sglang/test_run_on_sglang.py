"""`rollouts run`, `eval` and `serve` against an SGLang server."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_sglang import FakeSGLang
from server_thread import served
from typer.testing import CliRunner

from rollouts.cli.main import app
from transport import RecordReader

_CONFIG = """\
group_size = 2
skip_group = "sglang_env:never"

[tasks]
kind = "import"
source = "sglang_env:TASKS"

[environment]
kind = "scored_prompt"
messages = "sglang_env:messages"
[[environment.rewards]]
name = "tokens"
function = "sglang_env:length"

[engine]
kind = "sglang"
base_url = "URL"

[renderer]
model = "MODEL"

[sampling]
max_tokens = 4

[output]
directory = "out"
"""
_MODULE = """\
from rollouts.task import Task

TASKS = [Task(f"task-{number}") for number in range(2)]


def messages(task):
    return [{"role": "user", "content": task.task_id}]


def length(completion, task):
    return len(completion["content"])


def never(group):
    return False
"""


@pytest.fixture
def server() -> Iterator[FakeSGLang]:
    with served(FakeSGLang()) as server:
        yield server


def test_a_run_samples_from_sglang_and_a_teacher_there_scores_its_episodes(
    server: FakeSGLang, tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sglang_env.py").write_text(_MODULE)
    config = tmp_path / "run.toml"
    teacher = '[teacher]\nengine = { kind = "sglang", base_url = "URL" }\nrenderer = { model = "MODEL" }\n'
    text = (_CONFIG + teacher).replace("URL", server.base_url).replace("MODEL", str(tiny_model_dir))
    config.write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    result = CliRunner().invoke(app, ["run", str(config)])
    assert result.exit_code == 0, result.output
    with RecordReader(tmp_path / "out" / "trajectories.mmr") as reader:
        episodes = [episode for group in reader for episode in group]
    assert len(episodes) == 4 <= len(server.requests)
    for episode in episodes:
        assert all("teacher_logprobs" in node.extras for node in episode.nodes)
        assert "teacher_kl" in episode.metrics


def test_an_evaluation_samples_from_a_fleet_of_sglang(
    server: FakeSGLang, tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sglang_score.py").write_text("def score(completion, task):\n    return 1.0\n")
    (tmp_path / "tasks.jsonl").write_text('{"question": "one"}\n{"question": "two"}\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    model = ["--model", str(tiny_model_dir), "--max-tokens", "2", "--out", "out"]
    urls = ["--base-url", server.base_url, "--base-url", f"{server.base_url}/proxied"]
    for engine in (urls[:2], urls):
        arguments = ["eval", "tasks.jsonl", "--score", "sglang_score.py", *model, "--engine", "sglang", *engine]
        result = CliRunner().invoke(app, [*arguments, "--dry-run"])
        assert result.exit_code == 0, result.output
    result = CliRunner().invoke(app, arguments[:-2])
    assert result.exit_code == 0, result.output
    assert len(server.requests) == 2
