"""What a runner says about episodes that fail or do not end, and what episodes of a group share."""

import asyncio
import logging

import pytest
from runner_world import Counting, make_runner, run_groups, tasks

from rollouts.errors import RolloutsError
from rollouts.runner import EpisodeLimits


class Broken(Counting):
    def step(self, assistant):
        return {}["no such key"]


def warnings_of(caplog):
    return [record for record in caplog.records if record.name == "rollouts.runner"]


def test_a_failure_is_logged_once_with_the_traceback_of_the_environment(renderer, caplog):
    run_groups(renderer, tasks(3), Broken, group_size=2)
    (record,) = warnings_of(caplog)
    assert "Broken.step raised KeyError" in record.getMessage()
    assert 'return {}["no such key"]' in logging.Formatter().format(record)


class FourAloneSucceeds(Counting):
    """Fails for all tasks but number 4."""

    def step(self, assistant):
        if self.task.data != 4:
            raise ValueError(f"task {self.task.data}")
        return super().step(assistant)


class BrokenInTwoWays(Counting):
    def reset(self, seed):
        return [] if self.task.data == 1 else super().reset(seed)

    def step(self, assistant):
        raise ValueError


def groups_until_the_error(renderer, count, make_environment=Broken, **options):
    """The ids of the delivered groups, and the error that ended the stream; None if it ended by itself."""

    async def run():
        delivered = []
        async with make_runner(renderer, make_environment, **options) as runner:
            try:
                async for group in runner.stream(tasks(count)):
                    delivered.append(group.task.task_id)  # noqa: PERF401  those before the error, too
            except RolloutsError as error:
                return delivered, error
        return delivered, None

    return asyncio.run(run())


def test_a_run_whose_first_groups_fail_in_one_way_delivers_them_and_ends_with_their_error(renderer):
    delivered, error = groups_until_the_error(renderer, 20, group_size=2, concurrency=2, stop_after_failed_groups=3)
    assert delivered == ["t0", "t1", "t2"]
    assert "each of their 6 episodes" in str(error)
    assert "Broken.step raised KeyError" in str(error)


@pytest.mark.parametrize(
    ("count", "make_environment", "stop_after"),
    [
        (20, Broken, 0),
        (2, Broken, 3),
        (20, FourAloneSucceeds, 5),  # the last of the first five succeeds
        (20, BrokenInTwoWays, 3),
    ],
    ids=["never", "fewer groups", "a success", "two kinds of errors"],
)
def test_a_run_goes_on_where_not_all_of_its_first_groups_fail_in_one_way(renderer, count, make_environment, stop_after):
    delivered, error = groups_until_the_error(
        renderer, count, make_environment, concurrency=1, stop_after_failed_groups=stop_after
    )
    assert error is None
    assert len(delivered) == count


@pytest.mark.parametrize(("made", "text"), [(Counting, "Counting'>; return an instance"), (None, "reset and step")])
def test_a_function_that_makes_no_environment_is_named_in_the_error(renderer, made, text):
    groups, _ = run_groups(renderer, tasks(1), lambda task: made)
    assert "make_environment returned" in groups["t0"].episodes[0].error
    assert text in groups["t0"].episodes[0].error


@pytest.mark.parametrize(("limits", "count"), [(EpisodeLimits(), 1), (EpisodeLimits(max_turns=6), 0)])
def test_an_episode_without_limits_that_goes_on_is_reported_once(renderer, caplog, monkeypatch, limits, count):
    monkeypatch.setattr("rollouts.runner.reporting._MANY_TURNS", 3)

    class FiveTurns(Counting):
        turns = 5

    run_groups(renderer, tasks(2), FiveTurns, limits=limits)
    assert ["EpisodeLimits(max_turns=...)" in record.getMessage() for record in warnings_of(caplog)] == [True] * count
