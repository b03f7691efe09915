"""The output directory of the demonstration."""

from __future__ import annotations

from pathlib import Path

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
    """Delete the file of an earlier run. Raises the errors of `prepare_output`."""
    episodes = episodes_file(out)
    if episodes.exists():
        with locked(episodes):
            episodes.unlink()


def interrupted_message(out: Path, started_at: float) -> str:
    """Return the message after Ctrl-C. It names the file only if this run (started at `started_at`, epoch) wrote it."""
    episodes = episodes_file(out)
    if episodes.exists() and episodes.stat().st_mtime >= started_at:
        return f"interrupted; the episodes so far are in {episodes}"
    return "interrupted before the first episode"
