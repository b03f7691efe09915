"""Fixtures that several test files of transport share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a test may write a record file."""
    return tmp_path / "episodes.mmr"
