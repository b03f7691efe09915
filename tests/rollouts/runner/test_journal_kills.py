"""A run that is killed again and again, with `kill -9`: its journal, beside independent records of the run."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from journalled_run import GROUP_SIZE, NUM_TASKS

from rollouts import Trajectory
from rollouts.runner.journal.files import ENTRIES, EPISODES, JournalAttempted, JournalClosed, JournalFinished
from transport import RecordReader

PROGRAM = Path(__file__).parent / "journalled_run.py"
SKIPPED = {f"t{number}" for number in range(NUM_TASKS) if number % 7 == 3}
#: The journal of a run grows by at most so many bytes before the run is killed; that of a whole run has 13 times more.
MOST_GROWTH = 60_000
DELIVERED = {f"t{number}" for number in range(NUM_TASKS)} - SKIPPED


class Runs:
    """Starts runs in processes that share their imports, and kills them."""

    def __init__(self, model_directory: Path) -> None:
        command = [sys.executable, str(PROGRAM), str(model_directory)]
        self._program = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._line() == "ready"

    def start(self, directory: Path) -> int:
        assert self._program.stdin is not None
        self._program.stdin.write(f"{directory}\n")
        self._program.stdin.flush()
        return int(self._line())

    def wait(self) -> int:
        """The exit status of the run; the signal that killed it, negative."""
        return int(self._line())

    def close(self) -> None:
        assert self._program.stdin is not None
        self._program.stdin.close()
        assert self._program.wait(60) == 0

    def _line(self) -> str:
        assert self._program.stdout is not None
        return self._program.stdout.readline().strip()


@pytest.fixture
def runs(tiny_model_dir: Path) -> Iterator[Runs]:
    made = Runs(tiny_model_dir)
    yield made
    made.close()


@dataclass
class Known:
    """What the files of a journal say, read without the code of the journal."""

    attempted: set[str] = field(default_factory=set)
    finished: set[str] = field(default_factory=set)
    delivered: set[str] = field(default_factory=set)
    discarded: set[str] = field(default_factory=set)


def read_journal(directory: Path) -> Known:
    known = Known()
    if not (directory / EPISODES).exists():
        return known
    with RecordReader(directory / ENTRIES) as entries, RecordReader(directory / EPISODES) as records:
        for entry in entries:
            if isinstance(entry, JournalAttempted) and entry.record < len(records):
                held = records[entry.record]
                if isinstance(held, Trajectory) and held.episode_id == entry.episode_id:
                    known.attempted.add(entry.episode_id)
            elif isinstance(entry, JournalFinished):
                known.finished.add(entry.task_id)
            elif isinstance(entry, JournalClosed):
                (known.discarded if entry.reason else known.delivered).add(entry.task_id)
    return known


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def size(journal: Path) -> int:
    return sum(path.stat().st_size for name in (ENTRIES, EPISODES) if (path := journal / name).exists())


def kill_after_growth(process: int, journal: Path, chance: random.Random) -> None:
    """Kill a run when its journal has grown by a random amount, and a random moment later."""
    enough = size(journal) + chance.randrange(MOST_GROWTH)
    try:
        while size(journal) < enough:
            os.kill(process, 0)  # raises if the run has ended
            time.sleep(0.001)
        time.sleep(chance.random() * 0.005)
        os.kill(process, signal.SIGKILL)
    except ProcessLookupError:
        pass


class Round:
    """One process of a run, and what it did: the groups that its consumer had, and the episodes that it completed."""

    def __init__(self, runs: Runs, directory: Path, chance: random.Random | None) -> None:
        self.before = read_journal(directory / "journal")
        consumed, ended = len(lines(directory / "consumed")), len(lines(directory / "ended"))
        process = runs.start(directory)
        if chance is not None:
            kill_after_growth(process, directory / "journal", chance)
        self.status = runs.wait()
        self.after = read_journal(directory / "journal")
        self.consumed = lines(directory / "consumed")[consumed:]
        self.ended = lines(directory / "ended")[ended:]

    def check(self, last_consumed: list[str]) -> None:
        """What holds for every process, after those before it had given `last_consumed` to their consumers."""
        assert not self.before.attempted & {*self.ended}, "an episode that is in the journal was run again"
        consumed = [line.split()[0] for line in self.consumed]
        assert not self.before.delivered & {*consumed}, "a group was delivered twice"
        assert not SKIPPED & {*consumed}
        again = [line for line in self.consumed if line.split()[0] in {each.split()[0] for each in last_consumed}]
        # Only the last group of a process can be unacknowledged, and the next process yields the identical one.
        assert again in ([], last_consumed[-1:])
        assert max(Counter(consumed).values(), default=1) == 1
        # The consumer had asked for the next group after each but the last.
        assert (
            {*consumed[:-1]}
            <= self.after.delivered
            <= self.before.delivered | {*consumed} | {line.split()[0] for line in last_consumed[-1:]}
        )
        assert {*consumed} <= self.after.finished
        for name in ("attempted", "finished", "delivered", "discarded"):
            assert getattr(self.before, name) <= getattr(self.after, name), "a record was lost"


def kill_rounds(runs: Runs, base: Path, count: int, seed: int) -> int:
    """Kill `count` processes at random moments, then let the last run end; the number of runs that were completed."""
    chance = random.Random(seed)
    killed = completed = 0
    directory, last_consumed = new_run(base, 0), list[str]()
    while killed < count or last_consumed:
        this = Round(runs, directory, chance if killed < count else None)
        this.check(last_consumed)
        last_consumed += this.consumed
        killed += this.status == -signal.SIGKILL
        if this.status == 0:
            check_complete(directory, this.after, last_consumed)
            completed += 1
            directory, last_consumed = new_run(base, completed), []
    return completed


def new_run(base: Path, number: int) -> Path:
    directory = base / f"run-{number}"
    directory.mkdir()
    return directory


def check_complete(directory: Path, known: Known, consumed: list[str]) -> None:
    """Every task has been delivered or discarded once, and its episodes are in the journal."""
    assert known.delivered == DELIVERED
    assert known.discarded == SKIPPED
    assert {line.split()[0] for line in consumed} == DELIVERED
    assert len({*consumed}) == len(DELIVERED)  # a group that was yielded twice had the same digest
    for number in range(NUM_TASKS):
        for index in range(GROUP_SIZE):
            assert any(episode.startswith(f"t{number}/{index}.") for episode in known.attempted)
    with RecordReader(directory / "journal" / EPISODES) as records:
        assert records.truncated_bytes == 0
        ids = [record.episode_id for record in records if isinstance(record, Trajectory)]
    assert len(ids) == len({*ids}) == len(known.attempted)  # no episode is there twice, and each has an entry


def test_the_journal_of_a_run_that_is_killed_twenty_times_is_exact(runs: Runs, tmp_path: Path) -> None:
    assert kill_rounds(runs, tmp_path, 20, seed=1) >= 1


@pytest.mark.slow
def test_the_journal_of_a_run_that_is_killed_two_hundred_times_is_exact(runs: Runs, tmp_path: Path) -> None:
    assert kill_rounds(runs, tmp_path, 200, seed=2) >= 2
