"""What compressed records and media take together is bounded for a reader, whatever way they are read."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from renderers.media.item import MediaSource
from transport import (
    DecodeLimits,
    LimitError,
    RecordReader,
    RecordWriter,
    merge_record_files,
    repair_record_file,
)
from transport.errors import DecodeError

zstd = pytest.importorskip("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")

MEDIUM = 500_000
LIMITS = DecodeLimits(max_total_bytes=3 * MEDIUM + 10_000)  # three media and the records that refer to them
SOURCES = [MediaSource.of(bytes([number]) * MEDIUM) for number in range(40)]


def write(path: Path, *records: Any) -> None:
    with RecordWriter(path, compression="zstd") as out:
        for record in records:
            out.append(record)


def peak_of(call: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_records_that_are_held_count_together_and_those_let_go_of_do_not(path: Path) -> None:
    write(path, *([source] for source in SOURCES))
    with RecordReader(path, limits=LIMITS) as reader:
        for number in range(len(SOURCES)):
            assert reader[number] == [SOURCES[number]]
        held = [reader[0], reader[1], reader[2]]
        with pytest.raises(LimitError):
            reader[3]
        assert reader[0] is not held[0]  # what is held already costs nothing more
        view = memoryview(held[1][0].data)[:10]  # a slice keeps all of it in memory
        del held
        assert [reader[3], reader[4]] == [[SOURCES[3]], [SOURCES[4]]]
        kept = [reader[3], reader[4]]
        with pytest.raises(LimitError):
            reader[5]
        assert len(kept) == 2
        assert bytes(view) == bytes([1]) * 10
        del view
        assert reader[5] == [SOURCES[5]]


def test_a_record_and_its_media_count_together(path: Path) -> None:
    write(path, ["x" * 2 * MEDIUM, SOURCES[0], SOURCES[1]])
    with RecordReader(path, limits=LIMITS) as reader, pytest.raises(LimitError):
        reader[0]


def test_repair_and_merge_take_one_medium_at_a_time_however_many_a_record_has(path: Path) -> None:
    write(path, SOURCES, SOURCES[::-1], "damaged", "last")
    data = bytearray(path.read_bytes())
    data[data.index(b"damaged")] ^= 1
    path.write_bytes(data)
    peak = peak_of(lambda: repair_record_file(path, limits=LIMITS))
    assert peak < 4 * MEDIUM
    out = path.with_name("out.mmr")
    assert peak_of(lambda: merge_record_files([path, path], out, limits=LIMITS)) < 4 * MEDIUM
    with RecordReader(out) as reader:
        assert reader[4] == SOURCES[::-1]


@pytest.mark.slow
def test_the_smallest_frame_that_zstd_makes_of_very_much_is_still_read(path: Path) -> None:
    write(path, "x" * 50_000_000)
    with RecordReader(path) as reader:
        assert path.stat().st_size < 50_000_000 / 8_000
        assert len(reader[0]) == 50_000_000


def test_memory_that_cannot_be_had_is_an_error_of_its_own_that_gives_the_budget_back(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(path, ["x" * 1000])

    def no_memory(*arguments: object) -> bytes:
        raise MemoryError

    with RecordReader(path, limits=DecodeLimits(max_total_bytes=2000)) as reader:
        with monkeypatch.context() as patched:
            patched.setattr(zstd, "ZstdDecompressor", no_memory)
            for _ in range(3):
                with pytest.raises(DecodeError, match="which the system refused"):
                    reader[0]
        assert reader[0] == ["x" * 1000]
