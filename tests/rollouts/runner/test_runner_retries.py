"""Failed episodes are repeated where that may help, with bounded attempts, and keep no one's place meanwhile."""

import asyncio

import pytest
from runner_world import HeldEngine, make_runner, run_groups, tasks

from renderers.errors import MediaFetchError
from rollouts.episodes.errors import (
    EnvironmentFailedError,
    EpisodeFailure,
    RemoteFailureError,
    error_kind,
    is_outage,
)
from rollouts.errors import (
    EngineFailedError,
    GenerationInterruptedError,
    InvalidRequestError,
    ServerError,
    ServerTimeoutError,
    ServerUnreachableError,
    no_server,
)
from rollouts.runner import RetryPolicy
from rollouts.runner.events import EpisodeRetried, EpisodeWaiting
from rollouts.runner.retries import FailedAttempts
from rollouts.testing import ScriptedEngine

AT_ONCE = RetryPolicy(first_delay=0.0)
UNREACHABLE = ServerUnreachableError("r", "refused")
TOO_SLOW = ServerTimeoutError("r", "too slow")
REFUSED = InvalidRequestError("r", "no")


def caused(error, cause):
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("engine", ServerUnreachableError("r", "refused")),
        ("engine", ServerTimeoutError("r", "too slow")),
        ("engine", ServerError("r", "failed", status=500, body="")),
        ("engine", GenerationInterruptedError("r", "aborted")),
        ("engine", caused(EngineFailedError("r", "raised"), ConnectionResetError())),
        ("media", MediaFetchError("gone")),
        ("environment", EnvironmentFailedError("Maze", "step", KeyError("x"))),
        ("engine", caused(EnvironmentFailedError("Chat", "step", TOO_SLOW), TOO_SLOW)),
        (None, caused(EnvironmentFailedError("Chat", "step", REFUSED), REFUSED)),
        (None, caused(EngineFailedError("r", "raised"), KeyError())),
        (None, ServerError("r", "refused", status=400, body="")),
        (None, InvalidRequestError("r", "wrong")),
        (None, KeyError("x")),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_the_kind_of_an_error_says_whether_another_attempt_may_succeed(kind, error):
    assert error_kind(error) == kind


def test_delays_double_up_to_the_longest_and_are_shortened_by_at_most_a_half():
    policy = RetryPolicy(first_delay=1.0, max_delay=10.0)
    for attempts, longest in [(1, 1.0), (2, 2.0), (3, 4.0), (4, 8.0), (5, 10.0), (1999, 10.0)]:
        delays = [policy.backoff(attempts) for _ in range(50)]
        assert all(longest / 2 <= delay <= longest for delay in delays)
        assert len(set(delays)) > 1


def failing_first(count, error):
    """Raises for the first `count` requests of each episode of a group."""
    seen = {}

    def script(request):
        index = request.session_id.rpartition(".")[0]
        seen[index] = seen.get(index, 0) + 1
        if seen[index] <= count:
            raise error
        return "yes"

    return script


def test_an_episode_is_repeated_from_its_beginning_with_other_samples_and_the_same_environment(renderer):
    engine = ScriptedEngine(failing_first(2, ConnectionError("reset")), renderer=renderer)
    groups, runner = run_groups(renderer, tasks(2), engine=engine, group_size=2, retry=AT_ONCE)
    for task_id, group in groups.items():
        assert group.attempts == (3, 3)
        assert [episode.episode_id for episode in group.episodes] == [f"{task_id}/0.2", f"{task_id}/1.2"]
        assert all(episode.done and not episode.error for episode in group.episodes)
        assert len({episode.seed for episode in group.episodes}) == 1
    seeds = [request.sampling.seed for request in engine.requests]
    assert len(set(seeds)) == len(seeds)
    assert runner.metrics()["episodes_retried"] == 8


@pytest.mark.parametrize(
    ("is_one", "error"),
    [
        (True, UNREACHABLE),
        (True, no_server("r", {})),
        (True, ServerError("r", "it is starting", status=503, body="")),
        (True, caused(EngineFailedError("r", "raised"), ConnectionRefusedError())),
        (True, caused(EnvironmentFailedError("Chat", "step", UNREACHABLE), UNREACHABLE)),
        (True, RemoteFailureError(EpisodeFailure("ServerUnreachableError", "refused", "engine", is_outage=True))),
        (False, TOO_SLOW),
        (False, ServerError("r", "failed", status=500, body="")),
        (False, caused(EngineFailedError("r", "raised"), TimeoutError())),
        (False, RemoteFailureError(EpisodeFailure("ServerTimeoutError", "too slow", "engine"))),
        (False, KeyError("x")),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_engine_that_cannot_be_reached_at_all_is_an_outage(is_one, error):
    assert is_outage(error) is is_one


def test_attempts_in_an_outage_do_not_count_until_it_is_too_long():
    policy = RetryPolicy(max_attempts=2, first_delay=1.0, max_delay=8.0, outage_seconds=100.0)
    failed = FailedAttempts(policy, 0)
    for now, longest in [(50.0, 1.0), (60.0, 2.0), (70.0, 4.0), (90.0, 8.0), (149.0, 1.0)]:
        assert 0 < failed.delay(UNREACHABLE, now) <= longest
    assert failed.delay(UNREACHABLE, 150.0) is not None  # the first that counts
    assert failed.delay(UNREACHABLE, 160.0) is None


def test_an_outage_begins_anew_after_an_attempt_that_reached_the_engine():
    failed = FailedAttempts(RetryPolicy(max_attempts=3, outage_seconds=100.0), 0)
    assert failed.delay(UNREACHABLE, 0.0) is not None
    assert failed.delay(TOO_SLOW, 90.0) is not None  # counts
    for now in (99.0, 150.0, 198.0):
        assert failed.delay(UNREACHABLE, now) is not None
    assert failed.delay(TOO_SLOW, 200.0) is not None  # counts
    assert failed.delay(TOO_SLOW, 201.0) is None


async def test_an_episode_that_waits_for_its_next_attempt_leaves_its_place_to_others(renderer):
    events = []
    waits = asyncio.Event()

    def listen(event):
        events.append(event)
        if isinstance(event, EpisodeWaiting) and event.waiting_for == "retry":
            waits.set()

    def script(request):
        if request.session_id.startswith("t0/"):
            raise TimeoutError("too slow")
        return "yes"

    engine = HeldEngine(renderer, script)
    engine.release.set()
    options = {"retry": RetryPolicy(first_delay=3600.0, max_delay=3600.0), "listeners": [listen]}
    async with make_runner(renderer, engine=engine, concurrency=1, **options) as runner:
        stream = runner.stream(tasks(4))
        groups = [await anext(stream) for _ in range(3)]
        assert waits.is_set()
        assert sorted(group.task.task_id for group in groups) == ["t1", "t2", "t3"]
        (retried,) = [event for event in events if isinstance(event, EpisodeRetried)]
        assert retried.episode_id == "t0/0.0"
        assert "too slow" in retried.error
        assert 1800 <= retried.delay_seconds <= 3600
        await stream.aclose()


def test_a_failing_listener_gets_no_more_events_and_the_others_do(renderer, caplog):
    calls, events = [], []

    def failing(event):
        calls.append(event)
        raise OSError("the dashboard is gone")

    groups, _ = run_groups(renderer, tasks(2), listeners=[failing, events.append])
    assert len(groups) == 2
    assert len(calls) == 1
    assert len(events) > 10
    assert "the dashboard is gone" in caplog.text
