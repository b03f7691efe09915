"""A record file has one writer at a time, whichever process or name opens it; readers are not disturbed."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from writer_processes import MOST_SECONDS, line_of, running, write

from transport import (
    FileLockedError,
    RecordReader,
    RecordWriter,
    merge_record_files,
    read_records,
    repair_record_file,
)
from transport.records import file_lock

HOLD = """
import sys
from transport import RecordWriter
out = RecordWriter(sys.argv[1])
out.append("theirs")
print("open", flush=True)
sys.stdin.read()
out.close()
print("closed", flush=True)
"""


def test_a_second_writer_in_the_same_process_is_refused_and_nothing_is_lost(path: Path) -> None:
    first = RecordWriter(path)
    first.append(0)
    with pytest.raises(FileLockedError, match=f"{path} is open for writing"):
        RecordWriter(path)
    first.append("precious")
    first.close()
    with RecordWriter(path) as second:
        assert second.append("after") == 2
    assert list(read_records(path)) == [0, "precious", "after"]


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_the_lock_is_on_the_file_and_not_on_its_name(path: Path, link: Callable[[Path, Path], None]) -> None:
    write(path, 0)
    other = path.with_name("other.mmr")
    link(path, other)
    with RecordWriter(path) as out:
        with pytest.raises(FileLockedError):
            RecordWriter(other)
        out.append(1)
    with RecordWriter(other), pytest.raises(FileLockedError):
        RecordWriter(path)
    assert list(read_records(other)) == [0, 1]


FORKING = r"""
import os, sys
import numpy as np
from transport import FileLockedError, RecordWriter, TransportError
path = sys.argv[1]
out = RecordWriter(path)
out.append("before")
read_end, write_end = os.pipe()
if os.fork() == 0:
    said = []
    for attempt in (lambda: out.append("child"), out.flush):
        try:
            attempt()
        except TransportError as error:
            said.append("closed" if "Open a writer on a file of its own" in str(error) else str(error))
    out.close()  # as leaving a with block does
    try:
        RecordWriter(path)
    except FileLockedError:
        said.append("locked")
    sys.stdout.write(" ".join(said) + "\n")
    sys.stdout.flush()
    os.close(write_end)
    os.read(read_end, 1)  # until the parent is gone
    print("alone", flush=True)
    sys.stdin.read()
    os._exit(0)
os.close(read_end)
sys.stdout.write(f"{out.append('after')}\n")
sys.stdout.flush()
sys.stdin.readline()
os.kill(os.getpid(), 9)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_process_neither_writes_nor_unlocks_nor_keeps_the_file_locked(path: Path) -> None:
    with running(FORKING, path) as parent:
        assert {line_of(parent), line_of(parent)} == {"closed closed locked", "1"}
        with pytest.raises(FileLockedError):
            RecordWriter(path)
        assert parent.stdin is not None
        parent.stdin.write("\n")
        parent.stdin.flush()
        assert line_of(parent) == "alone"  # the child lives on
        parent.wait(MOST_SECONDS)  # of a process that is ending, the system may close a pipe before it unlocks a file
        write(path, "next")
    assert list(read_records(path)) == ["before", "after", "next"]


@pytest.mark.slow
def test_repair_and_merge_of_a_file_that_a_writer_has_open_are_refused(path: Path) -> None:
    out = path.with_name("out.mmr")
    with running(HOLD, path) as holder:
        assert line_of(holder) == "open"
        for attempt in (lambda: repair_record_file(path), lambda: merge_record_files([path], out)):
            with pytest.raises(FileLockedError):
                attempt()
    assert os.listdir(path.parent) == [path.name]
    assert repair_record_file(path).kept == 1
    assert merge_record_files([path, path], out) == 2


def test_merging_does_not_keep_a_writer_from_its_file_and_notices_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transport import FileChangedError

    write(path, 1)
    copy = RecordWriter.copy

    def append_meanwhile(writer: RecordWriter, reader: RecordReader, index: int) -> int:
        write(path, 2)
        return copy(writer, reader, index)

    monkeypatch.setattr(RecordWriter, "copy", append_meanwhile)
    with pytest.raises(FileChangedError):
        merge_record_files([path], path.with_name("out.mmr"))
    assert os.listdir(path.parent) == [path.name]
    assert list(read_records(path)) == [1, 2]


def test_a_writer_that_opened_a_file_just_before_it_was_replaced_writes_to_the_new_one(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(path, "old")
    acquire = file_lock._acquire
    replaced = []

    def replace_first(file: Any, name: str) -> None:
        if not replaced:
            replaced.append(name)
            beside = path.with_name("beside.mmr")
            monkeypatch.setattr(file_lock, "_acquire", acquire)
            write(beside, "new")
            beside.replace(path)
        acquire(file, name)

    monkeypatch.setattr(file_lock, "_acquire", replace_first)
    write(path, "appended")
    assert list(read_records(path)) == ["new", "appended"]
