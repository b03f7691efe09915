"""Trajectories as JSONL and Parquet, with their media."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from rollouts.cli.traj.media_files import export_medium
from rollouts.cli.traj.table_file import imported_pyarrow, write_table
from rollouts.errors import ExportError
from rollouts.files import made_directory
from rollouts.trajectory.media_reference import MediaReference
from rollouts.trajectory.packed_episodes import AbsentSource
from rollouts.trajectory.plain_json import plain, trajectory_json
from rollouts.trajectory.token_node import TokenNode
from rollouts.trajectory_files import Episode
from transport.wire.arrays import array_bytes


class MediaFiles:
    """Writes media into `directory`, which is created with the first of them.

    `problems` gets a line for each medium that was not written. As a context manager it removes what it has written if
    its block raises.
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
            except ExportError as error:
                self._problems.append(str(error))
        return self._files[source.digest]


def json_line(episode: Episode, files: MediaFiles) -> str:
    """One episode on one line, ASCII, with a line feed. Raises `NoJsonFormError`."""
    entry = trajectory_json(episode.trajectory, files.entries)
    return json.dumps(entry, allow_nan=False, separators=(",", ":")) + "\n"


# Writes episodes as a Parquet table with one row for each node.
#
# The rows are not branches: branches share nodes, so a table of branches would repeat shared tokens and images, and
# would not show which tokens are trained twice. A branch is the rows from a node along `parent` to the root.


def write_nodes(episodes: Iterable[list[dict[str, Any]]], path: Path) -> int:
    """Write the `node_rows` of episodes to the new file `path`; returns the number of episodes.

    `_schema` has the columns and their types. `number` counts the episodes of the file, `parent` is -1 at a root,
    `logprobs` has the sampled tokens only, offsets of `media` count from the node's first token; `provenance`,
    `messages`, `message` and `info` are JSON. The columns from `turn` on are null for a node that is no completion. An
    episode without nodes has no row. Raises `MissingExtraError`, `OSError`.
    """
    pyarrow = imported_pyarrow()
    written = 0

    def rows() -> Iterator[dict[str, Any]]:
        nonlocal written
        for nodes in episodes:
            yield from nodes
            written += 1

    write_table(pyarrow, path, _schema(pyarrow), rows())
    return written


def _schema(pyarrow: Any) -> Any:
    text, int32, flag, double = pyarrow.string(), pyarrow.int32(), pyarrow.bool_(), pyarrow.float64()
    spans = pyarrow.struct({"version": text, "start": int32, "end": int32})
    names = dict.fromkeys(("modality", "mm_hash", "digest", "file"), text)
    runs = pyarrow.list_(pyarrow.list_(int32))
    media = pyarrow.struct({**names, "offset": int32, "length": int32, "embed_runs": runs})
    shape = pyarrow.list_(pyarrow.int64())
    extra = pyarrow.struct({"name": text, "dtype": text, "shape": shape, "data": pyarrow.binary()})
    return pyarrow.schema(
        {
            "number": pyarrow.int64(),
            "episode_id": text,
            "group_id": text,
            "seed": pyarrow.int64(),
            "episode_reward": double,
            "done": flag,
            "truncated": flag,
            "truncation_reason": text,
            "error": text,
            "provenance": text,
            "node": int32,
            "parent": int32,
            "token_ids": pyarrow.list_(int32),
            "sampled": pyarrow.list_(flag),
            "content": pyarrow.list_(flag),
            "logprobs": pyarrow.list_(pyarrow.float32()),
            "weight_spans": pyarrow.list_(spans),
            "media": pyarrow.list_(media),
            "messages": text,
            "extras": pyarrow.list_(extra),
            "turn": int32,
            "finish_reason": text,
            "reward": double,
            "message": text,
            "info": text,
            "agent": text,
        }
    )


def node_rows(episode: Episode, files: MediaFiles) -> list[dict[str, Any]]:
    """The rows of one episode. Raises `NoJsonFormError`."""
    rows = []
    trajectory = episode.trajectory
    turns = {turn.node: (turn_number, turn) for turn_number, turn in enumerate(trajectory.turns)}
    shared = {
        "number": episode.number,
        "episode_id": trajectory.episode_id,
        "group_id": trajectory.group_id,
        "seed": trajectory.seed,
        "episode_reward": trajectory.reward,
        "done": trajectory.done,
        "truncated": trajectory.truncated,
        "truncation_reason": trajectory.truncation_reason,
        "error": trajectory.error,
        "provenance": _json(trajectory.provenance),
    }
    for index, node in enumerate(trajectory.nodes):
        row = shared | {
            "node": index,
            "parent": node.parent,
            "token_ids": node.token_ids.astype(np.int32),  # an engine's may be of another size or byte order
            "sampled": node.sampled,
            "content": node.content,
            "logprobs": node.logprobs.astype(np.float32),
            "weight_spans": [
                {"version": str(span.version), "start": span.start, "end": span.end} for span in node.weight_spans
            ],
            "media": files.entries(node),
            "messages": _json(node.messages),
            "extras": [
                {"name": name, "dtype": array.dtype.str, "shape": array.shape, "data": bytes(array_bytes(array))}
                for name, array in node.extras.items()
            ],
        }
        if index in turns:
            turn_number, turn = turns[index]
            row |= {
                "turn": turn_number,
                "finish_reason": turn.finish_reason.value,
                "reward": float(turn.reward),
                "message": _json(turn.message),
                "info": _json(turn.info),
                "agent": turn.agent,
            }
        rows.append(row)
    return rows


def _json(value: Any) -> str:
    return json.dumps(plain(value), allow_nan=False)
