"""Fixtures that several test files of transport share."""

from pathlib import Path

import pytest


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a test may write a record file."""
    return tmp_path / "episodes.mmr"
