"""The files of a journal: what is refused and why, damage, media, and what waits for the disk."""

import os
from pathlib import Path
from typing import Any

import pytest
from journal_recordings import CONFIGURATION, episode, group, image, task

from rollouts.runner import journal_file
from rollouts.runner.errors import JournalError, JournalOfAnotherRunError
from rollouts.runner.journal import Journal
from rollouts.runner.journal_file import JOURNAL_FILE, ResumedRun
from rollouts.task import Task
from transport import RecordReader, RecordWriter, encode


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


async def opened(directory: Path, **options: Any) -> Journal:
    journal = Journal.open(directory, **options)
    await journal.resume(CONFIGURATION)
    return journal


async def make(directory: Path, numbers: range = range(2), **options: Any) -> None:
    journal = await opened(directory, **options)
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
    ],
)
async def test_another_configuration_is_refused_with_the_name_of_what_differs(
    tmp_path: Path, given: dict[str, Any], difference: str
) -> None:
    await make(tmp_path / "j", configuration={"model": "a", "limits": {"turns": 3}})
    error = await resumed_error(tmp_path / "j", CONFIGURATION, configuration=given)
    assert isinstance(error, JournalOfAnotherRunError)
    assert f"another configuration: {difference}. Continue" in str(error)


async def test_a_journal_that_is_in_use_is_refused(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "j")
    with pytest.raises(JournalOfAnotherRunError, match="another run has it open, or a Runner of this process"):
        Journal.open(tmp_path / "j")
    await journal.close()
    await make(tmp_path / "j")


async def test_files_that_no_journal_of_this_version_wrote_are_refused_and_not_changed(tmp_path: Path) -> None:
    for name in ("text", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "text" / JOURNAL_FILE).write_text("some notes of mine, which are longer than a header is" * 9)
    with RecordWriter(tmp_path / "other" / JOURNAL_FILE) as writer:
        writer.append([episode(0, 0)])
    before = [(tmp_path / name / JOURNAL_FILE).read_bytes() for name in ("text", "other")]
    with pytest.raises(JournalError, match="Restore it, or delete it"):
        Journal.open(tmp_path / "text")
    assert "it is no journal, or damaged" in str(await resumed_error(tmp_path / "other", CONFIGURATION))
    assert [(tmp_path / name / JOURNAL_FILE).read_bytes() for name in ("text", "other")] == before


async def test_a_task_with_data_that_cannot_be_stored_is_named(tmp_path: Path) -> None:
    journal = await opened(tmp_path / "j")
    with pytest.raises(JournalError, match=r"task 'odd' cannot be recorded: .*object") as caught:
        await journal.started(Task("odd", {"a": object()}))
    assert "(`data` is stored with the task)" in str(caught.value)
    await journal.started(task(1))
    await journal.close()
    journal = Journal.open(tmp_path / "j")
    assert (await journal.resume(CONFIGURATION)).unfinished == ("task-1",)
    await journal.close()


# Damage.


def flip(directory: Path, offset: int) -> None:
    data = bytearray((directory / JOURNAL_FILE).read_bytes())
    data[offset] ^= 1
    (directory / JOURNAL_FILE).write_bytes(data)


def offset_of(directory: Path, index: int) -> int:
    """A place in the payload of record `index`."""
    with RecordReader(directory / JOURNAL_FILE) as reader:
        record = reader._index.objects[index]
        assert record is not None
        return record.start + 64 + record.length // 2


def offset_of_image(directory: Path) -> int:
    return (directory / JOURNAL_FILE).read_bytes().index(bytes(image(1000).data)) + 5


#: Where a byte is changed, whether the task is left, and the episodes of its that are. Record 0 is the configuration.
DAMAGES = {
    "a task": (lambda directory: offset_of(directory, 1), (), set()),
    "an episode": (lambda directory: offset_of(directory, 3), ("task-0",), {0}),
    "the values of a group": (lambda directory: offset_of(directory, 4), ("task-0",), {0, 1}),
    "an image of an episode": (offset_of_image, ("task-0",), {1}),
}


