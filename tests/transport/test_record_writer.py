"""RecordWriter when its file is deleted or moved, when an append is interrupted, and where it cannot be locked."""

import errno
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from writer_processes import write

from transport import (
    MalformedError,
    RecordReader,
    RecordWriter,
    TransportError,
    merge_record_files,
    read_records,
    repair_record_file,
)
from transport.records.file_lock import open_locked


def test_a_writer_whose_file_was_deleted_says_so_instead_of_writing_to_nowhere(path: Path) -> None:
    out = RecordWriter(path)
    out.append(1)
    path.unlink()
    for attempt in (lambda: out.append(2), out.close):
        with pytest.raises(FileNotFoundError, match="was deleted"):
            attempt()
    write(path, "fresh")
    assert list(read_records(path)) == ["fresh"]


def test_a_writer_that_was_moved_goes_on_and_leaves_what_is_at_its_old_name_alone(path: Path) -> None:
    moved = path.with_name("moved.mmr")
    with RecordWriter(path) as out:
        out.append(1)
        path.rename(moved)
        write(path, "another")
        other = path.read_bytes()
        out.append(2)
    assert list(read_records(moved)) == [1, 2]
    assert path.read_bytes() == other


def test_a_flush_waits_for_the_file_and_once_for_the_directory_that_lists_a_new_one(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[bool] = []  # whether it was a directory: no power can be cut in a test
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(stat.S_ISDIR(os.fstat(descriptor).st_mode)))
    for _ in range(2):
        with RecordWriter(path) as out:
            out.flush()
            out.flush()
    assert synced == [False, True, False, False, False]


SIGBUS = """
import sys
import numpy as np
from transport import RecordReader, RecordWriter
path = sys.argv[1]
out = RecordWriter(path)
real = out._file

class Interrupting:
    def __getattr__(self, name):
        return getattr(real, name)
    def write(self, data):
        real.write(data)
        raise KeyboardInterrupt  # all of it is written, and the writer does not know

out._file = Interrupting()
try:
    out.append(np.arange(1 << 20))
except KeyboardInterrupt:
    out._file = real
array = RecordReader(path)[0]
for record in ("small", np.zeros(10)):
    out.append(record)
out.close()
RecordWriter(path).close()
assert int(array.sum()) == (1 << 20) * ((1 << 20) - 1) // 2
with RecordReader(path) as reader:
    assert len(reader) == 3 and reader[1] == "small"
"""


@pytest.mark.slow
def test_an_array_of_a_record_that_an_interrupted_append_completed_stays_readable(path: Path) -> None:
    result = subprocess.run([sys.executable, "-c", SIGBUS, str(path)], check=False, capture_output=True, text=True)
    assert result.returncode == 0, (result.returncode, result.stderr)


def test_a_signal_handler_may_close_the_writer_that_it_interrupts_and_not_append_to_it(path: Path) -> None:
    class Signalling:
        """A file whose write is interrupted by a signal handler half-way."""

        def __init__(self, file: Any, handler: Callable[[], object]) -> None:
            self.file, self.handler = file, handler

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def write(self, data: memoryview) -> int:
            half = int(self.file.write(data[: data.nbytes // 2]))
            out._file, handler = self.file, self.handler
            handler()
            return half

    out = RecordWriter(path)
    out.append("first")
    out._file = Signalling(out._file, lambda: out.append("inner"))  # type: ignore[assignment]
    with pytest.raises(TransportError, match="is appending already"):
        out.append("outer")
    out._file = Signalling(out._file, out.close)  # type: ignore[assignment]
    with pytest.raises((ValueError, TransportError)):
        out.append("outer")
    assert list(read_records(path)) == ["first"]


def test_a_file_system_without_locks_is_named_and_no_file_is_written_without_one(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(file: Any, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    fcntl = pytest.importorskip("fcntl")
    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(TransportError, match=r"episodes\.mmr cannot be locked: No locks available"):
        RecordWriter(path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes")
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_pipes_and_devices_are_refused_at_once(path: Path, kind: str) -> None:
    target = path if kind == "pipe" else Path("/dev/zero")
    if kind == "pipe":
        os.mkfifo(path)
    for attempt in (
        lambda: RecordReader(target),
        lambda: RecordWriter(target),
        lambda: repair_record_file(target),
        lambda: merge_record_files([target], path.with_name("out.mmr")),
        lambda: open_locked(str(target), "a+"),
    ):
        with pytest.raises(MalformedError, match="is a pipe or a device"):
            attempt()
