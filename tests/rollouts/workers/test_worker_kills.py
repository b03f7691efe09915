"""A run whose workers are killed at random, and its process with `kill -9`: nothing is lost, nothing is doubled."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from test_journal_kills import Runs, kill_rounds

PROGRAM = Path(__file__).parent / "journalled_workers.py"


@pytest.fixture
def runs(tiny_model_dir: Path) -> Iterator[Runs]:
    made = Runs(tiny_model_dir, PROGRAM)
    yield made
    made.close()


def workers_killed(base: Path) -> int:
    return sum(len(path.read_text().splitlines()) for path in base.glob("run-*/killed"))


@pytest.mark.slow
def test_a_run_is_exact_though_its_workers_and_its_process_are_killed_twenty_times(runs: Runs, tmp_path: Path) -> None:
    assert kill_rounds(runs, tmp_path, 20, seed=2) >= 1
    assert workers_killed(tmp_path) >= 5
