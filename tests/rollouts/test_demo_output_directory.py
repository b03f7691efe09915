"""The output directory of the demonstration after Ctrl-C."""

from __future__ import annotations

import os
from pathlib import Path

from rollouts.demo.run import has_episodes, interrupted_message
from transport import RecordWriter


def test_a_file_without_episodes_is_not_named_after_an_interruption(tmp_path: Path) -> None:
    assert not has_episodes(tmp_path, 0.0)
    file = tmp_path / "trajectories.mmr"
    with RecordWriter(file) as out:
        assert file.stat().st_size > 0
        assert not has_episodes(tmp_path, 0.0)
        assert interrupted_message(tmp_path, 0.0) == "interrupted before the first episode"
        out.append({"an": "episode"})
        assert has_episodes(tmp_path, 0.0)
    assert interrupted_message(tmp_path, 0.0) == f"interrupted; the episodes so far are in {file}"


def test_episodes_of_an_earlier_run_are_not_named_after_an_interruption(tmp_path: Path) -> None:
    file = tmp_path / "trajectories.mmr"
    with RecordWriter(file) as out:
        out.append({"an": "episode"})
    os.utime(file, (1000, 1000))
    assert not has_episodes(tmp_path, 2000.0)
