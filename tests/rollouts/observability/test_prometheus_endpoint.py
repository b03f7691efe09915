"""The metrics of a run as Prometheus reads them."""

import asyncio
import math
import re
import socket
import threading
import urllib.request

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from run_events import FakeClock, replay

from rollouts.errors import RolloutsError
from rollouts.observability import METRICS, PrometheusEndpoint, RunMetrics
from rollouts.runner.events import EpisodeStarted, EpisodeWaiting, GroupFinished


def scrape(endpoint):
    with urllib.request.urlopen(endpoint.url, timeout=10) as response:
        return response.read().decode()


def samples(text):
    """(name, labels) -> value"""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.fixture
def run_metrics():
    clock = FakeClock()
    run_metrics = RunMetrics(clock=clock)
    replay(run_metrics, clock)
    return run_metrics


@pytest.mark.slow
def test_the_endpoint_serves_counters_gauges_and_histograms_of_the_run(run_metrics):
    with PrometheusEndpoint(run_metrics, port=0) as endpoint:
        found = samples(scrape(endpoint))
        assert endpoint._listening[0].server_address[0] == "127.0.0.1"
    assert found["mmrollouts_turns_total", ()] == 3
    assert found["mmrollouts_completion_tokens_total", ()] == 35
    assert found["mmrollouts_episodes_ended_total", (("outcome", "failed"),)] == 1
    assert found["mmrollouts_episodes_running", ()] == 0
    means = {name: found[f"mmrollouts_{name}_reward_mean", ()] for name in ("total", "environment", "group")}
    assert means == {"total": 0.875, "environment": 0.625, "group": 0.25}
    assert found["mmrollouts_turn_seconds_sum", (("part", "engine"),)] == 4.0
    assert found["mmrollouts_turn_seconds_count", (("part", "engine"),)] == 3
    # Of 2, 1 and 1 seconds.
    assert found["mmrollouts_turn_seconds_bucket", (("le", "1.0"), ("part", "engine"))] == 2
    assert found["mmrollouts_turn_seconds_bucket", (("le", "+Inf"), ("part", "engine"))] == 3
    assert found["mmrollouts_weights_info", (("version", "1"),)] == 1
    assert found["mmrollouts_weight_update_seconds_count", ()] == 1
    assert found["mmrollouts_weight_update_seconds_sum", ()] == 0.5


@pytest.mark.slow
def test_names_follow_the_conventions_of_prometheus(run_metrics):
    """Base units, `_total` on counters and only there, one prefix, and no rates."""
    with PrometheusEndpoint(run_metrics, port=0) as endpoint:
        families = list(text_string_to_metric_families(scrape(endpoint)))
    assert {row.kind for row in METRICS} == {"counter", "gauge", "histogram"}
    for family in families:
        assert re.fullmatch(r"mmrollouts_[a-z][a-z0-9_]*", family.name)
        assert family.documentation
        assert not re.search(r"_(ms|milliseconds|minutes|kb|mb|percent|per_second)(_|$)", family.name)
        for sample in family.samples:
            assert sample.name.endswith("_total") == (family.type == "counter")


@pytest.mark.parametrize(("host", "port"), [("192.0.2.1", 0), ("127.0.0.1", 65536)])
def test_an_address_of_another_machine_and_a_port_out_of_range_are_errors(host, port):
    with (
        pytest.raises(RolloutsError, match=f"{host}:{port}: .*pass another port"),
        PrometheusEndpoint(RunMetrics(), port=port, host=host),
    ):
        pass


@pytest.mark.slow
def test_the_port_is_closed_and_the_thread_ends_with_the_block():
    before = set(threading.enumerate())  # those of other tests may end meanwhile
    with PrometheusEndpoint(RunMetrics(), port=0) as endpoint:
        port = endpoint.port
        (thread,) = set(threading.enumerate()) - before
    assert not thread.is_alive()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port), timeout=5)


async def test_metrics_can_be_read_while_events_change_them():
    """A scrape on another thread never meets a container that changes under it."""
    run_metrics = RunMetrics()
    registry = PrometheusEndpoint(run_metrics).registry
    stop = threading.Event()

    def read():
        while not stop.is_set():
            assert math.isfinite(registry.get_sample_value("mmrollouts_episodes_running"))

    reader = asyncio.create_task(asyncio.to_thread(read))
    await asyncio.sleep(0)
    for number in range(3000):
        run_metrics(EpisodeStarted(f"e{number}", "t", 0, 0))
        run_metrics(EpisodeWaiting(f"e{number}", 0, "engine"))
        parts = {f"part{number % 7}": np.ones(2)}
        run_metrics(GroupFinished(f"t{number}", np.ones(2), np.ones(2), np.zeros(2), parts, 1.0))
    stop.set()
    await reader  # raises what a reading raised
