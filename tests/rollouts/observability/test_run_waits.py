"""Episodes that wait for long are named, with what they wait for."""

import asyncio
import logging
import threading

import pytest
from run_events import FakeClock, replay

from rollouts.errors import ArgumentError
from rollouts.observability import EpisodeWait, WaitWatcher, wait_report
from rollouts.observability.periodic import PeriodicThread
from rollouts.runner.events import EpisodeEnded, EpisodeStarted, EpisodeWaiting

LOGGER = "rollouts.observability.waiting"


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def watcher(clock):
    return WaitWatcher(threshold_seconds=10, clock=clock)


def start(watcher, number, waiting_for="engine"):
    watcher(EpisodeStarted(f"e{number}", f"t{number}", 0, 0))
    watcher(EpisodeWaiting(f"e{number}", 3, waiting_for))


def test_the_report_has_every_waiting_episode_the_longest_wait_first(watcher, clock):
    replay(watcher, clock, until=4.0)
    assert watcher.report() == [
        EpisodeWait("t-1", "t", 0, "engine", 2.0),
        EpisodeWait("t-0", "t", 0, "engine", 1.0),
    ]
    assert watcher.report(longer_than=1.0) == [EpisodeWait("t-1", "t", 0, "engine", 2.0)]


def test_ended_episodes_do_not_wait(watcher, clock):
    replay(watcher, clock)
    clock.now = 1e6
    assert watcher.report() == []


def test_a_wait_above_the_threshold_is_logged_once(watcher, clock, caplog):
    start(watcher, 7, "environment.step")
    clock.now = 10.0
    watcher.check()
    assert caplog.messages == []
    clock.now = 12.5
    watcher.check()
    clock.now = 20.0
    watcher.check()
    assert caplog.messages == ["episode e7 of task t7 (turn 3) has waited 12.5 s for environment.step"]
    assert (caplog.records[0].episode_id, caplog.records[0].task_id) == ("e7", "t7")
    assert (caplog.records[0].name, caplog.records[0].levelno) == (LOGGER, logging.WARNING)


def test_the_next_wait_of_the_same_episode_is_logged_too(watcher, clock, caplog):
    start(watcher, 7)
    clock.now = 11.0
    watcher.check()
    watcher(EpisodeWaiting("e7", 3, "environment.step"))
    clock.now = 22.0
    watcher.check()
    assert [message.rpartition("for ")[2] for message in caplog.messages] == ["engine", "environment.step"]


def test_of_very_many_waits_for_the_same_thing_ten_have_a_line_each_and_one_counts_the_others(watcher, clock, caplog):
    for number in range(1000):
        start(watcher, number)
    start(watcher, 1000, "renderer")
    clock.now = 11.0
    watcher.check()
    watcher.check()
    assert len(caplog.messages) == 12
    assert caplog.messages[10] == "990 more episodes have waited longer than 10 s for engine"
    assert caplog.messages[11].endswith("for renderer")


def test_a_report_as_text_counts_the_waits_by_what_they_are_for(watcher, clock):
    assert wait_report([]) == "no episode waits"
    for number in range(3):
        start(watcher, number)
    start(watcher, 3, "environment.step")
    clock.now = 2.0
    assert wait_report(watcher.report(), max_episodes=1).splitlines() == [
        "4 episodes wait: 3 for engine, 1 for environment.step",
        "  episode e0 of task t0 (turn 3) has waited 2.0 s for engine",
        "  and 3 more",
    ]


async def test_a_wait_is_logged_also_while_the_environment_blocks_the_event_loop(caplog):
    logged = threading.Event()
    handler = logging.Handler()
    handler.emit = lambda record: logged.set()
    logging.getLogger(LOGGER).addHandler(handler)
    try:
        with WaitWatcher(threshold_seconds=0.05) as watcher:
            start(watcher, 1, "environment.step")
            assert logged.wait(20)  # blocks the event loop
    finally:
        logging.getLogger(LOGGER).removeHandler(handler)
    assert "for environment.step" in caplog.text
    await asyncio.sleep(0)


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), "60", None])
def test_a_threshold_that_is_no_number_above_0_is_refused(seconds):
    with pytest.raises(ArgumentError, match="threshold_seconds"):
        WaitWatcher(threshold_seconds=seconds)


def test_the_thread_ends_with_the_block():
    before = threading.active_count()
    with WaitWatcher():
        assert threading.active_count() == before + 1
    assert threading.active_count() == before


def test_a_periodic_function_that_raises_is_logged_and_called_again(caplog):
    calls = []
    twice = threading.Event()

    def fail():
        calls.append(None)
        if len(calls) > 1:
            twice.set()
        raise ValueError("broken pipe")

    thread = PeriodicThread(fail, 0.001, "writer")
    thread.start()
    assert twice.wait(20)
    thread.stop()
    assert "writer failed" in caplog.messages
    assert "broken pipe" in caplog.text


def test_an_episode_that_ends_between_report_and_log_is_not_logged(watcher, clock, caplog, monkeypatch):
    start(watcher, 1)
    clock.now = 11.0
    waits = watcher.report(10)
    watcher(EpisodeEnded("e1", "done", 1.0, "", 11.0))
    monkeypatch.setattr(watcher, "report", lambda longer_than: waits)
    watcher.check()
    assert caplog.messages == []
