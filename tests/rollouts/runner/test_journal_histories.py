"""Whatever was recorded in whatever order, and wherever the file ends: the journal knows exactly what is complete."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from journal_recordings import Expected, compare, open_recorder, play

from rollouts.runner.journal_file import JOURNAL_FILE, Recorder
from transport import RecordReader

#: (kind, task number, index): see `play`. Calls of the runner for a task come in this order, those of tasks in any.
CALLS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3), st.integers(0, 1)), min_size=5, max_size=60)
EVERYTHING = [(kind, number, index) for number in range(4) for kind in (0, 1, 1, 3, 4) for index in (0, 1)]
FEW = settings(max_examples=40)


class Run:
    """One process with a journal: what it has written, and what each call had recorded by then.

    `before` is what the journal has of earlier processes, whose file has `begin` bytes.
    """

    def __init__(self, directory: Path, calls: list[tuple[int, int, int]], before: Expected | None = None) -> None:
        recorder = open_recorder(directory)
        self.before = before or Expected()
        compare(recorder, self.before)
        self.begin = recorder._writer.size
        self.events: list[tuple[int, tuple[Any, ...]]] = []  # each with the size of the file after it
        state = copied(self.before)
        for event in play(recorder, calls, state):
            self.events.append((recorder._writer.size, event))
            state.apply(event)
        recorder.close()
        self.data = (directory / JOURNAL_FILE).read_bytes()

    def expected_after(self, size: int) -> Expected:
        """What the journal has where so many bytes of the file are written."""
        state = copied(self.before)
        for needed, event in self.events:
            if needed <= size:
                state.apply(event)
        return state

    def tasks_written_at(self, begin: int, end: int) -> set[int]:
        """The tasks of which the file has something between two offsets."""
        starts = [self.begin, *(size for size, _ in self.events)]
        return {
            event[1] for (size, event), start in zip(self.events, starts, strict=False) if start < end and begin < size
        }


def leave(directory: Path, data: bytes) -> None:
    """Make the file of a process that has ended without closing the journal."""
    directory.mkdir(exist_ok=True)
    (directory / JOURNAL_FILE).write_bytes(data)


def copied(state: Expected) -> Expected:
    attempts = {number: dict(each) for number, each in state.attempts.items()}
    return Expected(list(state.started), attempts, dict(state.finished), set(state.closed))


def finish_everything(recorder: Recorder, state: Expected) -> None:
    """Continue the run until every group is delivered; the file, written anew, then has no episode and no image."""
    for event in play(recorder, EVERYTHING, state):
        state.apply(event)
    assert len(state.closed) == 4
    recorder._rewrite()
    with RecordReader(recorder._file) as reader:
        assert [record[0] for record in reader] == ["run", "closed"]
        assert not reader._index.blobs


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
            size = run.begin + int(share * (len(run.data) - run.begin))
            directory = Path(base, f"{number}")
            leave(directory, run.data[:size])
            state = run.expected_after(size)
            calls = calls[::-1]
        check(directory, state)


@pytest.mark.slow
@FEW
@given(calls=CALLS, share=st.floats(0, 0.99), filler=st.sampled_from([b"\0", b"\xff"]))
def test_a_part_of_the_file_that_a_power_cut_has_lost_costs_the_tasks_that_it_is_of_and_no_other(
    calls, share, filler
) -> None:
    """Without fsync the system writes the parts of a file in any order."""
    with tempfile.TemporaryDirectory() as base:
        run = Run(Path(base, "first"), calls)
        begin = run.begin + int(share * (len(run.data) - run.begin)) // 512 * 512
        lost = run.data[begin : begin + 512]
        leave(Path(base, "cut"), run.data[:begin] + filler * len(lost) + run.data[begin + 512 :])
        damaged = run.tasks_written_at(begin, begin + 512)
        recorder = open_recorder(Path(base, "cut"))
        compare(recorder, run.expected_after(len(run.data)), damaged)
        recorder.close()


@pytest.mark.slow
def test_a_process_that_is_killed_while_it_begins_the_journal_leaves_one_that_can_be_begun(tmp_path: Path) -> None:
    data = Run(tmp_path / "first", []).data
    for size in range(0, len(data), 32):
        leave(tmp_path / f"killed-{size}", data[:size])
        check(tmp_path / f"killed-{size}", Expected())


def test_the_calls_of_these_tests_reach_every_state(tmp_path: Path) -> None:
    run = Run(tmp_path / "all", EVERYTHING)
    kinds = [event[0] for _, event in run.events]
    assert {kind: kinds.count(kind) for kind in kinds} == {"start": 4, "attempt": 12, "finish": 4, "close": 4}
    assert sorted({size for size, _ in run.events}) == [size for size, _ in run.events]
