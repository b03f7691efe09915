"""Log lines carry the episode that wrote them, and are JSON."""

import asyncio
import io
import json
import logging
from datetime import datetime

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_events import TIMELINE, FakeClock, replay

from renderers import RendererPool
from rollouts import StepResult, ThreadedEnvironment
from rollouts.observability import (
    EpisodeLogContext,
    EpisodeLogFilter,
    JsonLinesFormatter,
    JsonLogs,
    current_episode,
)
from rollouts.runner.events import EpisodeEnded, EpisodeStarted, EpisodeWaiting

log = logging.getLogger("an_environment")


def lines(stream):
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def formatted(**fields):
    record = logging.makeLogRecord({"name": "an_environment", "levelname": "INFO", "msg": "", **fields})
    return json.loads(JsonLinesFormatter().format(record))


class LoggingEnvironment:
    """Logs in each of its methods."""

    def reset(self, seed):
        log.info("reset")
        return [{"role": "user", "content": "?"}]

    def step(self, assistant):
        log.info("step")
        return StepResult(done=True)


async def play(listener, number, turns=2):
    """An episode as a runner reports it, in a task of its own, with an environment on threads."""
    environment = ThreadedEnvironment(LoggingEnvironment())
    listener(EpisodeStarted(f"e{number}", f"t{number}", number, 0))
    listener(EpisodeWaiting(f"e{number}", 0, "environment.reset"))
    await environment.reset(0)
    for turn in range(turns):
        listener(EpisodeWaiting(f"e{number}", turn, "environment.step"))
        await environment.step({"role": "assistant", "content": ""})
    listener(EpisodeEnded(f"e{number}", "done", 1.0, "", 0.0))
    log.info("after")


async def test_a_log_line_of_an_environment_on_a_thread_names_its_episode_task_and_turn():
    stream = io.StringIO()
    with JsonLogs(stream) as logs:
        await asyncio.gather(*(asyncio.create_task(play(logs, number)) for number in range(20)))
    for number in range(20):
        own = [line for line in lines(stream) if line.get("episode_id") == f"e{number}" and "event" not in line]
        assert [(line["message"], line["turn"]) for line in own] == [("reset", 0), ("step", 0), ("step", 1)]
        assert {(line["task_id"], line["episode_index"], line["attempt"]) for line in own} == {
            (f"t{number}", number, 0)
        }
    after = [line for line in lines(stream) if line["message"] == "after"]
    assert len(after) == 20
    assert not any("episode_id" in line for line in after)


async def test_the_episode_is_known_on_the_threads_of_a_renderer_pool(renderer):
    class AskingRenderer:
        def __getattr__(self, name):
            return getattr(renderer, name)

        def get_stop_token_ids(self):
            return []

        def render(self, messages, **options):
            return current_episode()

        render_ids = parse_response = bridge_to_next_turn = render

    EpisodeLogContext()(EpisodeStarted("e", "t", 2, 1))
    with RendererPool(AskingRenderer()) as pool:
        position = await pool.render_async([])
    assert (position.episode_id, position.task_id, position.index, position.attempt, position.turn) == (
        "e",
        "t",
        2,
        1,
        0,
    )


async def test_outside_of_episodes_there_is_no_current_one():
    assert current_episode() is None


async def test_an_event_of_another_episode_changes_nothing():
    context = EpisodeLogContext()
    context(EpisodeStarted("e", "t", 0, 0))
    context(EpisodeWaiting("other", 5, "engine"))
    context(EpisodeEnded("other", "done", 0.0, "", 0.0))
    assert (current_episode().episode_id, current_episode().turn) == ("e", 0)


def test_the_filter_makes_a_format_with_the_episode_work_everywhere():
    record = logging.makeLogRecord({"msg": "hello"})
    assert EpisodeLogFilter().filter(record)
    assert logging.Formatter("[%(episode_id)s %(turn)s] %(message)s").format(record) == "[ ] hello"


def test_every_event_is_a_line_with_its_fields():
    stream = io.StringIO()
    with JsonLogs(stream, level=logging.DEBUG) as logs:
        replay(logs, FakeClock())
    written = lines(stream)
    assert [line["event"] for line in written] == [type(event).__name__ for _, event in TIMELINE]
    finished = next(line for line in written if line["event"] == "GroupFinished")
    assert (finished["total_rewards"], finished["environment_rewards"]) == ([1.5, 0.25], [1.0, 0.25])
    assert (finished["group_rewards"], finished["reward_parts"]) == ([0.5, 0.0], {"correct": [1.0, 0.0]})
    turn = next(line for line in written if line["event"] == "TurnFinished")
    assert (turn["episode_id"], turn["turn"], turn["completion_tokens"]) == ("t-0", 0, 10)
    started = written[1]
    assert (started["episode_id"], started["episode_index"], started["attempt"]) == ("t-1", 1, 0)


