"""The output directory of the demonstration."""

from __future__ import annotations

from pathlib import Path

from rollouts.observability.training_log import MISMATCH_FILE, TRAINING_FILE
from transport import RecordReader
from transport.records.file_lock import check_unlocked, locked


def episodes_file(out: Path) -> Path:
    return out / "trajectories.mmr"


def prepare_output(out: Path) -> None:
    """Create the directory before the slow work begins.

    Raises `OSError`, and `FileLockedError` if another run is writing its episodes there.
    """
    out.mkdir(parents=True, exist_ok=True)
    if episodes_file(out).exists():
        check_unlocked(episodes_file(out))


def remove_earlier_episodes(out: Path) -> None:
    """Delete the episodes and the training log of an earlier run. Raises the errors of `prepare_output`."""
    for records in (episodes_file(out), out / MISMATCH_FILE):
        if records.exists():
            with locked(records):
                records.unlink()
    (out / TRAINING_FILE).unlink(missing_ok=True)


def interrupted_message(out: Path, started_at: float) -> str:
    """Return the message after Ctrl-C. It names the file only if this run (started at `started_at`, epoch) wrote it."""
    if has_episodes(out, started_at):
        return f"interrupted; the episodes so far are in {episodes_file(out)}"
    return "interrupted before the first episode"


def has_episodes(out: Path, started_at: float) -> bool:
    """Whether this run (started at `started_at`, epoch) wrote episodes: the file is made before the first of them."""
    episodes = episodes_file(out)
    if not episodes.exists() or episodes.stat().st_mtime < started_at:
        return False
    with RecordReader(episodes) as reader:
        return len(reader) > 0
