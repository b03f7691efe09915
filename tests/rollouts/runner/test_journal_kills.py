"""A run that is killed again and again, with `kill -9`: its journal, beside independent records of the run."""

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
from journalled_run import NUM_TASKS

from rollouts.runner.journal_file import JOURNAL_FILE
from transport import read_records

PROGRAM = Path(__file__).parent / "journalled_run.py"
SKIPPED = {f"t{number}" for number in range(NUM_TASKS) if number % 7 == 3}
#: A run is killed before so many of its episodes have ended; a whole run has 9 times more.
MOST_EPISODES = 20
DELIVERED = {f"t{number}" for number in range(NUM_TASKS)} - SKIPPED


class Runs:
    """Starts runs in processes that share their imports, and kills them."""

    def __init__(self, model_directory: Path, program: Path = PROGRAM) -> None:
        command = [sys.executable, str(program), str(model_directory)]
        paths = os.pathsep.join(
            [str(PROGRAM.parent), str(PROGRAM.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
        environment = {**os.environ, "PYTHONPATH": paths}
        pipe = subprocess.PIPE
        self._program = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
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
    """What the file of a journal says, read without the code of the journal.

    `attempted` has the number of the last attempt by task and index, for tasks that are not closed.
    """

    attempted: dict[str, int] = field(default_factory=dict)
    finished: set[str] = field(default_factory=set)
    delivered: set[str] = field(default_factory=set)
    discarded: set[str] = field(default_factory=set)

    @property
    def closed(self) -> set[str]:
        return self.delivered | self.discarded


def read_journal(directory: Path) -> Known:
    """Read the records that are complete."""
    known = Known()
    if not (directory / JOURNAL_FILE).exists():
        return known
    for kind, *values in read_records(directory / JOURNAL_FILE):
        if kind == "attempt":
            name, _, attempt = values[-1].episode_id.rpartition(".")
            known.attempted[name] = int(attempt)
        elif kind == "group":
            known.finished.add(values[0])
        elif kind == "closed":
            for task_id, reason in values[0].items():
                (known.discarded if reason else known.delivered).add(task_id)
    known.finished -= known.closed
    known.attempted = {name: at for name, at in known.attempted.items() if name.split("/")[0] not in known.closed}
    return known


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def kill_after_episodes(process: int, ended: Path, chance: random.Random) -> None:
    """Kill a run when a random number of its episodes has ended, and a random moment later."""
    enough = len(lines(ended)) + chance.randrange(MOST_EPISODES)
    try:
        while len(lines(ended)) < enough:
            os.kill(process, 0)  # raises if the run has ended
            time.sleep(0.001)
        time.sleep(chance.random() * 0.02)
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
            kill_after_episodes(process, directory / "ended", chance)
        self.status = runs.wait()
        self.after = read_journal(directory / "journal")
        self.consumed = lines(directory / "consumed")[consumed:]
        self.ended = lines(directory / "ended")[ended:]

    def check(self, last_consumed: list[str]) -> None:
        """What holds for every process, after those before it had given `last_consumed` to their consumers."""
        for episode in self.ended:
            name, _, attempt = episode.rpartition(".")
            assert self.before.attempted.get(name, -1) < int(attempt), "an episode that is in the journal was run again"
            assert name.split("/")[0] not in self.before.closed | self.before.finished, "a finished group was run again"
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
        assert {*consumed} <= self.after.finished | self.after.delivered
        lost = "a record was lost"
        assert self.before.delivered <= self.after.delivered, lost
        assert self.before.discarded <= self.after.discarded, lost
        assert self.before.finished <= self.after.finished | self.after.closed, lost
        for name, attempt in self.before.attempted.items():
            assert name.split("/")[0] in self.after.closed or attempt <= self.after.attempted[name], lost


def kill_rounds(runs: Runs, base: Path, count: int, seed: int) -> int:
    """Kill `count` processes at random moments, then let the last run end; the number of runs that were completed."""
    chance = random.Random(seed)
    killed = completed = 0
    directory, consumed = new_run(base, 0), list[str]()
    while True:
        this = Round(runs, directory, chance if killed < count else None)
        this.check(consumed)
        consumed += this.consumed
        killed += this.status == -signal.SIGKILL
        if this.status == 0:
            check_complete(this.after, consumed)
            completed += 1
            if killed >= count:
                return completed
            directory, consumed = new_run(base, completed), []


def new_run(base: Path, number: int) -> Path:
    directory = base / f"run-{number}"
    directory.mkdir()
    return directory


def check_complete(known: Known, consumed: list[str]) -> None:
    """Every task has been delivered or discarded once, and no episode of the journal counts any more."""
    assert known.delivered == DELIVERED
    assert known.discarded == SKIPPED
    assert {line.split()[0] for line in consumed} == DELIVERED
    assert len({*consumed}) == len(DELIVERED)  # a group that was yielded twice had the same digest
    assert (known.attempted, known.finished) == ({}, set())


@pytest.mark.slow
def test_the_journal_of_a_run_that_is_killed_two_hundred_times_is_exact(runs: Runs, tmp_path: Path) -> None:
    assert kill_rounds(runs, tmp_path, 200, seed=2) >= 2
