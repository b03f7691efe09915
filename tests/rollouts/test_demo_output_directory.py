"""The output directory of the demonstration after Ctrl-C."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollouts.demo.process import has_episodes
from transport import RecordWriter


def test_a_file_without_episodes_is_not_named_after_an_interruption(tmp_path: Path) -> None:
    assert not has_episodes(tmp_path, 0.0)
    file = tmp_path / "trajectories.mmr"
    with RecordWriter(file) as out:
        assert file.stat().st_size > 0
        assert not has_episodes(tmp_path, 0.0)
        out.append({"an": "episode"})
        assert has_episodes(tmp_path, 0.0)
    os.utime(file, (1000, 1000))
    assert not has_episodes(tmp_path, 2000.0)  # they are of an earlier run


@pytest.mark.slow
def test_the_process_of_the_trainer_can_be_started_before_torch_is_imported() -> None:
    code = "import sys, rollouts.demo.process; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
