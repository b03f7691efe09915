"""Record files and other Python processes, for tests of writers."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from renderers.media.item import MediaSource
from transport import RecordWriter

MOST_SECONDS = 60
IMAGE = MediaSource.of(b"\x89PNG image " * 40)
OTHER = MediaSource.of(b"another " * 30)


def write(path: Path, *records: Any) -> None:
    with RecordWriter(path) as out:
        for record in records:
            out.append(record)


def flip(path: Path, offset: int) -> None:
    """Damage one byte of a file."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


@contextlib.contextmanager
def running(code: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Another Python that runs `code`, killed at the end. Everything it prints can be read line by line."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait(MOST_SECONDS)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()