@pytest.mark.parametrize("damaged", DAMAGES)
async def test_what_a_disk_has_changed_is_logged_once_and_run_again_and_nothing_else(
    tmp_path: Path, damaged: str, caplog: pytest.LogCaptureFixture
) -> None:
    place, unfinished, left = DAMAGES[damaged]
    await make(tmp_path / "j", range(2))
    flip(tmp_path / "j", place(tmp_path / "j"))
    for number in range(2):  # again after a process that did nothing about it
        caplog.clear()
        journal = Journal.open(tmp_path / "j")
        resumed = await journal.resume(CONFIGURATION)
        assert (resumed.undelivered, resumed.unfinished) == (("task-1",), unfinished)
        assert encode(await journal.group("task-1")) == encode(group(1, [episode(1, 0), episode(1, 1)], (1, 1)))
        assert ("task-0" in journal) == bool(unfinished)
        if unfinished:
            found, attempts = await journal.task("task-0")
            assert (encode(found), attempts.keys()) == (encode(task(0)), left)
        await journal.close()
        assert caplog.text.count("the disk has damaged, and it counts as not recorded: ") == (number == 0)
    journal = await opened(tmp_path / "j")
    await record(journal, range(1), delivered=True)
    await journal.close()
    journal = Journal.open(tmp_path / "j")
    resumed = await journal.resume(CONFIGURATION)
    assert (resumed.undelivered, resumed.unfinished) == (("task-1",), ())
    await journal.close()


async def test_a_damaged_beginning_is_an_error_and_a_file_that_is_deleted_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "j" / JOURNAL_FILE
    for offset in (0, 64, 64 + 64 + 5):
        await make(tmp_path / "j", range(3))
        flip(tmp_path / "j", offset)
        with pytest.raises(JournalError, match=r"journal.mmr .*Restore it, or delete it and start"):
            await make(tmp_path / "j")
        path.unlink()
        journal = Journal.open(tmp_path / "j")
        assert await journal.resume(CONFIGURATION) == ResumedRun()
        await journal.close()
        path.unlink()


# What is in the files.


async def test_a_file_that_grows_is_written_anew_without_what_was_delivered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_file, "_SLACK_BYTES", 50_000)
    journal = await opened(tmp_path / "j")
    await record(journal, range(2))
    largest = 0
    for number in range(2, 60):
        await record(journal, range(number, number + 1), delivered=True)
        largest = max(largest, (tmp_path / "j" / JOURNAL_FILE).stat().st_size)
    assert largest < 120_000
    await journal.close()
    assert [path.name for path in (tmp_path / "j").iterdir()] == [JOURNAL_FILE]
    journal = Journal.open(tmp_path / "j")
    assert await journal.resume(CONFIGURATION) == ResumedRun(undelivered=("task-0", "task-1"))
    assert encode(await journal.group("task-1")) == encode(group(1, [episode(1, 0), episode(1, 1)], (1, 1)))
    assert "task-59" in journal
    await journal.close()


async def test_a_disk_that_is_full_while_the_file_is_written_anew_costs_nothing_that_was_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_file, "_SLACK_BYTES", 0)
    journal = await opened(tmp_path / "j")
    await record(journal, range(2))
    with monkeypatch.context() as full:
        full.setattr(RecordWriter, "flush", lambda writer: os.write(os.open("/dev/full", os.O_WRONLY), b"x"))
        with pytest.raises(JournalError, match="it cannot be written: No space left on device"):
            await journal.delivered("task-0")
    assert [path.name for path in (tmp_path / "j").iterdir()] == [JOURNAL_FILE]
    assert encode(await journal.group("task-1")) == encode(group(1, [episode(1, 0), episode(1, 1)], (1, 1)))
    await journal.close()
    journal = Journal.open(tmp_path / "j")
    assert await journal.resume(CONFIGURATION) == ResumedRun(undelivered=("task-1",))
    await journal.close()


@pytest.mark.parametrize("fsync", [False, True])
async def test_with_fsync_groups_and_deliveries_wait_for_the_disk_and_single_episodes_do_not(
    tmp_path: Path, fsync: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the calls of `flush`: no power can be cut in a test."""
    journal = await opened(tmp_path / "j", fsync=fsync)
    flushed: list[str] = []

    def note(writer: RecordWriter) -> None:
        with RecordReader(tmp_path / "j" / JOURNAL_FILE) as reader:
            flushed.append(reader[-1][0])

    monkeypatch.setattr(RecordWriter, "flush", note)
    await record(journal, range(1), delivered=True)
    await journal.close()
    assert flushed == (["task", "group", "closed"] if fsync else [])
