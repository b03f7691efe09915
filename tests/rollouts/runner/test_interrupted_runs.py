"""Ctrl-C ends a run within 5 seconds, wherever its episodes wait, and nothing that was finished is run again."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from interrupted_run import NUM_TASKS

from rollouts.runner.journal import Recorder

PROGRAM = Path(__file__).parent / "interrupted_run.py"


@pytest.mark.slow
@pytest.mark.parametrize("waits_in", ["engine", "thread", "renderer"])
def test_an_interrupted_run_ends_within_five_seconds_and_its_journal_has_what_was_delivered(
    tiny_model_dir: Path, tmp_path: Path, waits_in: str
) -> None:
    command = [sys.executable, str(PROGRAM), str(tiny_model_dir), str(tmp_path), waits_in]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        seen: list[str] = []
        while len(seen) < NUM_TASKS:  # half of the episodes are delivered, half of them wait
            line = program.stdout.readline()
            assert line, program.communicate()[1]
            seen.append(line.split()[0])
        program.send_signal(signal.SIGINT)
        began = time.monotonic()
        _, errors = program.communicate(timeout=60)
        seconds = time.monotonic() - began
    assert sorted(seen) == ["delivered"] * (NUM_TASKS // 2) + ["waiting"] * (NUM_TASKS // 2)
    assert seconds < 5, errors
    assert program.returncode == -signal.SIGINT, errors
    assert errors.rstrip().endswith("KeyboardInterrupt"), errors
    recorder = Recorder(tmp_path / "journal", fsync=False)
    left = recorder.resume({"group_size": 1, "seed": 0, "configuration": {}})
    recorder.close()
    # The consumer had asked for the group after the last one that it received.
    assert (left.num_closed, len(left.unfinished), left.undelivered) == (NUM_TASKS // 2, NUM_TASKS // 2, ())
