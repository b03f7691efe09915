"""A runner with a journal: what is run again, what is delivered again, and what a runner refuses."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from journalled_run import digest_of
from runner_world import assert_no_task_is_left, make_runner, tasks

from rollouts.errors import ArgumentError
from rollouts.runner import (
    Asynchronous,
    Group,
    Journal,
    JournalError,
)
from rollouts.runner.events import GroupFinished
from rollouts.testing import ScriptedEngine


def journalled(renderer: Any, directory: Path, **options: Any) -> Any:
    return make_runner(renderer, journal=Journal.open(directory / "journal"), **options)


async def received(renderer: Any, directory: Path, count: int, *, limit: int = 99, **options: Any) -> list[Group]:
    """The groups of a run over `count` tasks; the process stops after `limit` of them."""
    groups: list[Group] = []
    async with journalled(renderer, directory, **options) as runner:
        async for group in runner.stream(tasks(count)):
            groups.append(group)
            if len(groups) == limit:
                break
    assert_no_task_is_left()
    return groups


def ids(groups: list[Group]) -> list[str]:
    return [group.task.task_id for group in groups]


async def test_an_acknowledged_group_is_not_delivered_again(renderer: Any, tmp_path: Path) -> None:
    async with journalled(renderer, tmp_path) as runner:
        group = await anext(runner.stream(tasks(1)))
        await runner.acknowledge(group)
    assert await received(renderer, tmp_path, 1) == []


async def test_a_group_that_was_not_acknowledged_is_delivered_again_unchanged_and_not_run_again(
    renderer: Any, tmp_path: Path
) -> None:
    before = await received(renderer, tmp_path, 3, limit=2, group_size=2)
    engine = ScriptedEngine(lambda request: "yes", renderer=renderer)
    after = await received(renderer, tmp_path, 3, engine=engine, group_size=2)
    assert digest_of(after[0]) == digest_of(before[1])
    assert sorted(ids(before[:1] + after)) == ["t0", "t1", "t2"]
    assert not {request.session_id.split("/")[0] for request in engine.requests} & {*ids(before)}


async def test_the_groups_that_the_consumer_has_are_those_that_it_says_whatever_the_journal_has(
    renderer: Any, tmp_path: Path
) -> None:
    left = await received(renderer, tmp_path, 4, limit=3)  # the journal has that the first two were delivered
    has, lost = {left[0].task.task_id, left[2].task.task_id, "t9"}, left[1].task.task_id
    journal = Journal.open(tmp_path / "journal")
    journal.count_as_delivered(has)
    engine = ScriptedEngine(lambda request: "yes", renderer=renderer)
    async with make_runner(renderer, journal=journal, engine=engine) as runner:
        await runner.resume()
        assert journal.lost == {lost}
        with pytest.raises(JournalError, match="before the runner begins"):
            journal.count_as_delivered({"t0"})
        groups = [group async for group in runner.stream(tasks(4))]
    assert journal.lost == frozenset()
    assert {*ids(groups)} == {f"t{number}" for number in range(4)} - has
    assert f"{lost}/0.0" in {request.session_id for request in engine.requests}
    assert await received(renderer, tmp_path, 4) == []


async def test_tasks_that_were_begun_are_continued_though_the_source_does_not_yield_them_again(
    renderer: Any, tmp_path: Path
) -> None:
    async with journalled(renderer, tmp_path, group_size=2, concurrency=1) as runner:
        await anext(runner.stream(tasks(2)))
    async with journalled(renderer, tmp_path, group_size=2) as runner:
        groups = [group async for group in runner.stream([])]
    assert "t0" in ids(groups)
    assert all(len(group) == 2 and not group.num_failed for group in groups)


async def left_of_five(renderer: Any, directory: Path) -> set[str]:
    """Ids of the groups of five tasks that a process has finished and has not delivered."""
    finished, all_finished = set(), asyncio.Event()

    def listen(event: Any) -> None:
        if isinstance(event, GroupFinished):
            finished.add(event.task_id)
            if len(finished) == 5:
                all_finished.set()

    async with journalled(renderer, directory, listeners=[listen]) as runner:
        stream = runner.stream(tasks(5))
        first = await anext(stream)
        await anext(stream)  # now the first one counts as delivered
        await all_finished.wait()
    return finished - {first.task.task_id}


async def test_what_a_closed_stream_has_not_begun_to_deliver_goes_to_the_next_one(
    renderer: Any, tmp_path: Path
) -> None:
    left = await left_of_five(renderer, tmp_path)
    async with journalled(renderer, tmp_path) as runner:
        stream = runner.stream(tasks(5))
        first = await anext(stream)
        await stream.aclose()
        others = [group async for group in runner.stream(tasks(5))]
    assert {first.task.task_id, *ids(others)} == left
    assert len(others) == len(left) - 1


async def test_staleness_counts_from_the_updates_of_the_process_that_was_killed(renderer: Any, tmp_path: Path) -> None:
    engine = ScriptedEngine(lambda request: "yes", renderer=renderer, weight_version="base")
    async with journalled(renderer, tmp_path, engine=engine, mode=Asynchronous(2), tasks=tasks(3)) as runner:
        (first,) = await runner.collect(1)  # not acknowledged
        for version in ("1", "2"):
            await runner.update_weights(None, version)

    again = ScriptedEngine(lambda request: "yes", renderer=renderer, weight_version="base")
    async with journalled(renderer, tmp_path, engine=again, mode=Asynchronous(2), tasks=tasks(3)) as runner:
        await runner.update_weights(None, "2")
        assert runner.versions == ("base", "1", "2")
        (group,) = await runner.collect(1)
        assert (group.task.task_id, group.oldest_version) == (first.task.task_id, "base")  # stale by 2, as allowed

    third = ScriptedEngine(lambda request: "yes", renderer=renderer, weight_version="2")
    async with journalled(renderer, tmp_path, engine=third, mode=Asynchronous(2), tasks=tasks(3)) as runner:
        await runner.update_weights(None, "3")
        assert runner.versions == ("base", "1", "2", "3")
        groups = await runner.collect(3)
        assert first.task.task_id not in ids(groups)  # stale by 3
        assert {group.oldest_version for group in groups} <= {"2", "3"}
        assert len(groups) + runner.metrics()["groups_stale/drop"] == 3


async def test_a_consumer_that_is_cancelled_while_the_journal_is_read_may_ask_again(
    renderer: Any, tmp_path: Path
) -> None:
    await received(renderer, tmp_path, 2, limit=1)
    journal, is_released = Journal.open(tmp_path / "journal"), threading.Event()
    journal._thread.submit(is_released.wait, 30)
    async with make_runner(renderer, journal=journal, tasks=tasks(2)) as runner:
        collecting = asyncio.ensure_future(runner.collect(2))
        await asyncio.sleep(0)
        collecting.cancel()
        await asyncio.wait([collecting])
        is_released.set()
        assert sorted(ids(await runner.collect(2))) == ["t0", "t1"]
    assert_no_task_is_left()


@pytest.mark.parametrize("options", [{"group_size": 0}, {"mode": 3}, {"tasks": 5}], ids=str)
async def test_a_runner_that_is_refused_closes_its_journal(
    renderer: Any, tmp_path: Path, options: dict[str, Any]
) -> None:
    with pytest.raises(ArgumentError) as caught:
        journalled(renderer, tmp_path, **options)
    await Journal.open(tmp_path / "journal").close()
    assert caught.value.name in options


async def test_a_runner_that_is_refused_does_not_close_the_journal_of_another_one(
    renderer: Any, tmp_path: Path
) -> None:
    journal = Journal.open(tmp_path / "journal")
    async with make_runner(renderer, journal=journal, tasks=tasks(2)) as runner:
        await runner.collect(1)
        with pytest.raises(ArgumentError):
            make_runner(renderer, journal=journal, group_size=0)
        assert len(await runner.collect(1)) == 1
