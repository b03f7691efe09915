"""The files of a journal: what is refused and why, damage, media, and what a power cut may take."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from journal_recordings import CONFIGURATION, episode, group, image, task

from rollouts.cli.main import app
from rollouts.errors import ArgumentError
from rollouts.runner.journal import (
    Journal,
    JournalClosedError,
    JournalError,
    JournalInUseError,
    JournalOfAnotherRunError,
)
from rollouts.runner.journal.files import ENTRIES, EPISODES
from rollouts.task import Task
from transport import RecordReader, RecordWriter, encode, repair_record_file


async def record(journal: Journal, numbers: range, *, delivered: bool = False) -> None:
    """Start tasks, run their two episodes each, and finish their groups."""
    for number in numbers:
        await journal.started(task(number))
        episodes = [episode(number, index) for index in range(2)]
        for index, each in enumerate(episodes):
            await journal.attempted(f"task-{number}", index, 0, each, final=True)
        await journal.finished(group(number, episodes, (1, 1)))
        if delivered:
            await journal.delivered(f"task-{number}")


async def make(directory: Path, numbers: range = range(2), **options: Any) -> None:
    journal = Journal.open(directory, **options)
    await journal.resume(CONFIGURATION)
    await record(journal, numbers)
    await journal.close()


async def resumed_error(directory: Path, runner: dict[str, Any], **options: Any) -> JournalError:
    journal = Journal.open(directory, **options)
    with pytest.raises(JournalError) as caught:
        await journal.resume(runner)
    await journal.close()
    return caught.value


# Which journals are refused.


async def test_another_group_size_or_seed_is_refused_with_both_values(tmp_path: Path) -> None:
    await make(tmp_path / "j")
    error = await resumed_error(tmp_path / "j", {"group_size": 4, "seed": 0})
    assert isinstance(error, JournalOfAnotherRunError)
    assert error.differences == ("group_size is 4, and the journal has 2",)
    assert "give this run a directory of its own" in str(error)
    error = await resumed_error(tmp_path / "j", {"group_size": 2, "seed": 7})
    assert "seed is 7, and the journal has 0" in str(error)


@pytest.mark.parametrize(
    ("given", "difference"),
    [
        ({"model": "b", "limits": {"turns": 3}}, "configuration.model is 'b', and the journal has 'a'"),
        ({"model": "a", "limits": {"turns": 4}}, "configuration.limits.turns is 4, and the journal has 3"),
        ({"limits": {"turns": 3}}, "configuration.model is not given, and the journal has 'a'"),
        ({"model": "a", "limits": {"turns": 3, "x": None}}, "configuration.limits.x is None, and the journal has none"),
    ],
)
async def test_another_configuration_is_refused_with_the_name_of_what_differs(
    tmp_path: Path, given: dict[str, Any], difference: str
) -> None:
    await make(tmp_path / "j", configuration={"model": "a", "limits": {"turns": 3}})
    error = await resumed_error(tmp_path / "j", CONFIGURATION, configuration=given)
    assert isinstance(error, JournalOfAnotherRunError)
    assert error.differences == (difference,)


async def test_the_same_configuration_is_accepted_whatever_the_order_of_its_names(tmp_path: Path) -> None:
    await make(tmp_path / "j", configuration={"a": float("nan"), "b": {"c": [1, None], "d": "x"}})
    journal = Journal.open(tmp_path / "j", configuration={"b": {"d": "x", "c": [1, None]}, "a": float("nan")})
    assert (await journal.resume({"seed": 0, "group_size": 2})).undelivered == ("task-0", "task-1")
    await journal.close()


@pytest.mark.parametrize("value", [None, "text", {"a": object}, {"a": np.zeros(2)}, {1: 2}])
def test_a_configuration_that_cannot_be_compared_is_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ArgumentError, match=r"configuration is .*; pass a mapping"):
        Journal.open(tmp_path / "j", configuration=value)


def test_a_value_that_is_no_path_is_refused() -> None:
    path: Any = 5
    with pytest.raises(ArgumentError, match="path is 5; pass the path of the journal's directory"):
        Journal.open(path)


async def test_a_journal_that_is_in_use_is_refused_with_the_holder(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "j")
    with pytest.raises(JournalInUseError, match="another Runner of this process has it open; close that one") as caught:
        Journal.open(tmp_path / "j")
    assert caught.value.pid == os.getpid()
    code = f"from rollouts.runner.journal import Journal; Journal.open({str(tmp_path / 'j')!r})"
    command = [sys.executable, "-c", code]
    other = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)
    assert f"JournalInUseError: journal {tmp_path / 'j'}: process {os.getpid()}" in other.stderr
    await journal.close()
    await make(tmp_path / "j")


async def test_a_journal_serves_one_run(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "j")
    await journal.resume(CONFIGURATION)
    with pytest.raises(JournalError, match="a runner uses it already"):
        await journal.resume(CONFIGURATION)
    await journal.close()
    await journal.close()
    with pytest.raises(JournalClosedError, match=r"open it again with Journal.open"):
        await journal.started(task(0))


def test_a_path_that_is_a_file_or_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(JournalError, match=r"the directory cannot be made: .*Name another one"):
            Journal.open(path)


def test_files_that_no_journal_wrote_are_refused_and_not_changed(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / ENTRIES).write_text("some notes of mine, which are longer than a header of a record file is")
    with pytest.raises(JournalError, match=f"{ENTRIES}: file does not start with the header"):
        Journal.open(tmp_path / "text")
    (tmp_path / "half").mkdir()
    with RecordWriter(tmp_path / "half" / EPISODES) as out:
        out.append(episode(0, 0))
    with pytest.raises(JournalError, match=f"there is {EPISODES} and no {ENTRIES}"):
        Journal.open(tmp_path / "half")
    assert os.listdir(tmp_path / "half") == [EPISODES]


async def test_records_of_another_program_are_named(tmp_path: Path) -> None:
    await make(tmp_path / "j")
    with RecordWriter(tmp_path / "j" / ENTRIES) as out:
        number = out.append({"not": "an entry"})
    error = await resumed_error(tmp_path / "j", CONFIGURATION)
    assert isinstance(error, JournalError)
    assert f"entry {number} of {ENTRIES} is a dict" in str(error)


async def test_a_task_with_data_that_cannot_be_stored_is_named(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "j")
    await journal.resume(CONFIGURATION)
    with pytest.raises(JournalError, match=r"task 'odd' cannot be recorded: .*object") as caught:
        await journal.started(Task("odd", {"a": object()}))
    assert "(`data` is stored with the task)" in str(caught.value)
    await journal.started(task(1))
    await journal.close()
    journal = Journal.open(tmp_path / "j")
    assert (await journal.resume(CONFIGURATION)).unfinished == ("task-1",)
    await journal.close()


# Calls in the wrong order.


async def test_what_is_not_open_cannot_be_recorded_or_read(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "j")
    await journal.resume(CONFIGURATION)
    for call in (
        journal.attempted("task-0", 0, 0, episode(0, 0), final=True),
        journal.finished(group(0, [episode(0, 0), episode(0, 1)], (1, 1))),
        journal.task("task-0"),
        journal.attempts("task-0"),
    ):
        with pytest.raises(JournalError, match="task 'task-0' is not open: it was not started"):
            await call
    with pytest.raises(JournalError, match="there is no undelivered group of task 'task-0'"):
        await journal.group("task-0")
    with pytest.raises(JournalError, match="task 'task-0' was not started"):
        await journal.delivered("task-0")
    await record(journal, range(1))
    with pytest.raises(JournalError, match="is not open: its group is finished"):
        await journal.attempts("task-0")
    await journal.delivered("task-0")
    await journal.delivered("task-0")
    await journal.close()


async def test_a_cancelled_call_is_carried_out(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "j")
    await journal.resume(CONFIGURATION)
    calls = [asyncio.create_task(journal.started(task(number))) for number in range(4)]
    await asyncio.sleep(0)
    for call in calls:
        call.cancel()
    ended = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(each, asyncio.CancelledError) for each in ended)
    await journal.close()
    journal = Journal.open(tmp_path / "j")
    assert (await journal.resume(CONFIGURATION)).unfinished == tuple(f"task-{number}" for number in range(4))
    await journal.close()


# Damage.


def damage(path: Path, record: int) -> None:
    """Change a byte in the payload of a record."""
    with RecordReader(path) as reader:
        place = reader._index.objects[record]
    assert place is not None
    with open(path, "r+b") as file:
        file.seek(place.start + 64)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 255]))


async def test_a_damaged_entry_is_an_error_and_after_its_repair_its_task_alone_is_run_again(tmp_path: Path) -> None:
    await make(tmp_path / "j", range(3))
    path = tmp_path / "j" / ENTRIES
    with RecordReader(path) as reader:
        kinds = [type(entry).__name__ for entry in reader]
    damage(path, kinds.index("JournalFinished"))
    error = await resumed_error(tmp_path / "j", CONFIGURATION)
    assert isinstance(error, JournalError)
    assert "repair_record_file" in str(error)
    repair_record_file(path)
    journal = Journal.open(tmp_path / "j")
    resumed = await journal.resume(CONFIGURATION)
    assert (resumed.undelivered, resumed.unfinished) == (("task-1", "task-2"), ("task-0",))
    assert [each.final for each in (await journal.attempts("task-0")).values()] == [True, True]
    await journal.close()


async def test_a_journal_without_its_first_entry_is_refused(tmp_path: Path) -> None:
    await make(tmp_path / "j")
    path = tmp_path / "j" / ENTRIES
    damage(path, 0)
    repair_record_file(path)
    assert "has lost its first entry" in str(await resumed_error(tmp_path / "j", CONFIGURATION))
    path.unlink()
    path.touch()
    assert "has lost its first entry" in str(await resumed_error(tmp_path / "j", CONFIGURATION))


async def test_a_damaged_episode_of_a_finished_group_has_the_group_run_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await make(tmp_path / "j", range(2))
    with RecordReader(tmp_path / "j" / EPISODES) as reader:
        ids = [getattr(each, "episode_id", "") for each in reader]
    damage(tmp_path / "j" / EPISODES, ids.index("task-0-1-0"))
    for _ in range(2):  # again after a process that did nothing about it
        caplog.clear()
        journal = Journal.open(tmp_path / "j")
        resumed = await journal.resume(CONFIGURATION)
        assert (resumed.undelivered, resumed.unfinished) == (("task-1",), ("task-0",))
        assert encode(await journal.task("task-0")) == encode(task(0))
        assert await journal.attempts("task-0") == {}
        await journal.close()
    assert caplog.text == ""  # the second process knows that the task was opened again
    journal = Journal.open(tmp_path / "j")
    await journal.resume(CONFIGURATION)
    await record(journal, range(1), delivered=True)
    await journal.close()
    journal = Journal.open(tmp_path / "j")
    resumed = await journal.resume(CONFIGURATION)
    assert (resumed.undelivered, resumed.unfinished, resumed.num_closed) == (("task-1",), (), 1)
    await journal.close()


async def test_a_full_disk_is_named_and_what_was_recorded_before_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal.open(tmp_path / "j")
    await journal.resume(CONFIGURATION)
    await record(journal, range(1))

    def fail(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(RecordWriter, "_write", fail)
        with pytest.raises(JournalError, match=r"No space left on device. What was recorded before is intact"):
            await journal.started(task(1))
    assert "task-1" not in journal
    await journal.started(task(2))
    await journal.close()
    journal = Journal.open(tmp_path / "j")
    resumed = await journal.resume(CONFIGURATION)
    assert (resumed.undelivered, resumed.unfinished) == (("task-0",), ("task-2",))
    await journal.close()


# What is in the files.


async def test_each_image_is_in_the_journal_once_whoever_has_it(tmp_path: Path) -> None:
    await make(tmp_path / "j", range(3))
    contents = b"".join((tmp_path / "j" / name).read_bytes() for name in (ENTRIES, EPISODES))
    own = [1000 + 100 * number + 10 * index + turn for number in range(3) for index in range(2) for turn in range(2)]
    for number in [*range(3), *own]:
        assert contents.count(bytes(image(number).data)) == 1


async def test_the_episodes_are_a_trajectory_file(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    await make(tmp_path / "j", range(2))
    listed = CliRunner().invoke(app, ["traj", "ls", str(tmp_path / "j" / EPISODES), "--json"])
    assert listed.exit_code == 0, listed.output
    assert listed.output.count("task-1-1-0") == 1


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="the names of open files are read from /proc")
@pytest.mark.parametrize("fsync", [False, True])
async def test_with_fsync_groups_and_deliveries_are_on_the_disk_and_single_episodes_need_not_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fsync: bool
) -> None:
    """The order of what reaches the disk, by the calls of the system: no power can be cut in a test."""
    journal = Journal.open(tmp_path / "j", fsync=fsync)
    await journal.resume(CONFIGURATION)
    synced: list[str] = []
    real = os.fsync

    def note(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    await record(journal, range(1))
    assert synced == ([EPISODES, ENTRIES] if fsync else [])
    await journal.delivered("task-0")
    assert synced == ([EPISODES, ENTRIES] * 2 if fsync else [])
    await journal.close()


async def test_files_that_are_deleted_while_a_run_has_them_open_are_an_error_of_the_journal(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "j")
    await journal.resume(CONFIGURATION)
    await record(journal, range(1))
    shutil.rmtree(tmp_path / "j")
    for call in (journal.started(task(1)), journal.close()):
        with pytest.raises(JournalError, match="deleted or changed its files during the run"):
            await call
    await journal.close()
