"""Rows as a Parquet file."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rollouts.errors import MissingExtraError


def imported_pyarrow() -> Any:
    """The module `pyarrow`. Raises `MissingExtraError`."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtraError("export to Parquet", "parquet", "pyarrow") from error
    return pyarrow


def write_table(
    pyarrow: Any,
    path: Path,
    schema: Any,
    rows: Iterable[dict[str, Any]],
    size_of: Callable[[dict[str, Any]], int] = lambda _: 0,
) -> int:
    """Write rows to the new file `path`; returns their number. Memory holds 1,024 of them, or 32 MiB by `size_of`."""
    written, size = 0, 0
    waiting: list[dict[str, Any]] = []
    with pyarrow.parquet.ParquetWriter(path, schema) as writer:
        for row in rows:
            waiting.append(row)
            size += size_of(row)
            if len(waiting) == 1024 or size > 32 << 20:
                writer.write_table(pyarrow.Table.from_pylist(waiting, schema))
                written, size, waiting = written + len(waiting), 0, []
        writer.write_table(pyarrow.Table.from_pylist(waiting, schema))
    return written + len(waiting)
