"""Whole trajectories as JSON lines, with their media."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from renderers.errors import MediaError
from rollouts.cli.traj.media_files import export_medium
from rollouts.files import made_directory
from rollouts.trajectory.media_reference import MediaReference
from rollouts.trajectory.packed_episodes import AbsentSource
from rollouts.trajectory.plain_json import trajectory_json
from rollouts.trajectory.token_node import TokenNode
from rollouts.trajectory_files import Episode


class MediaFiles:
    """Writes media into `directory`, which is created with the first of them.

    `problems` gets a line for each medium that was not written. As a context manager it removes what it has
    written if its block raises.
    """

    def __init__(self, directory: Path, problems: list[str]) -> None:
        self._directory = directory
        self._problems = problems
        self._files: dict[str, str | None] = {}
        self._made = ExitStack()
        self._found: frozenset[Path] | None = None  # None before the directory is made
        self._written: list[Path] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._made.__exit__(kind, error, trace)

    def __len__(self) -> int:
        return sum(file is not None for file in self._files.values())

    def entries(self, node: TokenNode) -> list[dict[str, Any]]:
        """The media of a node as plain data; offsets count from the node's first token.

        Raises `OSError` and `CommandFileError` where a file cannot be written.
        """
        entries = []
        for reference in node.media:
            runs = reference.placeholder.embed_runs
            entries.append(
                {
                    "modality": reference.modality,
                    "mm_hash": reference.mm_hash,
                    "digest": reference.source.digest,
                    "file": self._file_of(reference),
                    "offset": reference.placeholder.offset,
                    "length": reference.placeholder.length,
                    "embed_runs": None if runs is None else [list(run) for run in runs],
                }
            )
        return entries

    def _file_of(self, reference: MediaReference) -> str | None:
        """The path of the medium's file, relative to the exported file; None if it was not written."""
        source = reference.source
        if source.digest not in self._files:
            self._files[source.digest] = None
            if isinstance(source, AbsentSource):
                self._problems.append(f"{source.digest}: its bytes are not in this file")
                return None
            if self._found is None:
                self._written = self._made.enter_context(made_directory(self._directory))
                self._found = frozenset(self._directory.iterdir())
            try:
                path = export_medium(source, self._directory)
                self._files[source.digest] = f"{self._directory.name}/{path.name}"
                if path not in self._found:
                    self._written.append(path)
            except MediaError as error:
                self._problems.append(str(error))
        return self._files[source.digest]


def json_line(episode: Episode, files: MediaFiles) -> str:
    """One episode on one line, ASCII, with a line feed. Raises `RolloutsError`."""
    entry = trajectory_json(episode.trajectory, files.entries)
    return json.dumps(entry, allow_nan=False, separators=(",", ":")) + "\n"
