"""Metrics counted from the events of a run."""

import dataclasses
import typing

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from run_events import FakeClock, replay

from rollouts.observability import METRICS, RunMetrics
from rollouts.observability.run_metrics import RecentRate
from rollouts.runner import events
from rollouts.runner.events import GroupFinished, GroupSkipped, GroupStale


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def run_metrics(clock):
    return RunMetrics(clock=clock)


def test_a_failed_attempt_waits_for_its_retry_until_the_delay_has_passed(run_metrics, clock):
    replay(run_metrics, clock, until=6.5)
    assert run_metrics.metrics()["episodes_waiting/retry"] == 1
    clock.now = 7.0
    assert "episodes_waiting/retry" not in run_metrics.metrics()


@pytest.mark.parametrize(
    ("event", "key", "queued"),
    [
        (GroupSkipped("t", "solved"), "groups_skipped/solved", 0),
        (GroupStale("t", 5, "drop"), "groups_stale/drop", 0),
        (GroupStale("t", 5, "downweight"), "groups_stale/downweight", 1),
    ],
    ids=["skipped", "dropped", "down-weighted"],
)
def test_a_group_leaves_the_queue_when_it_will_not_be_delivered(run_metrics, event, key, queued):
    run_metrics(GroupFinished("t", np.ones(2), np.ones(2), np.zeros(2), {}, 1.0))
    run_metrics(event)
    values = run_metrics.metrics()
    assert (values[key], values["groups_queued"]) == (1, queued)


def test_every_key_is_a_row_of_the_table_and_every_kind_of_value_is_as_it_says(run_metrics, clock):
    replay(run_metrics, clock, until=6.0)
    rows = {row.name: row for row in METRICS}
    assert len(rows) == len(METRICS)
    for key in run_metrics.metrics():
        name, _, label = key.partition("/")
        histogram = name.removesuffix("_count").removesuffix("_sum")
        row = rows[name] if name in rows else rows[histogram]
        assert (row.kind == "histogram") == (name not in rows)
        assert bool(row.label) == bool(label)


def test_every_kind_of_event_of_a_runner_is_in_its_type():
    classes = {each for each in vars(events).values() if dataclasses.is_dataclass(each)}
    assert set(typing.get_args(events.RunnerEvent)) == classes


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(0, 100)), max_size=30), st.floats(0, 50))
@example(steps=[(1e-308, 2)], later=0.0)
@example(steps=[(0.1, 100), (19.8, 1)], later=19.0)
def test_a_rate_is_never_more_than_all_that_was_added_in_the_last_four_windows_allows(steps, later):
    rate, now, added = RecentRate(0.0, window=10.0), 0.0, []
    for seconds, amount in steps:
        now += seconds
        rate.add(amount, now)
        added.append((now, amount))
    now += later
    recent = sum(amount for then, amount in added if now - then <= 40.0)
    # The time that a rate is taken over is at least a window, or the time since the beginning.
    shortest = min(now, 10.0)
    assert rate.per_second(now) >= 0.0
    if shortest > 0:
        assert rate.per_second(now) * shortest <= recent * (1 + 1e-9)


@pytest.mark.parametrize("bad", [lambda: 1 / 0, lambda: {"turns": "many"}], ids=["raises", "text"])
def test_a_source_that_fails_is_left_out_and_logged_once_until_it_succeeds(bad, caplog):
    results = iter([bad, bad, lambda: {"bridges": 1}, bad])
    run_metrics = RunMetrics(sources=[lambda: next(results)(), lambda: {"engine_read_errors": 2}])
    for failures_logged, bridges in ((1, None), (1, None), (1, 1), (2, None)):
        values = run_metrics.metrics()
        assert (values.get("bridges"), values["engine_read_errors"], values["turns"]) == (bridges, 2, 0)
        assert [record.levelname for record in caplog.records] == ["ERROR"] * failures_logged
