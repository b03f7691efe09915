"""Compressed records: smaller, the same when read, bounded when hostile, and old files unchanged."""

from __future__ import annotations

import struct
import subprocess
import sys
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from renderers.media.item import MediaSource
from transport import RecordReader, RecordWriter, read_records
from transport.errors import DecodeError

zstd = pytest.importorskip("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")

PIXELS = MediaSource.of(bytes(range(50)) * 400)
NOISE = MediaSource.of(np.random.default_rng(0).bytes(3000))
RECORDS: list[Any] = [{"ids": np.arange(5000) // 50}, [PIXELS, NOISE], "short", [PIXELS]]


def write(path: Path, *records: Any, compression: Any = "zstd") -> None:
    with RecordWriter(path, compression=compression) as out:
        for record in records:
            out.append(record)


def check(path: Path) -> None:
    ids, *rest = read_records(path)
    np.testing.assert_array_equal(ids["ids"], RECORDS[0]["ids"])
    assert rest == RECORDS[1:]


def test_records_come_back_the_same_from_a_much_smaller_file(path: Path) -> None:
    plain = path.with_name("plain.mmr")
    write(path, *RECORDS)
    write(plain, *RECORDS, compression=None)
    check(path)
    check(plain)
    assert path.stat().st_size < plain.stat().st_size / 5
    assert bytes(NOISE.data) in path.read_bytes()  # what does not become smaller is left as it is


def test_a_file_of_another_version_is_refused_by_name(path: Path) -> None:
    write(path, RECORDS[0])
    path.write_bytes(path.read_bytes()[:8] + b"\x03\x00" + path.read_bytes()[10:])
    with pytest.raises(DecodeError, match="record file has version 3"):
        RecordReader(path)


def test_a_file_can_be_continued_with_and_without_compression(path: Path) -> None:
    write(path, RECORDS[0], compression=None)
    write(path, *RECORDS[1:3])
    write(path, RECORDS[3], compression=None)
    check(path)


def test_other_compressions_are_refused_before_the_file_is_made(path: Path) -> None:
    with pytest.raises(ValueError, match="gzip"):
        RecordWriter(path, compression="gzip")  # type: ignore[arg-type]
    assert not path.exists()


@pytest.mark.slow
def test_where_nothing_can_compress_the_error_names_the_extra_and_plain_records_stay_readable(path: Path) -> None:
    write(path, "plain", compression=None)
    write(path, RECORDS[0])
    code = (
        "import sys; sys.modules['backports.zstd'] = sys.modules['compression.zstd'] = None\n"
        "from renderers.errors import MissingExtraError\n"
        "from renderers.installation import install_command\n"
        "from transport import *\n"
        "reader = RecordReader(sys.argv[1]); assert reader[0] == 'plain'\n"
        "for attempt in (lambda: reader[1], lambda: RecordWriter(sys.argv[1] + '2', compression='zstd')):\n"
        "    try: attempt()\n"
        "    except MissingExtraError as error: assert install_command('zstd') in str(error)\n"
        "    else: sys.exit(1)\n"
        "import os; assert not os.path.exists(sys.argv[1] + '2')\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)], check=False).returncode == 0


def with_payload(path: Path, payload: bytes) -> Path:
    """A file of one compressed record that holds `payload`, made without the writer."""
    header = struct.pack("<4sB3xQQI32s", b"\x89REC", 3, len(payload), 0, zlib.crc32(payload), bytes(32))
    record = header + struct.pack("<I", zlib.crc32(header)) + payload + bytes(-len(payload) % 64)
    path.write_bytes(b"MMRRECS\n\x02\x00" + bytes(54) + record)
    return path


def test_the_records_made_here_are_read_when_they_are_well_formed(path: Path) -> None:
    from transport import encode

    whole = zstd.compress(encode("hello"))
    assert list(read_records(with_payload(path, whole))) == ["hello"]


def bomb(size: int) -> bytes:
    return bytes(zstd.compress(bytes(size), level=19))


HOSTILE = {
    "nothing": b"",
    "no frame": b"hello, this is no zstd",
    "cut": bomb(100_000)[:-3],
    "two frames": bomb(1000) * 2,
    "bytes behind": bomb(1000) + b"x",
    "skippable frame": struct.pack("<II", 0x184D2A50, 4) + b"1234",
    "no announced size": zstd.compress(bytes(1000), options={zstd.CompressionParameter.content_size_flag: 0}),
    "no message": bomb(1000),
    # A frame of one segment that announces 1 GiB and holds one block of one byte repeated 5 times.
    "announces more than it holds": bytes.fromhex("28b52ffd a0 00000040 2b0000 41".replace(" ", "")),
}


@pytest.mark.parametrize("payload", HOSTILE.values(), ids=HOSTILE.keys())
def test_payloads_that_are_not_one_whole_frame_are_errors(path: Path, payload: bytes) -> None:
    tracemalloc.start()
    with RecordReader(with_payload(path, payload)) as reader, pytest.raises(DecodeError):
        reader[0]
    assert tracemalloc.get_traced_memory()[1] < 1 << 20  # a frame that announces 1 GiB allocates nothing
    tracemalloc.stop()
