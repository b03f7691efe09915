"""Files that are replaced as a whole."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def replaced_file(path: Path) -> Iterator[IO[bytes]]:
    """A new file that takes the place of `path` when it is complete, and is removed after an error."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.unlink(missing_ok=True)  # of a process that was killed: in a container, the next one may have its number
    try:
        with open(partial, "xb") as out:
            yield out
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
