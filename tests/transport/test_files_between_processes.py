"""Record files between processes: a writer killed at any moment, a full disk, a reader beside a writer."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from renderers.media.item import MediaSource
from transport import FileChangedError, RecordReader, RecordWriter

WRITER = """
import sys, time, numpy as np
from renderers.media.item import MediaSource
from transport import RecordWriter
path, count, pause = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
with RecordWriter(path) as out:
    start = out._tail[1]
    for n in range(start, start + count):
        image = MediaSource.of(str(n // 3).encode() * 2000)
        assert out.append({"n": n, "image": image, "array": np.full(3000, n)}) == n
        print(n, flush=True)
        time.sleep(pause)
"""


def writer(path: Path, count: int, pause: float = 0.0) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", WRITER, str(path), str(count), str(pause)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)


def check(record: dict[str, object], number: int) -> None:
    assert record["n"] == number
    image = record["image"]
    assert isinstance(image, MediaSource)
    assert bytes(image.data) == str(number // 3).encode() * 2000
    np.testing.assert_array_equal(record["array"], np.full(3000, number))


@pytest.mark.slow
def test_a_writer_killed_at_any_moment_loses_nothing_it_had_reported(tmp_path: Path) -> None:
    path = tmp_path / "episodes.mmr"
    chance = random.Random(5)
    reported = -1
    for _ in range(6):
        process = writer(path, 10**6)
        assert process.stdout is not None
        reported = int(process.stdout.readline())
        time.sleep(chance.random() / 20)
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read().split("\n")[:-1]
        process.wait()
        reported = int(rest[-1]) if rest else reported
        with RecordReader(path) as reader:
            assert reported + 1 <= len(reader) <= reported + 2  # one may be written and not yet reported
            for number, record in enumerate(reader):
                check(record, number)
    assert reported > 6


def test_a_full_disk_fails_the_append_and_leaves_a_sound_file(tmp_path: Path) -> None:
    path = tmp_path / "episodes.mmr"
    code = """
import resource, sys, numpy as np
from transport import RecordReader, RecordWriter
path = sys.argv[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))
out = RecordWriter(path)
written = 0
try:
    while True:
        out.append(np.full(700, written))
        written += 1
except OSError as error:
    assert error.errno == 27, error
assert 2 < written < 6, written
with RecordReader(path) as reader:
    assert len(reader) == written and reader.truncated_bytes > 0
assert out.append("small") == written  # what fits still goes in
out.close()
with RecordReader(path) as reader:
    assert len(reader) == written + 1 and reader.truncated_bytes == 0
    assert [int(array[0]) for array in list(reader)[:-1]] == list(range(written)) and reader[-1] == "small"
"""
    result = subprocess.run([sys.executable, "-c", code, str(path)], check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_a_reader_beside_a_writer_sees_each_record_whole_and_as_soon_as_it_was_reported(tmp_path: Path) -> None:
    path = tmp_path / "episodes.mmr"
    process = writer(path, 60, 0.005)
    assert process.stdout is not None
    process.stdout.readline()
    kept = []
    with RecordReader(path) as reader:
        seen = 0
        for line in process.stdout:
            known = len(reader)
            assert reader.refresh() == len(reader) - known
            assert len(reader) > int(line)
            for number in range(seen, len(reader)):
                record = reader[number]
                check(record, number)
                kept.append(record)
            seen = len(reader)
        assert seen == 60
    process.wait()
    for number, record in enumerate(kept):  # arrays read early outlive every later mapping
        check(record, number)
    assert len({id(record["image"]) for record in kept}) == 20


def test_refreshing_a_reader_of_an_empty_or_torn_file_finds_what_comes(tmp_path: Path) -> None:
    path = tmp_path / "episodes.mmr"
    path.write_bytes(b"MMRREC")
    with RecordReader(path) as reader:
        assert (len(reader), reader.truncated_bytes) == (0, 6)
        with RecordWriter(path) as out:
            out.append("first")
        assert reader.refresh() == 1
        size = path.stat().st_size
        with RecordWriter(path) as out:
            out.append("second" * 100)
        whole = path.read_bytes()
        os.truncate(path, size + 100)
        assert (reader.refresh(), reader.truncated_bytes) == (0, 100)
        path.write_bytes(whole)
        assert (reader.refresh(), reader.truncated_bytes) == (1, 0)
        assert list(reader) == ["first", "second" * 100]
        os.truncate(path, size)
        with pytest.raises(FileChangedError):
            reader.refresh()


@pytest.mark.slow
def test_a_torn_tail_cut_off_while_a_reader_looks_at_it_does_not_kill_the_reader(tmp_path: Path) -> None:
    """Mapped bytes that are no longer in the file end the process that touches them."""
    code = """
import os, sys
from transport import RecordReader, RecordWriter
from transport.records import layout
path = sys.argv[1]
with RecordWriter(path) as out:
    out.append("first")
end = os.path.getsize(path)
with open(path, "ab") as file:
    file.write(bytes(1 << 20))
walk = layout.find_complete
def cut_first(source, *rest):
    assert source.size == end + (1 << 20)
    os.truncate(path, end)
    return walk(source, *rest)
layout.find_complete = cut_first
with RecordReader(path) as reader:
    assert list(reader) == ["first"]
"""
    arguments = [sys.executable, "-c", code, str(tmp_path / "episodes.mmr")]
    result = subprocess.run(arguments, check=False, capture_output=True, text=True)
    assert result.returncode == 0, (result.returncode, result.stderr)
