"""Record files: images once, torn tails dropped, damage confined to the record it hit."""

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from writer_processes import IMAGE, OTHER, flip, write

from renderers.media.item import MediaSource
from transport import (
    ChecksumError,
    EncodeError,
    FileChangedError,
    MalformedError,
    RecordReader,
    RecordWriter,
    read_records,
)
from transport.errors import DecodeError
from transport.records.reader import _Mapping
from transport.records.rewriting import repair_record_file


def failure(reader: RecordReader, index: int) -> ChecksumError | None:
    """The error that reading a record gives, if it gives one."""
    try:
        reader[index]
    except ChecksumError as error:
        return error
    return None


def test_records_come_back_in_order_by_index_and_by_iteration(path: Path) -> None:
    with RecordWriter(path) as out:
        assert [out.append({"n": n}) for n in range(4)] == [0, 1, 2, 3]
        out.flush()
        assert list(read_records(path)) == [{"n": n} for n in range(4)]  # while the writer is open
    with RecordReader(path) as reader:
        assert len(reader) == 4
        assert reader[-1] == reader[3] == {"n": 3}
        assert list(reader) == [{"n": n} for n in range(4)]
        assert reader.truncated_bytes == 0
        with pytest.raises(IndexError, match=r"episodes\.mmr has 4 records and no record 4"):
            reader[4]


def test_a_record_can_be_read_without_the_bytes_of_its_media(path: Path) -> None:
    write(path, {"id": "first", "image": IMAGE}, [OTHER])
    flip(path, path.read_bytes().index(bytes(IMAGE.data)))
    with RecordReader(path) as reader:
        record = reader.without_media(0)
        assert record == {"id": "first", "image": IMAGE}  # sources are equal where their digests are
        assert record["image"].nbytes == 0
        assert reader[1][0].data == OTHER.data
        assert reader.without_media(-1)[0].nbytes == 0
        with pytest.raises(ChecksumError):
            reader[0]


def test_an_image_shared_by_records_is_stored_once_and_read_as_one_object(path: Path) -> None:
    write(path, [IMAGE, IMAGE], {"again": MediaSource.of(bytes(IMAGE.data)), "new": OTHER}, IMAGE)
    assert path.read_bytes().count(bytes(IMAGE.data)) == 1
    with RecordReader(path) as reader:
        first, second, third = reader
        assert first == [IMAGE, IMAGE]
        assert second == {"again": IMAGE, "new": OTHER}
        assert first[0] is second["again"] is third
        assert bytes(third.data) == IMAGE.data


def test_arrays_are_aligned_views_on_the_file_that_outlive_the_reader(path: Path) -> None:
    expected = np.arange(1000, dtype=np.float32)
    write(path, "first", {"a": expected})
    with RecordReader(path) as reader:
        array = reader[1]["a"]
    assert not array.flags.owndata
    assert not array.flags.writeable
    assert array.ctypes.data % 64 == 0
    np.testing.assert_array_equal(array, expected)


