"""Whatever was recorded in whatever order, and wherever the files end: the journal knows exactly what is complete."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from journal_recordings import (
    CONFIGURATION,
    Expected,
    Write,
    compare,
    encoded_attempts,
    list_writes,
    open_recorder,
    play,
)

from rollouts.runner.journal.files import ENTRIES, EPISODES
from rollouts.runner.journal.journal import Recorder
from transport import encode

#: (kind, task number, index): see `play`. Calls of the runner for a task come in this order, those of tasks in any.
CALLS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3), st.integers(0, 1)), min_size=5, max_size=60)
FEW = settings(max_examples=40)


class Run:
    """A journal that was written in one process: its files, its writes, and what each call had recorded by then."""

    def __init__(self, directory: Path, calls: list[tuple[int, int, int]]) -> None:
        recorder = open_recorder(directory)
        self.writes = list_writes(recorder, directory)
        recorder.resume(dict(CONFIGURATION))
        self.events: list[tuple[int, tuple[Any, ...]]] = []  # each with the number of writes after it
        state = Expected()
        for event in play(recorder, calls, state):
            self.events.append((len(self.writes), event))
            state.apply(event)
        recorder.close()
        self.contents = {name: (directory / name).read_bytes() for name in (ENTRIES, EPISODES)}

    def expected_after(self, num_writes: int) -> Expected:
        state = Expected()
        for needed, event in self.events:
            if needed <= num_writes:
                state.apply(event)
        return state

    def kill(self, directory: Path, num_writes: int, share: float) -> None:
        """The files as they are when a process is killed in the write after `num_writes`, of which a part is there."""
        sizes = {ENTRIES: 64, EPISODES: 64}  # the header of the file
        for write in self.writes[:num_writes]:
            sizes[write.file] = write.after
        for write in self.writes[num_writes : num_writes + 1]:
            sizes[write.file] = write.before + int(share * (write.after - write.before))
        self.cut(directory, sizes)

    def cut(self, directory: Path, sizes: dict[str, int]) -> None:
        directory.mkdir(exist_ok=True)
        for name, size in sizes.items():
            (directory / name).write_bytes(self.contents[name][:size])


def finish_everything(recorder: Recorder, state: Expected) -> None:
    """Continue the run until every group is delivered."""
    calls = [(kind, number, index) for number in range(4) for kind in (0, 1, 1, 3, 4) for index in (0, 1)]
    for event in play(recorder, calls, state):
        state.apply(event)
    assert len(state.closed) == 4


@FEW
@given(calls=CALLS, data=st.data())
def test_a_process_killed_in_any_write_leaves_exactly_what_was_written_before(calls, data) -> None:
    with tempfile.TemporaryDirectory() as base:
        run = Run(Path(base, "first"), calls)
        num_writes = data.draw(st.integers(0, len(run.writes)))
        killed = Path(base, "killed")
        run.kill(killed, num_writes, data.draw(st.floats(0, 0.99)))
        state = run.expected_after(num_writes)
        recorder = open_recorder(killed)
        compare(recorder, state)
        finish_everything(recorder, state)
        recorder.close()
        recorder = open_recorder(killed)
        compare(recorder, state)
        recorder.close()


@FEW
@given(calls=CALLS, kills=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 0.99)), min_size=2, max_size=4))
def test_any_number_of_kills_one_after_the_other_lose_nothing(calls, kills) -> None:
    with tempfile.TemporaryDirectory() as base:
        run, state = Run(Path(base, "0"), calls), Expected()
        for number, (position, share) in enumerate(kills):
            directory = Path(base, f"killed-{number}")
            num_writes = int(position * len(run.writes))
            run.kill(directory, num_writes, share)
            state = run.expected_after(num_writes)
            calls = calls[::-1]  # another order: an entry without its record may come before a record of another task
            run = ContinuedRun(directory, calls, state)
        recorder = open_recorder(directory)
        compare(recorder, run.expected_after(len(run.writes)))
        recorder.close()


class ContinuedRun(Run):
    """A journal that a second process continued: writes of the first are not cut any more."""

    def __init__(self, directory: Path, calls: list[tuple[int, int, int]], state: Expected) -> None:
        self.before = state
        recorder = open_recorder(directory)
        self.sizes = {name: (directory / name).stat().st_size for name in (ENTRIES, EPISODES)}
        self.writes: list[Write] = list_writes(recorder, directory)
        recorder.resume(dict(CONFIGURATION))
        self.events = []
        current = copied(state)
        for event in play(recorder, calls, current):
            self.events.append((len(self.writes), event))
            current.apply(event)
        recorder.close()
        self.contents = {name: (directory / name).read_bytes() for name in (ENTRIES, EPISODES)}

    def expected_after(self, num_writes: int) -> Expected:
        state = copied(self.before)
        for needed, event in self.events:
            if needed <= num_writes:
                state.apply(event)
        return state

    def kill(self, directory: Path, num_writes: int, share: float) -> None:
        sizes = dict(self.sizes)
        for write in self.writes[:num_writes]:
            sizes[write.file] = write.after
        for write in self.writes[num_writes : num_writes + 1]:
            sizes[write.file] = write.before + int(share * (write.after - write.before))
        self.cut(directory, sizes)


def copied(state: Expected) -> Expected:
    attempts = {number: dict(each) for number, each in state.attempts.items()}
    return Expected(list(state.started), attempts, dict(state.finished), set(state.closed))


@FEW
@given(calls=CALLS, shares=st.fixed_dictionaries({ENTRIES: st.floats(0, 1), EPISODES: st.floats(0, 1)}))
def test_after_a_power_cut_whatever_is_known_is_true_and_the_rest_is_run_again(calls, shares) -> None:
    """Without fsync the two files may end at unrelated places."""
    with tempfile.TemporaryDirectory() as base:
        run = Run(Path(base, "first"), calls)
        last = run.expected_after(len(run.writes))
        recorded = [event for _, event in run.events]
        cut = Path(base, "cut")
        sizes = {name: max(64, int(share * len(run.contents[name]))) for name, share in shares.items()}
        run.cut(cut, sizes)
        recorder = open_recorder(cut)
        if recorder._files.entries.next_index == 0 < recorder._files.episodes.next_index:
            recorder.close()
            return  # refused: see test_journal_files.py
        resumed = recorder.resume(dict(CONFIGURATION))
        state = Expected()
        for number in range(4):
            task_id = f"task-{number}"
            if task_id in recorder.history:
                state.apply(("start", number))
            if task_id in recorder.history.closed:
                assert number in last.closed
                state.closed.add(number)
            if task_id in resumed.undelivered:
                assert encode(recorder.read_group(task_id)) == last.finished[number]
                state.finished[number] = last.finished[number]
            if task_id in resumed.unfinished:
                for index, attempt in encoded_attempts(recorder, number).items():
                    assert ("attempt", number, index, *attempt) in recorded
                    state.attempts[number][index] = attempt
        finish_everything(recorder, state)
        recorder.close()


def test_an_episode_of_another_task_is_not_taken_for_one_that_was_never_written(tmp_path: Path) -> None:
    run = Run(tmp_path / "first", [(0, 0, 0), (0, 1, 0), (1, 0, 0)])
    run.kill(tmp_path / "killed", len(run.writes) - 1, 0.5)  # the entry of the episode is there, and not the episode
    state = run.expected_after(len(run.writes) - 1)
    second = ContinuedRun(tmp_path / "killed", [(1, 1, 0)], state)  # takes its place in the file
    recorder = open_recorder(tmp_path / "killed")
    compare(recorder, second.expected_after(len(second.writes)))
    assert recorder.read_attempts("task-0") == {}
    assert list(recorder.read_attempts("task-1")) == [0]
    recorder.close()


def test_the_calls_of_these_tests_reach_every_state(tmp_path: Path) -> None:
    calls = [(kind, number, index) for kind in (0, 1, 1, 3, 4) for number in range(4) for index in (0, 1)]
    run = Run(tmp_path / "all", calls)
    kinds = [event[0] for _, event in run.events]
    assert {kind: kinds.count(kind) for kind in kinds} == {"start": 4, "attempt": 12, "finish": 4, "close": 4}


@pytest.mark.parametrize("planted", ["an entry without its episode is believed", "the last write is forgotten"])
def test_the_comparison_finds_a_planted_fault(tmp_path: Path, planted: str) -> None:
    run = Run(tmp_path / "first", [(0, 0, 0), (1, 0, 0)])
    is_entry = [write.file == ENTRIES for write in run.writes]
    assert is_entry == [True, True, False, True, False]
    num_writes = 4 if planted.startswith("an entry") else 3
    run.kill(tmp_path / "killed", num_writes, 0.0)
    recorder = open_recorder(tmp_path / "killed")
    with pytest.raises(AssertionError):
        compare(recorder, run.expected_after(5))
    recorder.close()
