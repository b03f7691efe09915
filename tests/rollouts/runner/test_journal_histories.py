"""Whatever was recorded in whatever order, and wherever the file ends: the journal knows exactly what is complete."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from journal_recordings import CONFIGURATION, Expected, compare, open_recorder, play

from rollouts.runner.journal_database import DATABASE, Recorder

#: What a process writes; it is moved into the database later, which these tests do not let happen.
LOG = f"{DATABASE}-wal"
#: (kind, task number, index): see `play`. Calls of the runner for a task come in this order, those of tasks in any.
CALLS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3), st.integers(0, 1)), min_size=5, max_size=60)
EVERYTHING = [(kind, number, index) for number in range(4) for kind in (0, 1, 1, 3, 4) for index in (0, 1)]
FEW = settings(max_examples=40)


class Run:
    """One process with a journal: what it has written, and what each call had recorded by then.

    `before` is what the journal has of earlier processes.
    """

    def __init__(self, directory: Path, calls: list[tuple[int, int, int]], before: Expected | None = None) -> None:
        recorder = open_recorder(directory)
        recorder._database.execute("PRAGMA wal_autocheckpoint = 0")
        self.before = before or Expected()
        compare(recorder, self.before)
        recorder._database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self.events: list[tuple[int, tuple[Any, ...]]] = []  # each with the size of the log after it
        state = copied(self.before)
        for event in play(recorder, calls, state):
            self.events.append(((directory / LOG).stat().st_size, event))
            state.apply(event)
        self.database, self.log = ((directory / name).read_bytes() for name in (DATABASE, LOG))
        recorder.close()

    def expected_after(self, size: int) -> Expected:
        """What the journal has where so many bytes of the log are written."""
        state = copied(self.before)
        for needed, event in self.events:
            if needed <= size:
                state.apply(event)
        return state

    def leave(self, directory: Path, log: bytes) -> None:
        """Make the files of a process that has ended without closing the journal."""
        directory.mkdir(exist_ok=True)
        (directory / DATABASE).write_bytes(self.database)
        (directory / LOG).write_bytes(log)


def copied(state: Expected) -> Expected:
    attempts = {number: dict(each) for number, each in state.attempts.items()}
    return Expected(list(state.started), attempts, dict(state.finished), set(state.closed))


def finish_everything(recorder: Recorder, state: Expected) -> None:
    """Continue the run until every group is delivered; the journal then has no episode and no image."""
    for event in play(recorder, EVERYTHING, state):
        state.apply(event)
    assert len(state.closed) == 4
    for table in ("tasks", "attempts", "groups", "uses", "media"):
        assert recorder._database.execute(f"SELECT count(*) FROM {table}").fetchone() == (0,)


def check(directory: Path, state: Expected) -> None:
    """Compare the journal with what is expected, also after the run was continued to its end."""
    recorder = open_recorder(directory)
    compare(recorder, state)
    finish_everything(recorder, state)
    recorder.close()
    recorder = open_recorder(directory)
    compare(recorder, state)
    recorder.close()


@pytest.mark.slow
@FEW
@given(calls=CALLS, shares=st.lists(st.floats(0, 1), min_size=1, max_size=4))
def test_processes_killed_in_any_write_leave_exactly_what_was_written_before(calls, shares) -> None:
    with tempfile.TemporaryDirectory() as base:
        directory, state = Path(base, "0"), Expected()
        for number, share in enumerate(shares, 1):
            run = Run(directory, calls, state)
            size = int(share * len(run.log))
            directory = Path(base, f"{number}")
            run.leave(directory, run.log[:size])
            state = run.expected_after(size)
            calls = calls[::-1]
        check(directory, state)


@pytest.mark.slow
@FEW
@given(calls=CALLS, share=st.floats(0, 0.99))
def test_after_a_power_cut_that_has_lost_a_part_of_the_log_whatever_came_before_it_is_known(calls, share) -> None:
    """Without fsync the system writes the parts of a file in any order."""
    with tempfile.TemporaryDirectory() as base:
        run = Run(Path(base, "first"), calls)
        begin = int(share * len(run.log)) // 512 * 512
        run.leave(
            Path(base, "cut"), run.log[:begin] + b"\xff" * len(run.log[begin : begin + 512]) + run.log[begin + 512 :]
        )
        check(Path(base, "cut"), run.expected_after(begin))


@pytest.mark.slow
def test_a_process_that_is_killed_while_it_begins_the_journal_leaves_one_that_can_be_begun(tmp_path: Path) -> None:
    recorder = open_recorder(tmp_path / "first")
    recorder.resume(dict(CONFIGURATION))
    database, log = ((tmp_path / "first" / name).read_bytes() for name in (DATABASE, LOG))
    recorder.close()
    for size in range(0, len(log) + 512, 512):
        directory = tmp_path / f"killed-{size}"
        directory.mkdir()
        (directory / DATABASE).write_bytes(database)
        (directory / LOG).write_bytes(log[:size])
        check(directory, Expected())


def test_the_calls_of_these_tests_reach_every_state(tmp_path: Path) -> None:
    run = Run(tmp_path / "all", EVERYTHING)
    kinds = [event[0] for _, event in run.events]
    assert {kind: kinds.count(kind) for kind in kinds} == {"start": 4, "attempt": 12, "finish": 4, "close": 4}
    assert sorted({size for size, _ in run.events}) == [size for size, _ in run.events]


@pytest.mark.parametrize("planted", ["an episode that was not written is expected", "one that was written is not"])
def test_the_comparison_finds_a_planted_fault(tmp_path: Path, planted: str) -> None:
    run = Run(tmp_path / "first", [(0, 0, 0), (1, 0, 0)])
    sizes = [size for size, _ in run.events]
    left, expected = sizes if planted.startswith("an episode") else sizes[::-1]
    run.leave(tmp_path / "killed", run.log[:left])
    recorder = open_recorder(tmp_path / "killed")
    with pytest.raises(AssertionError):
        compare(recorder, run.expected_after(expected))
    recorder.close()
