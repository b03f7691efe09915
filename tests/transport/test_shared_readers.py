"""A reader that several threads, or a process and one forked from it, use while a writer appends."""

import os
import threading
from pathlib import Path

import numpy as np
import pytest

from transport import RecordReader, RecordWriter


def look_on(reader: RecordReader, until: int) -> None:
    """Refresh and read until there are `until` records. Raises what reading raises."""
    while len(reader) < until:
        reader.refresh()
        for index in range(0, len(reader), 53):
            assert reader[index][0] == index


def append(writer: RecordWriter, count: int) -> None:
    for _ in range(count):
        index = writer._tail[1]
        assert writer.append((index, np.arange(500))) == index


@pytest.mark.slow
def test_threads_that_refresh_one_reader_see_every_record(tmp_path: Path) -> None:
    problems: list[BaseException] = []

    def look() -> None:
        try:
            look_on(reader, 1500)
        except BaseException as error:
            problems.append(error)
            raise

    with RecordWriter(tmp_path / "f") as writer, RecordReader(tmp_path / "f") as reader:
        threads = [threading.Thread(target=look) for _ in range(4)]
        for thread in threads:
            thread.start()
        append(writer, 1500)
        for thread in threads:
            thread.join(60)
        assert problems == []
        assert len(reader) == 1500


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_reader_is_right_in_a_forked_process_and_in_its_parent_at_once(tmp_path: Path) -> None:
    with RecordWriter(tmp_path / "f") as writer, RecordReader(tmp_path / "f") as reader:
        append(writer, 1500)
        child = os.fork()
        if child == 0:
            try:
                for _ in range(10):
                    look_on(reader, 1500)
                    reader.refresh()
            except BaseException:  # noqa: BLE001  the child must not go on into the tests of its parent
                os._exit(1)
            os._exit(0)
        for _ in range(5):
            append(writer, 200)
            reader.refresh()
            assert len(reader) == writer._tail[1]
        assert os.waitpid(child, 0)[1] == 0
