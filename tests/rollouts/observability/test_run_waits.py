"""Episodes that wait for long are named, with what they wait for."""

import asyncio
import logging
import threading

import pytest
from run_events import FakeClock, replay

from rollouts.errors import ArgumentError
from rollouts.observability import EpisodeWait, WaitWatcher, wait_report
from rollouts.observability.engine_load import PeriodicThread
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


class FirstRecord(logging.Handler):
    """Sets `logged` at the first record."""

    def __init__(self):
        super().__init__()
        self.logged = threading.Event()

    def emit(self, record):
        self.logged.set()


@pytest.fixture
def logged():
    handler = FirstRecord()
    logging.getLogger(LOGGER).addHandler(handler)
    yield handler.logged
    logging.getLogger(LOGGER).removeHandler(handler)


async def test_the_thread_logs_a_wait_while_the_event_loop_runs(logged, caplog):
    with WaitWatcher(threshold_seconds=0.05) as watcher:
        start(watcher, 1, "environment.step")
        assert await asyncio.to_thread(logged.wait, 20)
    assert "for environment.step" in caplog.text


@pytest.mark.slow
async def test_an_environment_that_blocks_the_event_loop_is_named_with_the_line_in_which_it_is(logged, caplog):
    def blocking_step():
        assert logged.wait(20)

    with WaitWatcher(threshold_seconds=0.5) as watcher:
        start(watcher, 1, "engine")
        start(watcher, 2, "environment.step")
        await asyncio.sleep(0)
        blocking_step()
    (message,) = caplog.messages
    assert message.startswith("the event loop has been blocked for ")
    assert "episode e2 of task t2 (turn 3) has waited" in message
    assert "in blocking_step\n    assert logged.wait(20)" in message


async def test_a_block_is_logged_once_and_the_next_one_again(watcher, clock, caplog):
    start(watcher, 1)
    for _ in range(2):
        watcher.check()  # asks the loop, which does not run until the end of this part
        for seconds in (11.0, 20.0):
            clock.now += seconds
            watcher.check()
        await asyncio.sleep(0)
        watcher(EpisodeWaiting("e1", 3, "engine"))
        watcher.check()
        await asyncio.sleep(0)
    assert [message.split(" s;")[0] for message in caplog.messages] == ["the event loop has been blocked for 11.0"] * 2


def test_an_event_loop_that_has_ended_does_not_block(clock, caplog):
    watcher = WaitWatcher(threshold_seconds=10, clock=clock)

    async def run():
        start(watcher, 1)
        watcher.check()

    asyncio.run(run())
    watcher(EpisodeEnded("e1", "done", 0.0, "", 0.0))
    clock.now = 100.0
    watcher.check()
    assert caplog.messages == []


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), "60", None])
def test_a_threshold_that_is_no_number_above_0_is_refused(seconds):
    with pytest.raises(ArgumentError, match="threshold_seconds"):
        WaitWatcher(threshold_seconds=seconds)


def test_the_thread_ends_with_the_block():
    before = set(threading.enumerate())  # those of other tests may end meanwhile
    with WaitWatcher():
        (thread,) = set(threading.enumerate()) - before
    assert not thread.is_alive()


def test_a_periodic_function_that_raises_is_called_again_and_logged_once_until_it_succeeds(caplog):
    outcomes = iter([ValueError("broken pipe"), ValueError("still broken"), None, ValueError("broken again")])
    over = threading.Event()

    def call():
        outcome = next(outcomes, over)
        if outcome is over:
            over.set()
        elif outcome is not None:
            raise outcome

    thread = PeriodicThread(call, 0.001, "writer")
    thread.start()
    assert over.wait(20)
    thread.stop()
    assert caplog.messages == ["writer failed", "writer failed"]
    assert [str(record.exc_info[1]) for record in caplog.records] == ["broken pipe", "broken again"]


def test_an_episode_that_ends_between_report_and_log_is_not_logged(watcher, clock, caplog, monkeypatch):
    start(watcher, 1)
    clock.now = 11.0
    waits = watcher.report(10)
    watcher(EpisodeEnded("e1", "done", 1.0, "", 11.0))
    monkeypatch.setattr(watcher, "report", lambda longer_than: waits)
    watcher.check()
    assert caplog.messages == []
