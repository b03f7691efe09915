"""Writes episodes as lines of JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from rollouts.cli.traj.media_files import MediaFiles
from rollouts.trajectory.json_form import trajectory_json
from rollouts.trajectory_file.episodes import Episode


def write_jsonl(lines: Iterable[str], path: Path) -> int:
    """Write the lines of episodes to the new file `path`; returns their number. Raises `OSError`."""
    written = 0
    with path.open("w", encoding="ascii") as file:
        for line in lines:
            file.write(line)
            written += 1
    return written


def json_line(episode: Episode, files: MediaFiles) -> str:
    """One episode on one line, ASCII, with a line feed. Raises `NoJsonFormError`."""
    entry = trajectory_json(episode.trajectory, files.entries)
    return json.dumps(entry, allow_nan=False, separators=(",", ":")) + "\n"