def test_other_handlers_receive_what_they_received_before_and_no_events():
    root, console, stream = logging.getLogger(), logging.StreamHandler(io.StringIO()), io.StringIO()
    former, chatty = root.level, logging.getLogger("a_chatty_library")
    root.addHandler(console)
    root.setLevel(logging.WARNING)
    chatty.setLevel(logging.DEBUG)
    try:
        with JsonLogs(stream) as logs:
            replay(logs, FakeClock())
            log.info("below the level of the root logger")
            log.warning("a warning")
            chatty.debug("a logger with a level of its own")
        log.info("after the block")
        chatty.debug("a logger with a level of its own, after the block")
        root.setLevel(logging.INFO)
        log.info("a new level, after the block")
    finally:
        root.removeHandler(console)
        root.setLevel(former)
        chatty.setLevel(logging.NOTSET)
    assert console.stream.getvalue().splitlines() == [
        "a warning",
        "a logger with a level of its own",
        "a logger with a level of its own, after the block",
        "a new level, after the block",
    ]
    assert {"below the level of the root logger", "a warning"} <= {line["message"] for line in lines(stream)}


def test_by_default_turns_and_waits_are_left_out_and_failures_are_warnings():
    stream = io.StringIO()
    with JsonLogs(stream) as logs:
        replay(logs, FakeClock())
    written = lines(stream)
    assert not {"TurnFinished", "EpisodeWaiting"} & {line["event"] for line in written}
    warnings = [line["event"] for line in written if line["level"] == "WARNING"]
    assert warnings == ["EpisodeEnded", "EpisodeRetried", "WeightUpdateFailed"]


def test_a_path_is_appended_to_and_the_root_logger_is_as_before_afterwards(tmp_path):
    root = logging.getLogger()
    before = (root.level, list(root.handlers))
    for word in ("first", "second"):
        with JsonLogs(tmp_path / "run.jsonl"):
            log.info(word)
    log.info("third")
    text = (tmp_path / "run.jsonl").read_text("utf-8")
    assert [json.loads(line)["message"] for line in text.splitlines()] == ["first", "second"]
    assert (root.level, root.handlers) == before


def test_the_time_is_utc_with_microseconds():
    assert datetime.fromisoformat(formatted(created=0.25)["time"]).timestamp() == 0.25
    assert formatted(created=0.25)["time"] == "1970-01-01T00:00:00.250000+00:00"


def test_an_exception_is_in_its_line_with_the_traceback():
    stream = io.StringIO()
    with JsonLogs(stream):
        try:
            raise ValueError("boom")
        except ValueError:
            log.exception("step failed")
    (line,) = lines(stream)
    assert (line["message"], line["level"], line["logger"]) == ("step failed", "ERROR", "an_environment")
    assert line["exception"].endswith("ValueError: boom")


class Unprintable:
    def __repr__(self):
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (np.float32(0.5), 0.5),
        (np.arange(3), [0, 1, 2]),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        ({1: (2, None)}, {"1": [2, None]}),
        (b"bytes", "b'bytes'"),
        (Unprintable(), "a Unprintable"),
    ],
    ids=["numpy scalar", "array", "nan", "infinity", "mapping", "bytes", "no repr"],
)
def test_an_extra_value_without_a_type_in_json_is_text(value, written):
    assert formatted(state=value)["state"] == written


@given(st.text(st.characters(exclude_categories=())), st.text(st.characters(exclude_categories=()), min_size=1))
def test_any_text_is_one_line_of_json_that_utf_8_can_encode(message, value):
    record = logging.makeLogRecord({"msg": "%s", "args": (message,), "state": value})
    line = JsonLinesFormatter().format(record)
    line.encode("utf-8")
    assert len(line.split("\n")) == 1
    read = json.loads(line)
    # Surrogate pairs are one character once they are read.
    assert read["message"].encode("utf-16", "surrogatepass") == message.encode("utf-16", "surrogatepass")
    assert read["state"].encode("utf-16", "surrogatepass") == value.encode("utf-16", "surrogatepass")
