"""The progress of a run: lines that are updated on a terminal, plain lines elsewhere."""

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from run_events import FakeClock, replay

from rollouts.errors import ArgumentError
from rollouts.observability import METRICS, MetricHistory, ProgressDisplay, RunMetrics
from rollouts.observability.progress import progress_rows
from rollouts.runner.events import EpisodeStarted, EpisodeWaiting, GroupFinished

ENGINE = {
    "engine_requests_running": 64.0,
    "engine_requests_waiting": 12.0,
    "engine_kv_cache_usage_ratio": 0.83,
    "engine_prefix_cache_queries": 1000.0,
    "engine_prefix_cache_hits": 910.0,
    "engine_media_cache_queries": 100.0,
    "engine_media_cache_hits": 99.0,
    "media_items_sent": 1,
    "media_items_omitted": 3,
    "bridges": 9,
    "bridges_refused/rewrites_history": 1,
}


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def run_metrics(clock):
    return RunMetrics(clock=clock, sources=[lambda: ENGINE])


def test_every_figure_of_a_run_is_on_its_row(run_metrics, clock):
    replay(run_metrics, clock, until=9.5)
    assert dict(progress_rows(run_metrics.metrics(), total_groups=1200)) == {
        "time": "0:00:09",
        "groups": "1 of 1,200 finished, 1 queued, 0 delivered",
        "episodes": "0 running, 1 done, 1 failed, 1 truncated, 1 retried",
        "turns": "3, 0.3/s, 4 tokens/s",
        "reward": "total 0.875, environment 0.625, group 0.250, correct 0.500",
        "engine": "64 running, 12 queued, KV cache 83%, prefix cache hits 91%, media cache hits 99%",
        "prompts": "media sent by name 75%, bridged 90%",
        "weights": "1 updates, 1 failed",
    }


def test_a_delivered_group_shows_its_staleness_and_a_running_episode_what_it_waits_for(clock):
    run_metrics = RunMetrics(clock=clock)
    replay(run_metrics, clock)
    run_metrics(EpisodeStarted("e", "u", 0, 0))
    run_metrics(EpisodeWaiting("e", 0, "environment.step"))
    clock.now = 75.0
    rows = dict(progress_rows(run_metrics.metrics()))
    assert rows["staleness"] == "1.00, at most 1"
    assert rows["waiting"] == "1 environment.step, longest 65 s"
    assert rows["groups"] == "1 finished, 0 queued, 1 delivered"
    assert rows["time"] == "0:01:15"
    assert "engine" not in rows


@given(st.dictionaries(st.sampled_from([row.name for row in METRICS if not row.label]), st.floats(0, 1e12)))
def test_any_metrics_make_rows(values):
    values.setdefault("staleness_max", 0.0)
    values.setdefault("engine_requests_waiting", 0.0)
    assert all(text for _, text in progress_rows(values))


def test_a_line_is_one_line_whatever_names_a_reward_part_has(run_metrics):
    import numpy as np

    run_metrics(GroupFinished("t", np.ones(1), np.ones(1), np.zeros(1), {"a\nb\x1b[2J": np.ones(1)}, 1.0))
    line = ProgressDisplay(run_metrics).line()
    assert "\n" not in line
    assert "\x1b" not in line


def terminal(width=100):
    return Console(file=io.StringIO(), force_terminal=True, width=width, height=30, legacy_windows=False)


def test_on_a_narrow_terminal_no_line_is_wrapped(run_metrics, clock):
    replay(run_metrics, clock)
    console = terminal(width=30)
    with ProgressDisplay(run_metrics, console=console):
        pass
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue().replace("\r", "\n"))
    assert max(map(len, text.split("\n"))) <= 30


def test_output_that_nobody_reads_any_more_does_not_fail_the_run(run_metrics):
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    with ProgressDisplay(run_metrics, console=Console(file=Closed())):
        pass


@pytest.mark.parametrize("seconds", [0, float("nan"), "10"])
@pytest.mark.parametrize("make", [ProgressDisplay, lambda metrics, **options: MetricHistory(metrics, [], **options)])
def test_seconds_that_are_not_above_0_are_refused(run_metrics, make, seconds):
    with pytest.raises(ArgumentError, match="seconds"):
        make(run_metrics, seconds=seconds)