def test_a_file_torn_anywhere_in_its_last_record_reads_up_to_it_and_can_be_continued(path: Path) -> None:
    write(path, {"n": 0}, [IMAGE])
    before = path.stat().st_size
    write(path, [OTHER, IMAGE, 7])
    whole = path.read_bytes()
    blob_end = before + 64 + -(-OTHER.nbytes // 64) * 64  # the image of the last record, whole by itself
    for cut in range(before, len(whole)):
        path.write_bytes(whole[:cut])
        with RecordReader(path) as reader:
            assert list(reader) == [{"n": 0}, [IMAGE]]
            assert reader.truncated_bytes == cut - (blob_end if cut >= blob_end else before)
        if cut % 16 < 2:
            write(path, [OTHER, "next"])
            with RecordReader(path) as reader:
                assert list(reader) == [{"n": 0}, [IMAGE], [OTHER, "next"]]
                assert reader.truncated_bytes == 0
            assert path.read_bytes().count(bytes(OTHER.data)) == 1


def test_an_image_stored_under_another_digest_is_refused_although_the_file_is_sound(path: Path) -> None:
    write(path, [MediaSource(IMAGE.digest, b"not the image")], 1)
    with pytest.raises(ChecksumError, match=IMAGE.digest):
        list(read_records(path))


def test_a_record_file_stored_inside_a_damaged_record_is_not_taken_for_records(path: Path) -> None:
    inner = path.with_name("inner.mmr")
    write(inner, "from inside")
    write(path, "first")
    start = path.stat().st_size
    write(path, np.fromfile(inner, np.uint8), "third")
    flip(path, start + 8)
    with RecordReader(path) as reader:
        assert (len(reader), reader[0], reader[2]) == (3, "first", "third")
        assert failure(reader, 1) is not None


class Interrupting:
    """A file whose next write is cut short by Ctrl-C after `keep` bytes."""

    def __init__(self, file: Any, keep: int) -> None:
        self.file, self.keep = file, keep

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def write(self, data: memoryview) -> int:
        self.file.write(data[: self.keep])
        raise KeyboardInterrupt


@pytest.mark.parametrize("keep", [0, 1, 64, 700, 10_000])
def test_ctrl_c_inside_an_append_leaves_a_readable_file_and_a_usable_writer(path: Path, keep: int) -> None:
    whole = [[IMAGE, "interrupted"]] if keep == 10_000 else []  # what was written whole is never taken away
    with RecordWriter(path) as out:
        out.append("first")
        real = out._file
        out._file = Interrupting(real, keep)  # type: ignore[assignment]
        with pytest.raises(KeyboardInterrupt):
            out.append([IMAGE, "interrupted"])
        out._file = real
        with RecordReader(path) as reader:
            assert list(reader) == ["first", *whole]
            assert out.append([IMAGE, "second"]) == 1 + len(whole)
            assert reader.refresh() == 1
            assert list(reader) == ["first", *whole, [IMAGE, "second"]]
    with RecordReader(path) as reader:
        assert list(reader) == ["first", *whole, [IMAGE, "second"]]
        assert reader.truncated_bytes == 0
    assert path.read_bytes().count(bytes(IMAGE.data)) == 1


def test_a_record_that_cannot_be_encoded_leaves_the_file_as_it_was(path: Path) -> None:
    with RecordWriter(path) as out:
        out.append(1)
        with pytest.raises(EncodeError):
            out.append([IMAGE, object()])
        assert out.append([IMAGE]) == 1
    assert list(read_records(path)) == [1, [IMAGE]]


def test_a_program_that_writes_without_asking_for_the_lock_is_noticed_and_its_records_are_kept(path: Path) -> None:
    write(path, "mine", "theirs")
    both = path.read_bytes()
    path.unlink()
    with RecordWriter(path) as first:
        first.append("mine")
        with path.open("ab") as file:
            file.write(both[path.stat().st_size :])
        with pytest.raises(FileChangedError, match="another writer changed"):
            first.append("lost")
        with pytest.raises(FileChangedError):
            first.close()
    assert list(read_records(path)) == ["mine", "theirs"]


def test_other_files_are_refused_and_left_alone(path: Path) -> None:
    for content in (b"hello", b"#!/bin/sh\n" * 20, bytes(200)):
        path.write_bytes(content)
        with pytest.raises(MalformedError):
            RecordReader(path)
        with pytest.raises(MalformedError):
            RecordWriter(path)
        with pytest.raises(MalformedError):
            repair_record_file(path)
        assert path.read_bytes() == content
    assert os.listdir(path.parent) == [path.name]


def test_a_new_record_does_not_rely_on_an_image_that_is_damaged(path: Path) -> None:
    write(path, [IMAGE], [OTHER])
    flip(path, path.read_bytes().index(bytes(IMAGE.data)) + 5)
    with RecordWriter(path) as out:
        out.append([IMAGE, OTHER, "new"])
        out.append([IMAGE])
    with RecordReader(path) as reader:
        assert reader[2] == [IMAGE, OTHER, "new"]
        assert reader[0] == reader[3] == [IMAGE]
    assert [path.read_bytes().count(bytes(source.data)) for source in (IMAGE, OTHER)] == [1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("size", [0, 64, 5000])
def test_reading_a_file_that_was_cut_short_is_an_error_and_not_the_end_of_the_process(path: Path, size: int) -> None:
    write(path, [IMAGE], np.zeros(100_000))
    code = (
        "import os, sys; from transport import *\n"
        "reader = RecordReader(sys.argv[1]); os.truncate(sys.argv[1], int(sys.argv[2]))\n"
        "for read in (lambda: reader[0], lambda: reader[1], lambda: reader.stored(1), reader.refresh):\n"
        "    try: read()\n"
        "    except FileChangedError as error: assert f'has {sys.argv[2]} bytes and had {sys.argv[3]} ' in str(error)\n"
        "    else: sys.exit(1)\n"
    )
    arguments = [sys.executable, "-c", code, str(path), str(size), str(path.stat().st_size)]
    assert subprocess.run(arguments, check=False).returncode == 0


def test_a_file_that_is_cut_short_while_it_is_mapped_is_an_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(path, 1, 2)
    size = path.stat().st_size

    class CutMapping(_Mapping):
        def __init__(self, file: io.FileIO, size: int) -> None:
            os.truncate(path, 64 if size else path.stat().st_size)
            super().__init__(file, size)

    monkeypatch.setattr("transport.records.reader._Mapping", CutMapping)
    with RecordReader(path) as reader, pytest.raises(FileChangedError, match=f"has 64 bytes and had {size} "):
        reader[0]


def test_a_write_the_system_takes_in_pieces_is_completed(path: Path) -> None:
    class Slow(Interrupting):
        def write(self, data: memoryview) -> int:
            return int(self.file.write(data[: self.keep]))

    with RecordWriter(path) as out:
        out._file = Slow(out._file, 100)  # type: ignore[assignment]
        out.append([IMAGE, "x" * 1000])
    assert list(read_records(path)) == [[IMAGE, "x" * 1000]]


def test_no_flipped_bit_of_the_file_header_lets_a_writer_or_a_repair_cut_off_records(path: Path) -> None:
    write(path, [IMAGE], 1)
    sound = path.read_bytes()
    for offset in range(64):
        for bit in range(8):
            data = bytearray(sound)
            data[offset] ^= 1 << bit
            path.write_bytes(data)
            for attempt in (lambda: write(path, "more"), lambda: repair_record_file(path)):
                try:
                    attempt()
                except DecodeError as error:
                    if not isinstance(error, MalformedError) and "this installation reads" not in str(error):
                        raise
                    assert path.read_bytes() == data
                assert path.read_bytes()[64 : len(sound)] == sound[64:]
