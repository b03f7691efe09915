"""The tasks of a run: rows of a file, or what an import path names."""

import hashlib
import json
import sys
from collections import Counter
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

from renderers.errors import MissingExtraError
from renderers.process.files import open_readable
from rollouts.errors import ArgumentError, describe_exception, short_repr
from rollouts.run_config.config_file import ConfigFile
from rollouts.run_config.errors import TaskFileError
from rollouts.run_config.import_paths import check_call, imported_object
from rollouts.run_config.sections import (
    FileTasks,
    ImportedTasks,
    JsonlTasks,
    ParquetTasks,
    TasksOfVerifiers,
)
from rollouts.task import Task
from rollouts.values import whole_number

TaskSource: TypeAlias = Iterable[Task] | AsyncIterable[Task]


def make_tasks(file: ConfigFile) -> TaskSource:
    """The tasks, read while the run needs them. Raises `RunConfigError`; reading, `TaskFileError`."""
    section = file.config.tasks
    if isinstance(section, ImportedTasks):
        return _imported_tasks(file, section)
    assert not isinstance(section, TasksOfVerifiers)  # the environment of that kind has them
    path = file.resolve(section.path)
    if not path.is_file():
        raise file.error(("tasks", "path"), f"there is no file {path}; a path is relative to {file.directory}")
    if isinstance(section, ParquetTasks) and find_spec("pyarrow") is None:
        raise MissingExtraError("tasks in a Parquet file", "parquet", "pyarrow")
    source = FileTaskSource(path, section)
    if source.is_empty():
        raise file.error(("tasks",), f"there is no task in {path}; add at least one")
    return source


def check_tasks(file: ConfigFile, tasks: TaskSource, count: int | None = None) -> None:
    """Refuse rows of a file, an empty list, and two equal ids in one, which would end the run later.

    Only the first `count` tasks are checked, or all. Raises `TaskFileError` and `RunConfigError`.
    """
    if isinstance(tasks, FileTaskSource):
        tasks.check(count)
    elif isinstance(tasks, list | tuple):
        if not tasks:
            raise file.error(("tasks",), "there is no task; add at least one")
        ids = Counter(task.task_id for task in tasks[:count] if isinstance(task, Task))
        if (twice := next((task_id for task_id, times in ids.items() if times > 1), None)) is not None:
            raise file.error(("tasks",), f"two tasks have the id {twice!r:.80}; give each task its own")


def first_tasks(tasks: TaskSource, count: int) -> TaskSource:
    """The first `count` tasks; no further one is taken from the source."""
    if isinstance(tasks, AsyncIterable):
        return _first_of_async(tasks, count)
    return islice(tasks, min(count, sys.maxsize))  # islice takes no larger number


async def _first_of_async(tasks: AsyncIterable[Task], count: int) -> AsyncIterator[Task]:
    taken = 0
    async for task in tasks:
        yield task
        taken += 1
        if taken == count:
            return


@dataclass(frozen=True, slots=True)
class FileTaskSource:
    """The tasks of a file; each iteration reads it from the beginning."""

    path: Path
    section: FileTasks

    def is_empty(self) -> bool:
        """Whether the file has no row. A first row that cannot be read is one: reading the tasks names it."""
        try:
            return next(_rows(self.path, self.section), None) is None
        except (TaskFileError, OSError):
            return False

    def digest(self) -> str:
        """The SHA-256 digest of the file, in hexadecimal."""
        with open(self.path, "rb") as content:
            return hashlib.file_digest(content, "sha256").hexdigest()

    def check(self, count: int | None = None) -> None:
        """Read the first `count` rows, or all: a run ends at a wrong one, perhaps after hours.

        Of a Parquet file only the columns of `id_key` and `seed_key` are read; what others hold is no error.
        Raises `TaskFileError` for the first row that cannot be read or has the id of an earlier one.
        """
        keys = [key for key in (self.section.id_key, self.section.seed_key) if key is not None]
        if isinstance(self.section, ParquetTasks) and not keys:
            return
        rows = _rows(self.path, self.section, columns=keys)
        places: dict[str, str] = {}
        for number, (place, row) in enumerate(islice(rows, None if count is None else min(count, sys.maxsize))):
            task = _task(self.path, self.section, number, place, row)
            if (earlier := places.setdefault(task.task_id, place)) != place:
                reason = f"has the id of {earlier}, {short_repr(task.task_id)}; give each task its own"
                raise TaskFileError(self.path, place, reason)

    def __iter__(self) -> Iterator[Task]:
        for number, (place, row) in enumerate(_rows(self.path, self.section)):
            yield _task(self.path, self.section, number, place, row)


