"""Writes the media of exported episodes, each once, to a file named by its digest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rollouts.cli.errors import ExportError
from rollouts.cli.media.export import export_medium
from rollouts.cli.media.inventory import Medium
from rollouts.trajectory.packed_episodes import AbsentSource
from rollouts.trajectory.token_node import MediaReference, TokenNode


class MediaFiles:
    """Writes media into `directory`, which is created with the first of them.

    `problems` gets a line for each medium that was not written.
    """

    def __init__(self, directory: Path, problems: list[str]) -> None:
        self._directory = directory
        self._problems = problems
        self._files: dict[str, str | None] = {}

    def __len__(self) -> int:
        return sum(file is not None for file in self._files.values())

    def entries(self, node: TokenNode) -> list[dict[str, Any]]:
        """The media of a node as plain data; offsets count from the node's first token. Raises `OSError`."""
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
            self._directory.mkdir(parents=True, exist_ok=True)
            try:
                path = export_medium(Medium(source.digest, source.nbytes, data=source.data), self._directory)
                self._files[source.digest] = f"{self._directory.name}/{path.name}"
            except ExportError as error:
                self._problems.append(str(error))
        return self._files[source.digest]
