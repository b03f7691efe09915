"""Damaged files made whole, several files made one: what is sound is kept, once, and nothing else is touched."""

import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest
from writer_processes import IMAGE, OTHER, flip, write

from renderers.media.item import MediaSource
from transport import (
    ChecksumError,
    DecodeLimits,
    FileChangedError,
    LimitError,
    RecordReader,
    RecordWriter,
    encode,
    read_records,
    wire_type,
)
from transport.records.rewriting import merge_record_files, repair_record_file
from transport.wire import registry


def test_wherever_one_byte_is_damaged_at_most_its_record_is_lost_and_repair_keeps_the_others(path: Path) -> None:
    write(path, "first", [IMAGE, np.arange(3)], "third")
    sound = path.read_bytes()
    for offset in range(64, len(sound), 29):
        path.write_bytes(sound)
        flip(path, offset)
        readable, lost = [], []
        with RecordReader(path) as reader:
            for index in range(len(reader)):
                try:
                    readable.append(encode(reader[index]))
                except ChecksumError as error:
                    lost.append((index, error))
        assert len(readable) >= 2
        for index, error in lost:
            assert error.index == index
            assert f"record {index}" in str(error)
        repair_record_file(path)
        with RecordReader(path) as reader:
            assert [encode(record) for record in reader] == readable
            assert reader.truncated_bytes == 0


def test_a_sound_file_is_left_alone(path: Path) -> None:
    write(path, [IMAGE], 1)
    before = path.stat()
    assert repair_record_file(path).kept == 2
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_records_that_only_this_reader_cannot_take_are_not_dropped(path: Path) -> None:
    write(path, "x" * 5000, "damaged")
    flip(path, path.read_bytes().index(b"damaged") - 100)
    sound = path.read_bytes()
    with pytest.raises(LimitError):
        repair_record_file(path, limits=DecodeLimits(max_total_bytes=1000))
    assert path.read_bytes() == sound


def test_files_are_repaired_and_merged_without_the_types_that_are_in_them(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_by_name", {})
    monkeypatch.setattr(registry, "_by_class", {})

    @dataclasses.dataclass
    class Local:
        image: MediaSource

    wire_type("tests.repair.Local")(Local)
    write(path, Local(IMAGE), "damaged", Local(OTHER))
    flip(path, path.read_bytes().index(b"damaged"))
    registry._by_name.clear()
    assert [drop.index for drop in repair_record_file(path).dropped] == [1]
    out = path.with_name("merged.mmr")
    assert merge_record_files([path, path], out) == 4
    wire_type("tests.repair.Local")(Local)
    assert list(read_records(out)) == [Local(IMAGE), Local(OTHER)] * 2


def test_what_appends_during_repair_without_asking_for_the_lock_is_noticed_and_loses_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(path, "first", "damaged", "last")
    size = path.stat().st_size
    write(path, "late")
    late = path.read_bytes()[size:]
    os.truncate(path, size)
    flip(path, path.read_bytes().index(b"damaged"))
    copy = RecordWriter.copy

    def append_meanwhile(writer: RecordWriter, reader: RecordReader, index: int) -> int:
        if index == 2:
            with path.open("ab") as file:
                file.write(late)
        return copy(writer, reader, index)

    monkeypatch.setattr(RecordWriter, "copy", append_meanwhile)
    with pytest.raises(FileChangedError):
        repair_record_file(path)
    assert os.listdir(path.parent) == [path.name]
    with RecordReader(path) as reader:
        assert reader[3] == "late"


def test_merging_writes_over_nothing_and_leaves_nothing_where_a_record_is_damaged(path: Path) -> None:
    good, bad = path.with_name("good.mmr"), path.with_name("bad.mmr")
    write(good, 1)
    write(bad, "damaged", 2)
    flip(bad, bad.read_bytes().index(b"damaged"))
    with pytest.raises(ChecksumError):
        merge_record_files([good, bad], path)
    assert sorted(os.listdir(path.parent)) == ["bad.mmr", "good.mmr"]
    with pytest.raises(FileExistsError):
        merge_record_files([good], good)
    assert list(read_records(good)) == [1]


def test_a_file_merges_with_itself_under_another_name_and_never_onto_itself(path: Path) -> None:
    write(path, [IMAGE], [OTHER, IMAGE])
    before = path.read_bytes()
    link, dangling, out = (path.with_name(name) for name in ("link.mmr", "dangling.mmr", "out.mmr"))
    link.symlink_to(path.name)
    dangling.symlink_to("nowhere")
    assert merge_record_files([path, link, path], out) == 6
    assert list(read_records(out)) == 3 * [[IMAGE], [OTHER, IMAGE]]
    assert out.read_bytes().count(bytes(IMAGE.data)) == 1
    for target in (path, link, dangling):
        with pytest.raises(FileExistsError):
            merge_record_files([path], target)
    assert path.read_bytes() == before
    assert dangling.is_symlink()
    assert sorted(os.listdir(path.parent)) == ["dangling.mmr", "episodes.mmr", "link.mmr", "out.mmr"]


@pytest.mark.parametrize("seed", range(5))
def test_of_a_file_with_nothing_whole_in_it_repair_makes_an_empty_one(path: Path, seed: int) -> None:
    write(path)
    noise = np.random.default_rng(seed).integers(0, 256, 5000, dtype=np.uint8).tobytes()
    path.write_bytes(path.read_bytes() + noise + b"\x89REC" * 100 * seed)
    report = repair_record_file(path)
    assert (report.kept, report.dropped) == (0, ())
    assert report.truncated_bytes == 5000 + 400 * seed
    assert list(read_records(path)) == []
