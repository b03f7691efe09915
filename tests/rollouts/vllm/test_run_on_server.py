"""`rollouts run` against a server, which another process may give new weights."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from fake_http import Response, Seen
from fake_server import GENERATE, FakeVLLM
from model_server import ModelVLLM, Served
from typer.testing import CliRunner

from rollouts.cli.main import app
from rollouts.testing import tiny_qwen3_vl
from transport import read_records

KEY = "sk-of-the-server"
CONFIG = """\
group_size = 2
skip_group = "server_env:never"

[tasks]
kind = "import"
source = "server_env:TASKS"

[environment]
kind = "scored_prompt"
messages = "server_env:messages"
[[environment.rewards]]
name = "tokens"
function = "server_env:length"

[engine]
kind = "vllm"
base_url = "URL"
api_key_env = "SERVER_KEY"

[renderer]
model = "model"

[sampling]
max_tokens = 4

[output]
directory = "out"
"""
MODULE = """\
import numpy as np
from rollouts.task import Task

TASKS = [Task(str(number)) for number in range(3)]

def messages(task):
    image = np.full((32, 32, 3), int(task.task_id), np.uint8)
    return [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "What?"}]}]

def text(task):
    return [{"role": "user", "content": "What?"}]

def length(completion, task):
    return len(completion["content"])

def never(group):
    return False
"""


@contextmanager
def served(server: FakeVLLM) -> Iterator[FakeVLLM]:
    """The server on a thread of its own: the command runs an event loop itself."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    asyncio.run_coroutine_threadsafe(server.start(), loop).result(10)
    yield server
    asyncio.run_coroutine_threadsafe(server.stop(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()


def run(directory: Path, server: FakeVLLM, key: str, config: str = CONFIG, *options: str) -> Result:
    directory.mkdir(exist_ok=True)
    tiny_qwen3_vl(directory / "model", weights=False)
    (directory / "server_env.py").write_text(MODULE)
    (directory / "run.toml").write_text(config.replace("URL", server.base_url))
    return CliRunner().invoke(app, ["run", str(directory / "run.toml"), *options], env={"SERVER_KEY": key})


def test_a_run_samples_from_a_server_and_the_key_is_in_no_file_and_no_output(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    with served(ModelVLLM(Served(tiny_model_dir), api_key=KEY)) as server:
        result = run(tmp_path, server, KEY)
        requests = [seen for seen in server.requests if seen.path == GENERATE]
    assert result.exit_code == 0, result.output
    assert {seen.headers["authorization"] for seen in requests} == {f"Bearer {KEY}"}
    groups = list(read_records(tmp_path / "out/trajectories.mmr"))
    assert sorted(group[0].group_id for group in groups) == ["0", "1", "2"]
    assert all(len(list(episode.all_media())) == 1 for group in groups for episode in group)
    assert KEY not in result.output
    for path in (tmp_path / "out").rglob("*"):
        assert path.is_dir() or KEY.encode() not in path.read_bytes(), path


def test_a_dry_run_sends_the_server_nothing(tmp_path: Path) -> None:
    with served(FakeVLLM(api_key=KEY)) as server:
        result = run(tmp_path, server, KEY, CONFIG, "--dry-run")
        assert server.connections == 0
    assert result.exit_code == 0, result.output
    assert "1 image of 4 tokens" in result.stdout


@pytest.mark.parametrize(
    ("config", "key", "named", "cure"),
    [
        (CONFIG, "another", "engine.api_key_env", "vllm serve --api-key"),
        (CONFIG.replace('api_key_env = "SERVER_KEY"\n', ""), KEY, "engine.base_url", 'add api_key_env = "NAME"'),
    ],
    ids=["another key", "no key"],
)
def test_a_key_that_the_server_refuses_is_named_by_its_variable(
    tmp_path: Path, config: str, key: str, named: str, cure: str
) -> None:
    with served(FakeVLLM(api_key=KEY)) as server:
        result = run(tmp_path, server, key, config)
    assert result.exit_code == 2
    assert f": {named}: " in result.stderr
    assert cure in result.stderr
    assert KEY not in result.output


class UpdatedVLLM(FakeVLLM):
    """Another process gives it new weights after every completion."""

    def generated(self, seen: Seen, **options: Any) -> Response:
        response = super().generated(seen, **options)
        self.weight_version = str(int(self.weight_version) + 1)
        return response


@pytest.mark.parametrize(("mode", "is_limited"), [("", False), ('[mode]\nkind = "synchronous"\n', True)])
def test_a_mode_leaves_out_groups_of_earlier_weights_and_without_one_none_is_left_out(
    tmp_path: Path, mode: str, is_limited: bool
) -> None:
    text = CONFIG.replace("server_env:messages", "server_env:text")
    with served(UpdatedVLLM(weight_version="0")) as server:
        result = run(tmp_path, server, KEY, text + mode)
    assert result.exit_code == 0, result.output
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    stale = sum(count for name, count in summary["metrics"].items() if name.startswith("groups_stale/"))
    assert (stale > 0) == is_limited
    assert summary["groups"] + stale == 3
    assert ("groups stale: drop" in result.stdout) == is_limited
