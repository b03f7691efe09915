"""A directory of media sources, each a file named by its digest: `<directory>/ab/abcdef...`, 64 hex digits."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_DIGEST = re.compile(r"[0-9a-f]{64}")
_SHARD = re.compile(r"[0-9a-f]{2}")


class SourceFile(NamedTuple):
    """A file of the directory with the name and place of a source; its contents were not checked."""

    digest: str
    path: Path
    nbytes: int
    mtime_ns: int


def source_files(directory: Path) -> Iterator[SourceFile]:
    """Every file below `directory` with the name and place of a source, in the order of digests. Raises `OSError`."""
    for shard in _shards(directory):
        with os.scandir(shard) as entries:
            names = sorted(entry.name for entry in entries)
        for name in names:
            if _DIGEST.fullmatch(name) and name.startswith(shard.name):
                with contextlib.suppress(FileNotFoundError):  # removed by another process meanwhile
                    stat = os.stat(shard / name)
                    yield SourceFile(name, shard / name, stat.st_size, stat.st_mtime_ns)


def _shards(directory: Path) -> list[Path]:
    with os.scandir(directory) as entries:
        return sorted(Path(entry) for entry in entries if _SHARD.fullmatch(entry.name) and entry.is_dir())
