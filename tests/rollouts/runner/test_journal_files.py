"""The files of a journal: what is refused and why, damage, media, and what waits for the disk."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from journal_recordings import CONFIGURATION, episode, group, image, task

from rollouts.runner.errors import (
    JournalError,
    JournalOfAnotherRunError,
)
from rollouts.runner.journal import Journal
from rollouts.runner.journal_database import DATABASE, ResumedRun
from rollouts.task import Task
from transport import encode


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
    assert f"another configuration: {difference}. Continue" in str(error)


@pytest.mark.slow
async def test_a_journal_that_is_in_use_is_refused_with_the_holder(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "j")
    with pytest.raises(JournalOfAnotherRunError, match="another Runner of this process has it open; close that one"):
        Journal.open(tmp_path / "j")
    code = f"from rollouts.runner.journal import Journal; Journal.open({str(tmp_path / 'j')!r})"
    command = [sys.executable, "-c", code]
    other = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)
    assert f"JournalOfAnotherRunError: journal {tmp_path / 'j'}: process {os.getpid()}" in other.stderr
    await journal.close()
    await make(tmp_path / "j")


async def test_a_journal_serves_one_run(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "j")
    await journal.resume(CONFIGURATION)
    with pytest.raises(JournalError, match="a runner uses it already"):
        await journal.resume(CONFIGURATION)
    await journal.close()
    await journal.close()
    with pytest.raises(JournalError, match=r"open it again with Journal.open"):
        await journal.started(task(0))


def test_a_path_that_is_a_file_or_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(JournalError, match=r"the directory cannot be made: .*Name another one"):
            Journal.open(path)


def content(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.name != "lock"}


def test_files_that_no_journal_of_this_version_wrote_are_refused_and_not_changed(tmp_path: Path) -> None:
    for name in ("text", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "text" / DATABASE).write_text("some notes of mine, which are longer than a header of SQLite is" * 9)
    other = sqlite3.connect(tmp_path / "other" / DATABASE)
    other.execute("CREATE TABLE notes (note TEXT)")
    other.close()
    for name, reason in {
        "text": "file is not a database. Restore it, or delete it",
        "other": "is that of another program, or of another version",
    }.items():
        before = content(tmp_path / name)
        with pytest.raises(JournalError, match=reason):
            Journal.open(tmp_path / name)
        assert content(tmp_path / name) == before


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


# Damage.


def flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def change(directory: Path, statement: str) -> None:
    """Change the database of a journal that is closed. `flip(data)` is the data with another byte in its middle."""
    database = sqlite3.connect(directory / DATABASE)
    database.create_function("flip", 1, flipped)
    with database:
        assert database.execute(statement).rowcount == 1
    database.close()


#: What is changed, what is named, whether the task is left, and the episodes of its that are.
DAMAGES = {
    "an episode": (
        "UPDATE attempts SET content = flip(content) WHERE episode_id = 'task-0-1-0'",
        "episode 'task-0-1-0'",
        ("task-0",),
        {0},
    ),
    "the values of a group": (
        "UPDATE groups SET content = flip(content) WHERE number = 1",
        "the group of task 'task-0'",
        ("task-0",),
        {0, 1},
    ),
    "a task": ("UPDATE tasks SET content = flip(content) WHERE number = 1", "task 'task-0'", (), set()),
    "an image": (
        f"UPDATE media SET data = flip(data) WHERE digest = '{image(1000).digest}'",
        "task 'task-0'",
        (),
        set(),
    ),
}


@pytest.mark.parametrize("damaged", DAMAGES)
async def test_what_a_disk_has_changed_is_logged_once_and_run_again_and_nothing_else(
    tmp_path: Path, damaged: str, caplog: pytest.LogCaptureFixture
) -> None:
    statement, named, unfinished, left = DAMAGES[damaged]
    await make(tmp_path / "j", range(2))
    change(tmp_path / "j", statement)
    for number in range(2):  # again after a process that did nothing about it
        caplog.clear()
        journal = Journal.open(tmp_path / "j")
        resumed = await journal.resume(CONFIGURATION)
        assert (resumed.undelivered, resumed.unfinished) == (("task-1",), unfinished)
        assert encode(await journal.group("task-1")) == encode(group(1, [episode(1, 0), episode(1, 1)], (1, 1)))
        assert ("task-0" in journal) == bool(unfinished)
        if unfinished:
            assert encode(await journal.task("task-0")) == encode(task(0))
            assert (await journal.attempts("task-0")).keys() == left
        await journal.close()
        assert (f"not recorded: {named}\n" in caplog.text) == (number == 0)
    journal = Journal.open(tmp_path / "j")
    await journal.resume(CONFIGURATION)
    await record(journal, range(1), delivered=True)
    await journal.close()
    journal = Journal.open(tmp_path / "j")
    resumed = await journal.resume(CONFIGURATION)
    assert (resumed.undelivered, resumed.unfinished) == (("task-1",), ())
    await journal.close()


async def test_a_damaged_database_is_an_error_and_one_that_is_deleted_begins_anew(tmp_path: Path) -> None:
    await make(tmp_path / "j", range(3))
    path = tmp_path / "j" / DATABASE
    whole = path.read_bytes()
    path.write_bytes(whole[:8192] + b"\xff" * (len(whole) - 8192))
    error = str(await resumed_error(tmp_path / "j", CONFIGURATION))
    assert f"{DATABASE} cannot be read: database disk image is malformed. Restore it, or delete it and start" in error
    path.unlink()
    journal = Journal.open(tmp_path / "j")
    assert await journal.resume(CONFIGURATION) == ResumedRun()
    await journal.close()


# What is in the files.


async def test_the_space_of_delivered_groups_is_used_again(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "j")
    await journal.resume(CONFIGURATION)
    await record(journal, range(2), delivered=True)
    journal._recorder._database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    before = (tmp_path / "j" / DATABASE).stat().st_size
    await record(journal, range(2, 20), delivered=True)
    await journal.close()
    assert (tmp_path / "j" / DATABASE).stat().st_size <= before + 4096


@pytest.mark.parametrize("fsync", [False, True])
async def test_with_fsync_groups_and_deliveries_wait_for_the_disk_and_single_episodes_do_not(
    tmp_path: Path, fsync: bool
) -> None:
    """By the setting of SQLite at the end of each transaction: no power can be cut in a test."""
    journal = Journal.open(tmp_path / "j", fsync=fsync)
    await journal.resume(CONFIGURATION)
    statements: list[str] = []
    journal._recorder._database.set_trace_callback(statements.append)
    await record(journal, range(1), delivered=True)
    await journal.close()
    settings: list[tuple[str, str]] = []
    setting, tables = "", list[str]()
    for statement in statements:
        if statement.startswith("PRAGMA synchronous = "):
            setting, tables = statement.split()[-1], []
        elif "INTO " in statement:
            tables.append(statement.partition("INTO ")[2].split()[0])
        elif statement == "COMMIT":
            settings.append((tables[0], setting))
    waiting = "FULL" if fsync else "NORMAL"
    of_episodes = [("attempts", "NORMAL")] * 2
    assert settings == [("tasks", waiting), *of_episodes, ("groups", waiting), ("closed", waiting)]


async def test_files_that_are_deleted_while_a_run_has_them_open_are_an_error_of_the_journal(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "j")
    await journal.resume(CONFIGURATION)
    await record(journal, range(1))
    shutil.rmtree(tmp_path / "j")
    for call in (journal.started(task(1)), journal.close()):
        with pytest.raises(JournalError, match="deleted or changed its files during the run"):
            await call
    await journal.close()
