"""Runs in processes of their own, which Ctrl-C and `kill -9` end."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from run_config_files import CONFIG, write_run

from transport import RecordReader

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")

START = "from rollouts.cli.main import main; main()"
MOST_SECONDS = 90
TASKS = 6
QUICK = 3  # so many tasks end at once; the others wait until there is a file `go`

ENVIRONMENT = f"""\
import asyncio, pathlib, signal, time
from rollouts import StepResult
from rollouts.task import Task

HERE = pathlib.Path(__file__).parent
TASKS = [Task(str(number)) for number in range({TASKS})]

class Wait:
    def __init__(self, task, tries, how="async"):
        self.task, self.how = task, how
    def reset(self, seed):
        return [{{"role": "user", "content": "Hi"}}]
    async def step(self, assistant):
        if int(self.task.task_id) >= {QUICK} and not (HERE / "go").exists():
            while (HERE / "out/metrics.jsonl").read_text().count("\\n") < {QUICK}:
                await asyncio.sleep(0.01)
            if self.how == "blocking":  # as a call that no signal ends, such as one of C that goes on after it
                signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGINT}})
            (HERE / "waiting").touch()
            if self.how != "async":
                time.sleep(600)
            await asyncio.sleep(600)
        with open(HERE / "played", "a") as played:
            played.write(self.task.task_id + "\\n")
        return StepResult(reward=1.0, done=True)

class WaitOnThread(Wait):
    def step(self, assistant):
        return asyncio.run(super().step(assistant))
"""


def write_waiting_run(directory: Path, how: str = "async") -> Path:
    config = CONFIG.replace("guess_env:Guess", "wait_env:Wait").replace("tries = 2", f'tries = 2, how = "{how}"')
    if how == "thread":
        config = config.replace('wait_env:Wait"', 'wait_env:WaitOnThread"\nthreaded = true')
    section = 'kind = "jsonl"\npath = "tasks.jsonl"\nid_key = "name"'
    assert section in config
    config = config.replace(section, 'kind = "import"\nsource = "wait_env:TASKS"')
    path = write_run(directory, config.replace("group_size = 2", "group_size = 1"))
    (directory / "wait_env.py").write_text(ENVIRONMENT)
    return path


@contextmanager
def started(path: Path, *arguments: str, start: str = START, **options: Any) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", start, "run", str(path), *arguments]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, **options}
    process = subprocess.Popen(command, text=True, **options)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def wait_for_written(process: subprocess.Popen[str], directory: Path) -> None:
    """Wait until the quick groups are written and an episode waits."""
    deadline = time.monotonic() + MOST_SECONDS
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()[0]
        if (directory / "waiting").exists():
            return
        time.sleep(0.01)
    raise AssertionError("the groups were not written")


def written_groups(directory: Path) -> list[str]:
    with RecordReader(directory / "out/trajectories.mmr") as reader:
        return [reader[index][0].group_id for index in range(len(reader))]


def check_continues(path: Path) -> None:
    """Continue the run: every task is played and written once."""
    directory = path.parent
    (directory / "go").touch()
    command = [sys.executable, "-c", START, "run", str(path), "--resume"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=MOST_SECONDS)
    assert done.returncode == 0, done.stderr
    expected = [str(number) for number in range(TASKS)]
    assert sorted(written_groups(directory)) == expected
    assert sorted((directory / "played").read_text().split()) == expected
    rows = [json.loads(line) for line in (directory / "out/metrics.jsonl").read_text().splitlines()]
    assert sorted(row["task_id"] for row in rows) == expected
    assert json.loads((directory / "out/summary.json").read_text())["complete"] is True


@pytest.mark.slow
def test_a_killed_run_continues_and_repeats_nothing(tmp_path: Path) -> None:
    path = write_waiting_run(tmp_path)
    with started(path) as process:
        wait_for_written(process, tmp_path)
        process.kill()
        process.wait()
    check_continues(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "how"),
    [(signal.SIGINT, "async"), (signal.SIGTERM, "async"), (signal.SIGHUP, "async"), (signal.SIGINT, "thread")],
)
def test_a_signal_ends_a_run_that_waits_and_it_can_be_continued(tmp_path: Path, number: int, how: str) -> None:
    path = write_waiting_run(tmp_path, how)
    with started(path, "--limit", "50") as process:
        wait_for_written(process, tmp_path)
        process.send_signal(number)
        output, _ = process.communicate(timeout=MOST_SECONDS)  # it would wait for 600
    assert process.returncode == 130, output
    assert f"interrupted; to continue: rollouts run {path} --limit 50 --resume\n" in output
    assert "Traceback" not in output
    assert sorted(written_groups(tmp_path)) == ["0", "1", "2"]
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert (summary["complete"], summary["groups"]) == (False, QUICK)
    check_continues(path)


@pytest.mark.slow
def test_a_run_whose_terminal_is_closed_writes_its_summary_and_continues(tmp_path: Path) -> None:
    path = write_waiting_run(tmp_path)
    terminal, end = os.openpty()
    start = f"import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); {START}"
    with started(path, start=start, stdin=end, stdout=end, stderr=end, start_new_session=True) as process:
        os.close(end)
        wait_for_written(process, tmp_path)
        os.close(terminal)
        process.wait(timeout=MOST_SECONDS)
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert (summary["complete"], summary["groups"]) == (False, QUICK)
    check_continues(path)


@pytest.mark.slow
def test_ctrl_c_before_the_first_episode_leaves_a_directory_in_which_the_run_begins(tmp_path: Path) -> None:
    path = write_waiting_run(tmp_path)
    with (tmp_path / "wait_env.py").open("a") as module:
        module.write('(HERE / "imported").touch()\ntime.sleep(600)\n')
    with started(path) as process:
        deadline = time.monotonic() + MOST_SECONDS
        while not (tmp_path / "imported").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=MOST_SECONDS)
    assert process.returncode == 130, output
    assert "Traceback" not in output
    (tmp_path / "wait_env.py").write_text(ENVIRONMENT)
    (tmp_path / "go").touch()
    command = [sys.executable, "-c", START, "run", str(path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=MOST_SECONDS)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_ctrl_c_ends_a_run_whose_environment_blocks_the_event_loop(tmp_path: Path) -> None:
    path = write_waiting_run(tmp_path, "blocking")
    config = path.read_text().replace("concurrency = 4", "concurrency = 1")
    path.write_text(config)
    with started(path) as process:
        wait_for_written(process, tmp_path)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=MOST_SECONDS)  # it would wait for 600
    assert process.returncode == 130, output
    assert f"stopped at once; to continue: rollouts run {path} --resume" in output
    assert sorted(written_groups(tmp_path)) == ["0", "1", "2"]


@pytest.mark.slow
def test_a_run_whose_output_nobody_reads_writes_its_summary_and_report(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    with started(path) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(timeout=MOST_SECONDS) == 1
    assert json.loads((tmp_path / "out/summary.json").read_text())["complete"] is True
    assert (tmp_path / "out/report.html").exists()
