"""The tasks of a configuration: rows of files, and what is imported."""

import re
from pathlib import Path

import pytest
from run_config_files import CONFIG, write_run

from rollouts.run_config.config_file import read_config
from rollouts.run_config.errors import TaskFileError
from rollouts.run_config.run_parts import RunParts, make_parts
from rollouts.run_config.tasks import FileTaskSource
from rollouts.task import Task


def parts_of(directory: Path, config: str = CONFIG) -> RunParts:
    return make_parts(read_config(write_run(directory, config)), offline=True)


def with_tasks(lines: str) -> str:
    section = '[tasks]\nkind = "jsonl"\npath = "tasks.jsonl"\nid_key = "name"\n'
    assert section in CONFIG
    return CONFIG.replace(section, f"[tasks]\n{lines}\n")


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_files_of_each_kind_give_the_same_tasks_each_time_they_are_read(tmp_path: Path, kind: str) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = [{"name": "four", "number": 4, "image": b"\x89P"}, {"name": "seven", "number": 7, "image": None}]
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    else:
        rows = [{"name": "four", "number": 4}, {"name": "seven", "number": 7}]
        (tmp_path / "rows.jsonl").write_text('{"name": "four", "number": 4}\n\n{"name": "seven", "number": 7}')
    source = parts_of(tmp_path, with_tasks(f'kind = "{kind}"\npath = "rows.{kind}"\nid_key = "name"')).tasks
    for _ in range(2):
        assert [(task.task_id, task.data) for task in source] == [("four", rows[0]), ("seven", rows[1])]


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ('id_key = "name"', "row 3: has the id of row 1, 'four'"),
        ('id_key = "image"', "row 1: image is b'"),
        ('seed_key = "number"', None),
        ('seed_key = "name"', "row 1: "),
    ],
)
def test_the_ids_and_seeds_of_a_parquet_file_are_checked(tmp_path: Path, keys: str, reason: str | None) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = [{"name": name, "number": 4, "image": b"\x89P"} for name in ("four", "seven", "four")]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    source = parts_of(tmp_path, with_tasks(f'kind = "parquet"\npath = "rows.parquet"\n{keys}')).tasks
    assert isinstance(source, FileTaskSource)
    if reason is None:
        source.check()
    else:
        with pytest.raises(TaskFileError, match=re.escape(reason)):
            source.check()


def test_a_file_that_holds_no_tasks_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "rows.parquet").write_bytes(b"nothing")
    parts = parts_of(tmp_path, with_tasks('kind = "parquet"\npath = "rows.parquet"'))
    with pytest.raises(TaskFileError, match="cannot be read as Parquet"):
        list(parts.tasks)


IMPORTED = """\
from rollouts.task import Task
LIST = [Task("a"), Task("b")]
def count(n):
    return (Task(str(number)) for number in range(n))
"""


def imported(directory: Path, source: str, arguments: str = "") -> str:
    (directory / "some_tasks.py").write_text(IMPORTED)
    return with_tasks(f'kind = "import"\nsource = "some_tasks:{source}"\n{arguments}')


def test_tasks_are_imported_as_an_iterable_or_from_a_function(tmp_path: Path) -> None:
    assert [task.task_id for task in parts_of(tmp_path, imported(tmp_path, "LIST")).tasks] == ["a", "b"]
    counted = parts_of(tmp_path, imported(tmp_path, "count", "arguments = { n = 3 }"))
    assert list(counted.tasks) == [Task("0"), Task("1"), Task("2")]
