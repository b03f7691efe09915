"""`rollouts run --workers` and `rollouts worker` as processes."""

from __future__ import annotations

import asyncio
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from reserved_ports import reserved_address
from run_config_files import CONFIG, write_run
from typer.testing import CliRunner

from rollouts.cli.main import app
from rollouts.workers.link import LinkWorkers
from transport import RecordReader

START = "from rollouts.cli.main import main; main()"
MOST_SECONDS = 120
TASKS = 8

ENVIRONMENT = f"""\
import asyncio, os, pathlib
from rollouts import StepResult
from rollouts.task import Task

HERE = pathlib.Path(__file__).parent
TASKS = [Task(str(number)) for number in range({TASKS})]

class Wait:
    "Waits for a file `go` in the last tasks, and writes down the process that it is in."
    def __init__(self, task, tries):
        self.task = task
    def reset(self, seed):
        return [{{"role": "user", "content": "Hi"}}]
    async def step(self, assistant):
        with open(HERE / "played", "a") as played:
            played.write(f"{{os.getpid()}} {{self.task.task_id}}\\n")
        while int(self.task.task_id) >= {TASKS} // 2 and not (HERE / "go").exists():
            await asyncio.sleep(0.01)
        return StepResult(reward=1.0, done=True)
"""


class Processes:
    """Commands in processes of their own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._started: list[subprocess.Popen[str]] = []

    def start(self, *arguments: object) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", START, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.directory,
        )
        self._started.append(process)
        return process

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + MOST_SECONDS
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def close(self) -> None:
        for process in self._started:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    made = Processes(tmp_path)
    yield made
    made.close()


def write_waiting_run(directory: Path, workers: str) -> Path:
    config = CONFIG.replace("guess_env:Guess", "wait_env:Wait")
    section = 'kind = "jsonl"\npath = "tasks.jsonl"\nid_key = "name"'
    assert section in config
    path = write_run(directory, config.replace(section, 'kind = "import"\nsource = "wait_env:TASKS"') + workers)
    (directory / "wait_env.py").write_text(ENVIRONMENT)
    return path


def played(directory: Path) -> list[tuple[int, int]]:
    """Process and task of each step so far."""
    path = directory / "played"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(process), int(task)) for process, task in map(str.split, lines)]


@pytest.mark.slow
def test_a_run_on_worker_processes_is_complete_though_one_is_killed(processes: Processes, tmp_path: Path) -> None:
    assert CliRunner().invoke(app, ["keys", str(tmp_path / "keys")]).exit_code == 0
    address = reserved_address()
    section = f'\n[workers]\nlisten = "{address}"\nkey_file = "keys/orchestrator-keys.toml"\n'
    config = write_waiting_run(tmp_path, section)
    run = processes.start("run", config)
    arguments = ("worker", "--connect", address, "--key-file", "keys/worker-keys.toml", "--slots", 2, config.name)
    first, second = (processes.start(*arguments) for _ in range(2))

    # All slots of both workers have an episode that waits.
    processes.until(lambda: sum(task >= TASKS // 2 for _, task in played(tmp_path)) == 4)
    assert {process for process, _ in played(tmp_path)} == {first.pid, second.pid}
    os.kill(first.pid, signal.SIGKILL)
    (tmp_path / "go").touch()
    output = run.communicate(timeout=MOST_SECONDS)[0]
    assert run.returncode == 0, output
    assert f"rollouts worker --connect {address}" in output
    assert second.wait(MOST_SECONDS) == 0, "the worker ends with the run"
    worker_output = second.communicate()[0]
    assert f"connected to the orchestrator at {address}" in worker_output
    assert "the run of the orchestrator" in worker_output

    with RecordReader(tmp_path / "out" / "trajectories.mmr") as groups:
        episodes = [episode.episode_id for group in groups for episode in group]
    assert sorted(episodes) == sorted(f"{task}/{index}.0" for task in range(TASKS) for index in range(2))
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["failed"] == 0
    assert summary["episodes"] == TASKS * 2


@pytest.mark.slow
def test_a_worker_ends_with_a_line_and_a_code_of_its_own_where_there_is_no_run(
    processes: Processes, tmp_path: Path
) -> None:
    config = write_run(tmp_path)
    worker = processes.start("worker", "--connect", reserved_address(), "--wait", "0", config.name)
    output = worker.communicate(timeout=MOST_SECONDS)[0]
    assert worker.returncode == 3, output
    assert "no orchestrator at tcp://127.0.0.1:" in output
    assert "Traceback" not in output


@pytest.mark.slow
def test_a_terminated_worker_of_a_function_gives_its_episodes_back(processes: Processes, tmp_path: Path) -> None:
    address = reserved_address()
    config = write_waiting_run(tmp_path, "")
    (tmp_path / "my_worker.py").write_text(
        "from itertools import cycle\n"
        "from renderers import load_renderer\n"
        "from rollouts.testing import ScriptedEngine\n"
        "from rollouts.workers import EpisodeWorker\n"
        "import wait_env\n"
        "async def make():\n"
        "    renderer = load_renderer('model')\n"
        "    engine = ScriptedEngine(cycle(['4']), renderer=renderer)\n"
        "    return EpisodeWorker(lambda task: wait_env.Wait(task, 1), engine, renderer, slots=2)\n"
    )
    run = processes.start("run", "--workers", address, config, "--limit", TASKS)
    terminated = processes.start("worker", "--connect", address, "my_worker:make")
    processes.until(lambda: sum(task >= TASKS // 2 for _, task in played(tmp_path)) == 2)
    terminated.terminate()
    output = terminated.communicate(timeout=MOST_SECONDS)[0]
    assert terminated.returncode == 130, output
    assert "the episodes of this worker run again on others" in output
    (tmp_path / "go").touch()
    last = processes.start("worker", "--connect", address, "my_worker:make")
    assert run.wait(MOST_SECONDS) == 0, run.communicate()[0]
    assert last.wait(MOST_SECONDS) == 0
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["episodes"] == TASKS * 2


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["missing.toml"], "missing.toml: No such file or directory"),
        (["nothing"], "there is no such file; write a path, or module:function"),
        (["no_such_module:make"], "importing it raised ModuleNotFoundError"),
        (["json:__doc__"], "it is a str; name a function"),
        (["json:loads", "--slots", "3"], "json:loads makes the worker"),
        (["json:loads", "--key-file", "missing"], "missing: No such file or directory"),
    ],
)
def test_what_a_worker_cannot_be_made_of_is_named(arguments: list[str], line: str) -> None:
    result = CliRunner().invoke(app, ["worker", "--connect", "tcp://127.0.0.1:1", *arguments])
    assert result.exit_code == 2
    assert line in result.output


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ('[workers]\nlisten = "tcp://0.0.0.0:7100"\n', "workers.listen"),
        ('[workers]\nlisten = "tcp://127.0.0.1:7100"\nkey_file = "missing.toml"\n', "workers.key_file"),
        ("[workers]\n", "workers.listen"),
        ('[workers]\nlisten = "nowhere"\n', "workers.listen"),
    ],
)
def test_workers_of_a_configuration_that_cannot_be_used_are_named_with_their_key(
    tmp_path: Path, section: str, key: str
) -> None:
    config = write_run(tmp_path, CONFIG + section)
    result = CliRunner().invoke(app, ["run", str(config)])
    assert result.exit_code == 2, result.output
    assert f"run.toml: {key}: " in result.output


def test_a_worker_that_the_run_refuses_ends_with_the_reason(tmp_path: Path) -> None:
    config = write_run(tmp_path)
    addresses: queue.Queue[str] = queue.Queue()
    ended = threading.Event()

    async def orchestrate() -> None:
        async with LinkWorkers(configuration="another") as workers:
            addresses.put(workers.address)
            await asyncio.to_thread(ended.wait)

    orchestrator = threading.Thread(target=lambda: asyncio.run(orchestrate()))
    orchestrator.start()
    try:
        result = CliRunner().invoke(app, ["worker", "--connect", addresses.get(), str(config)])
    finally:
        ended.set()
        orchestrator.join()
    assert result.exit_code == 2
    assert "its configuration differs from that of the run; give both the same file" in result.output