def _rows(path: Path, section: FileTasks, *, columns: Sequence[str] | None = None) -> Iterator[tuple[str, Any]]:
    """The rows, each with its place ("line 1", "row 1"); of Parquet the `columns`, all for None."""
    if isinstance(section, JsonlTasks):
        return _jsonl_rows(path)
    return ((f"row {number}", row) for number, row in enumerate(_parquet_rows(path, columns), 1))


def _jsonl_rows(path: Path) -> Iterator[tuple[str, Any]]:
    with open_readable(path) as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                text = line.decode("utf-8-sig")
                row = json.loads(text)
                if "\\u" in text:  # only an escape can stand for what UTF-8 cannot encode, half of a surrogate pair
                    json.dumps(row, ensure_ascii=False).encode()
            except (ValueError, RecursionError) as error:
                reason = f"not JSON in UTF-8: {error}; write one JSON object a line"
                raise TaskFileError(path, f"line {number}", reason) from error
            yield f"line {number}", row


def _parquet_rows(path: Path, columns: Sequence[str] | None) -> Iterator[Any]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as parquet:
            for batch in parquet.iter_batches(batch_size=256, columns=columns):
                yield from batch.to_pylist()
    except pyarrow.ArrowException as error:
        raise TaskFileError(path, "", f"cannot be read as Parquet: {error}") from error


def _task(path: Path, section: FileTasks, number: int, place: str, row: Any) -> Task:
    if not isinstance(row, Mapping):
        raise TaskFileError(path, place, f"holds {short_repr(row)}; write an object with the data of a task")

    for option, key in (("id_key", section.id_key), ("seed_key", section.seed_key)):
        if key is not None and key not in row:
            reason = f"has no {key!r}, which the configuration names; add it, or remove tasks.{option}"
            raise TaskFileError(path, place, reason)
    task_id = number if section.id_key is None else row[section.id_key]
    if not isinstance(task_id, str) and whole_number(task_id) is None:
        reason = f"{section.id_key} is {short_repr(task_id)}; write a text or an integer"
        raise TaskFileError(path, place, reason)
    try:
        return Task(str(task_id), dict(row), None if section.seed_key is None else row[section.seed_key])
    except ArgumentError as error:
        raise TaskFileError(path, place, str(error)) from error


def _imported_tasks(file: ConfigFile, section: ImportedTasks) -> TaskSource:
    key = ("tasks", "source")
    source = imported_object(file, key, section.source)
    if callable(source):
        check_call(file, ("tasks", "arguments") if section.arguments else key, source, [], section.arguments)
        try:
            source = source(**section.arguments)
        except (Exception, SystemExit) as error:
            # A function of a user may raise anything, and call sys.exit.
            raise file.error(key, f"{section.source} raised {describe_exception(error)}") from error
    elif section.arguments:
        reason = f"{section.source} is a {type(source).__name__}, which is not called; remove the arguments"
        raise file.error(("tasks", "arguments"), reason)
    if isinstance(source, str | bytes | Mapping) or not isinstance(source, Iterable | AsyncIterable):
        kind = type(source).__name__
        raise file.error(key, f"{section.source} gives a {kind}; give an iterable of Task, such as a list or generator")
    return source
