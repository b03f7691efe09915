"""`rollouts run` against a server, which another process may give new weights."""

import contextlib
import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from engine_server import EngineVLLM
from fake_http import Response, Seen
from fake_server import GENERATE, FakeVLLM
from reserved_ports import reserved_port
from server_thread import served
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


def run(directory: Path, server: FakeVLLM, key: str, config: str = CONFIG, *options: str) -> Result:
    directory.mkdir(exist_ok=True)
    tiny_qwen3_vl(directory / "model", weights=False)
    (directory / "server_env.py").write_text(MODULE)
    (directory / "run.toml").write_text(config.replace("URL", server.base_url) if "URL" in config else config)
    return CliRunner().invoke(app, ["run", str(directory / "run.toml"), *options], env={"SERVER_KEY": key})


def test_a_run_samples_from_a_server_and_the_key_is_in_no_file_and_no_output(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    with served(EngineVLLM(tiny_model_dir, api_key=KEY)) as server:
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


def test_a_dry_run_starts_no_server_and_sends_it_nothing(tmp_path: Path) -> None:
    with served(FakeVLLM(api_key=KEY)) as server:
        start = f'base_url = "URL"\nstart = ["touch", "{tmp_path}/started"]'
        result = run(tmp_path, server, KEY, CONFIG.replace('base_url = "URL"', start), "--dry-run")
        assert server.connections == []
    assert result.exit_code == 0, result.output
    assert "1 image of 4 tokens" in result.stdout
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize(
    ("config", "key", "named", "cure"),
    [
        (CONFIG, "another", "engine.api_key_env", "set it to the server's key"),
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


# Several servers, and servers that the run starts.

VLLM_TABLE = 'kind = "vllm"\nbase_url = "URL"\napi_key_env = "SERVER_KEY"'
SERVE = Path(__file__).with_name("fake_vllm_serve.py")


def run_engine(directory: Path, server: FakeVLLM, engine: str, *options: str) -> Result:
    text = CONFIG.replace(VLLM_TABLE, engine).replace("server_env:messages", "server_env:text")
    return run(directory, server, KEY, text, *options)


def trajectories(directory: Path) -> list[Any]:
    return list(read_records(directory / "out/trajectories.mmr"))


def test_a_run_of_one_server_goes_on_with_a_fleet(tmp_path: Path) -> None:
    with served(FakeVLLM()) as one, served(FakeVLLM()) as two:
        first = run_engine(tmp_path, one, 'kind = "vllm"\nbase_url = "URL"', "--limit", "1")
        fleet = f'kind = "fleet"\nurls = ["{one.base_url}", "{two.base_url}"]'
        second = run_engine(tmp_path, one, fleet, "--resume")
    assert first.exit_code == 0, first.output
    assert second.exit_code == 0, second.output
    assert sorted(group[0].group_id for group in trajectories(tmp_path)) == ["0", "1", "2"]


@pytest.mark.slow
def test_a_fleet_of_which_one_server_is_down_runs_and_one_of_which_all_are_down_does_not(tmp_path: Path) -> None:
    down = [f"http://127.0.0.1:{reserved_port()}" for _ in range(2)]
    with served(FakeVLLM()) as server:
        partly = run_engine(tmp_path / "partly", server, f'kind = "fleet"\nurls = ["{down[0]}", "{server.base_url}"]')
        fully = run_engine(tmp_path / "fully", server, f'kind = "fleet"\nurls = ["{down[0]}",\n"{down[1]}"]')
    assert partly.exit_code == 0, partly.output
    assert len(trajectories(tmp_path / "partly")) == 3
    assert fully.exit_code == 2
    assert ": engine.urls: " in fully.stderr
    assert "Is the server running, and at this address?" in fully.stderr


def test_servers_that_differ_are_an_error_before_the_run(tmp_path: Path) -> None:
    with served(FakeVLLM()) as one, served(FakeVLLM(max_model_len=64)) as two:
        result = run_engine(tmp_path, one, f'kind = "fleet"\nurls = ["{one.base_url}", "{two.base_url}"]')
    assert result.exit_code == 2
    assert ": engine.urls: " in result.stderr
    assert "max_model_len" in result.stderr


def test_a_run_starts_its_servers_and_ends_them(tmp_path: Path) -> None:
    ports = [reserved_port() for _ in range(2)]
    servers = [
        f"""base_url = "http://127.0.0.1:{port}"
start = ["{sys.executable}", "{SERVE}", "{port}"]
environment = {{ SOME_SECRET = "{KEY}" }}
log = "server{number}.log"
"""
        for number, port in enumerate(ports)
    ]
    result = run_engine(tmp_path, FakeVLLM(), "\n[[engine.servers]]\n".join(('kind = "fleet"', *servers)))
    assert result.exit_code == 0, result.output
    assert len(trajectories(tmp_path)) == 3
    for number, port in enumerate(ports):
        assert "child " in (tmp_path / f"server{number}.log").read_text()
        with contextlib.closing(socket.socket()) as client, pytest.raises(ConnectionRefusedError):
            client.connect(("127.0.0.1", port))
    for path in (tmp_path / "out").rglob("*"):
        assert path.is_dir() or KEY.encode() not in path.read_bytes(), path


def test_a_server_that_cannot_be_started_is_an_error_with_the_end_of_its_log(tmp_path: Path) -> None:
    port = reserved_port()
    start = f'start = ["{sys.executable}", "{SERVE}", "{port}", "3"]'
    engine = f'kind = "fleet"\nservers = [{{ base_url = "http://127.0.0.1:{port}", {start} }}]'
    result = run_engine(tmp_path, FakeVLLM(), engine)
    assert result.exit_code == 2
    assert "engine.servers[0].start" in result.stderr
    assert "out of memory" in result.stderr
