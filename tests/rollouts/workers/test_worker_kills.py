"""A run whose workers and orchestrator are killed at random, with `kill -9`: nothing is lost, nothing is doubled."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from reserved_ports import reserved_address
from test_journal_kills import Runs, kill_rounds

PROGRAM = Path(__file__).parent / "journalled_workers.py"
NUM_WORKERS = 3
#: Seconds between two kills of workers.
BETWEEN_KILLS = (0.02, 0.5)


class Program(Runs):
    """Starts processes of one role, which share their imports."""

    def __init__(self, model_directory: Path, role: str, address: str) -> None:
        command = [sys.executable, str(PROGRAM), str(model_directory), role, address]
        paths = [str(PROGRAM.parents[1] / "runner"), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._program = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
        assert self._line() == "ready"


class RunsOnWorkers:
    """Starts orchestrators as `Runs` does, and workers of the same run, which it kills and replaces all the time."""

    def __init__(self, model_directory: Path, seed: int) -> None:
        address = reserved_address()
        self._orchestrators = Program(model_directory, "orchestrator", address)
        self._workers = Program(model_directory, "worker", address)
        self._chance = random.Random(seed)
        self._directory: Path | None = None
        self._processes: list[int] = []
        self._stopping = threading.Event()
        self._killer: threading.Thread | None = None
        self.workers_killed = 0

    def start(self, directory: Path) -> int:
        if directory != self._directory:
            self._end_workers()
            self._directory = directory
            self._processes = [self._workers.start(directory) for _ in range(NUM_WORKERS)]
        self._stopping.clear()
        process = self._orchestrators.start(directory)
        self._killer = threading.Thread(target=self._kill_workers)
        self._killer.start()
        return process

    def wait(self) -> int:
        status = self._orchestrators.wait()
        self._stopping.set()
        assert self._killer is not None
        self._killer.join()
        return status

    def close(self) -> None:
        self._end_workers()
        self._orchestrators.close()
        self._workers.close()

    def _kill_workers(self) -> None:
        while not self._stopping.wait(self._chance.uniform(*BETWEEN_KILLS)):
            index = self._chance.randrange(NUM_WORKERS)
            self.workers_killed += kill(self._processes[index])
            assert self._directory is not None
            self._processes[index] = self._workers.start(self._directory)

    def _end_workers(self) -> None:
        for process in self._processes:
            kill(process)


def kill(process: int) -> bool:
    """Kill a process; False if it has ended."""
    try:
        os.kill(process, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture
def runs(tiny_model_dir: Path) -> Iterator[RunsOnWorkers]:
    made = RunsOnWorkers(tiny_model_dir, seed=4)
    yield made
    made.close()


@pytest.mark.slow
def test_a_run_is_exact_though_its_workers_and_its_orchestrator_are_killed(runs: RunsOnWorkers, tmp_path: Path) -> None:
    assert kill_rounds(runs, tmp_path, 3, seed=1) >= 1
    assert runs.workers_killed >= 1


@pytest.mark.slow
def test_a_run_is_exact_though_its_orchestrator_is_killed_twenty_times(runs: RunsOnWorkers, tmp_path: Path) -> None:
    assert kill_rounds(runs, tmp_path, 20, seed=2) >= 1
    assert runs.workers_killed >= 5
