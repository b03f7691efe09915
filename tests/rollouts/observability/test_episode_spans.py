"""Episodes as spans of OpenTelemetry, read back from the SDK's exporter in memory."""

import asyncio
import io
import json
import logging
import re
import sys

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from run_events import FakeClock, replay

from renderers.installation import install_command
from rollouts import StepResult, ThreadedEnvironment
from rollouts.errors import MissingExtraError
from rollouts.observability import EpisodeSpans, JsonLogs
from rollouts.runner.events import EpisodeEnded, EpisodeStarted, EpisodeWaiting, TurnFinished


@pytest.fixture
def exporter():
    return InMemorySpanExporter()


@pytest.fixture
def provider(exporter):
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider


@pytest.fixture
def spans(provider):
    return EpisodeSpans(provider)


def children(exporter, span):
    found = [
        each for each in exporter.get_finished_spans() if each.parent and each.parent.span_id == span.context.span_id
    ]
    return sorted(found, key=lambda each: each.start_time)


def episode(exporter, episode_id):
    (span,) = [
        each
        for each in exporter.get_finished_spans()
        if each.name == "episode" and each.attributes["mmrollouts.episode.id"] == episode_id
    ]
    return span


async def replayed(spans):
    replay(spans, FakeClock())


async def test_an_episode_has_a_span_for_each_turn_and_in_it_what_the_turn_waited_for(spans, exporter):
    await asyncio.create_task(replayed(spans))
    done = episode(exporter, "t-0")
    names = [span.name for span in children(exporter, done)]
    assert names == ["environment.make", "environment.reset", "turn", "turn"]
    first, second = children(exporter, done)[2:]
    assert [span.name for span in children(exporter, first)] == ["renderer", "engine", "environment.step"]
    assert [span.name for span in children(exporter, second)] == ["renderer", "engine", "environment.step"]
    assert (first.attributes["mmrollouts.turn"], second.attributes["mmrollouts.turn"]) == (0, 1)
    assert first.attributes["gen_ai.usage.input_tokens"] == 100
    assert first.attributes["gen_ai.usage.output_tokens"] == 10
    assert (first.attributes["mmrollouts.images"], first.attributes["mmrollouts.sounds"]) == (1, 3)
    assert dict(done.attributes) == {
        "mmrollouts.episode.id": "t-0",
        "mmrollouts.task.id": "t",
        "mmrollouts.episode.index": 0,
        "mmrollouts.attempt": 0,
        "mmrollouts.outcome": "done",
        "mmrollouts.environment_reward": 1.0,
    }


async def test_each_attempt_is_a_trace_of_its_own_and_every_span_lies_within_its_parent(spans, exporter):
    await asyncio.create_task(replayed(spans))
    finished = exporter.get_finished_spans()
    by_id = {span.context.span_id: span for span in finished}
    roots = [span for span in finished if span.name == "episode"]
    assert len({span.context.trace_id for span in roots}) == 3
    for span in finished:
        assert span.start_time <= span.end_time
        if span.parent is not None:
            parent = by_id[span.parent.span_id]
            assert parent.context.trace_id == span.context.trace_id
            assert parent.start_time <= span.start_time
            assert span.end_time <= parent.end_time


async def test_a_failed_attempt_has_the_error_on_all_that_it_interrupted(spans, exporter):
    await asyncio.create_task(replayed(spans))
    failed = episode(exporter, "t-1")
    (turn,) = children(exporter, failed)
    (engine,) = children(exporter, turn)
    for span in (failed, turn, engine):
        assert span.status.status_code is StatusCode.ERROR
        assert span.status.description == "ServerTimeoutError: request t-1-0: no answer"
    assert episode(exporter, "t-0").status.status_code is StatusCode.UNSET


async def test_a_failed_step_and_its_turn_have_the_error_of_the_episode(spans, exporter):
    async def failing():
        spans(EpisodeStarted("e", "t", 0, 0))
        for part in ("engine", "environment.step"):
            spans(EpisodeWaiting("e", 0, part))
        spans(TurnFinished("e", 0, 7, 1, 0, 0.0, 0.0, 0.0, failed=True))
        spans(EpisodeEnded("e", "failed", 0.0, "KeyError: odd", 0.0))

    await asyncio.create_task(failing())
    failed = episode(exporter, "e")
    (turn,) = children(exporter, failed)
    (step,) = [span for span in children(exporter, turn) if span.name == "environment.step"]
    assert [span.status.description for span in (failed, turn, step)] == ["KeyError: odd"] * 3
    assert turn.attributes["gen_ai.usage.input_tokens"] == 7


async def test_the_wait_for_another_score_is_in_the_episode_and_not_in_a_turn(spans, exporter):
    async def scored_again():
        spans(EpisodeStarted("e", "t", 0, 0))
        spans(EpisodeWaiting("e", 0, "engine"))
        spans(TurnFinished("e", 0, 100, 10, 0, 0.1, 0.1, 0.1))
        spans(EpisodeWaiting("e", 1, "retry"))
        spans(EpisodeEnded("e", "done", 1.0, "", 1.0))

    await asyncio.create_task(scored_again())
    assert [span.name for span in children(exporter, episode(exporter, "e"))] == ["turn", "retry"]


async def test_weight_updates_are_spans_with_their_duration(spans, exporter):
    await asyncio.create_task(replayed(spans))
    done, failed = [span for span in exporter.get_finished_spans() if span.name == "weight_update"]
    assert done.end_time - done.start_time == 500_000_000
    assert done.attributes["mmrollouts.weight_version"] == "1"
    assert failed.status.description == "WeightUpdateError: no such directory"


async def test_spans_of_an_environment_on_a_thread_are_children_of_its_step(spans, exporter, provider):
    tracer = provider.get_tracer("an environment")

    class Environment:
        def reset(self, seed):
            return []

        def step(self, assistant):
            with tracer.start_as_current_span("look up"):
                return StepResult(done=True)

    async def play(number):
        spans(EpisodeStarted(f"e{number}", "t", number, 0))
        spans(EpisodeWaiting(f"e{number}", 0, "environment.step"))
        await ThreadedEnvironment(Environment()).step({})
        spans(TurnFinished(f"e{number}", 0, 1, 1, 0, 0.0, 0.0, 0.0))
        spans(EpisodeEnded(f"e{number}", "done", 1.0, "", 0.0))
        assert not trace.get_current_span().get_span_context().is_valid

    await asyncio.gather(*(asyncio.create_task(play(number)) for number in range(10)))
    for number in range(10):
        (turn,) = children(exporter, episode(exporter, f"e{number}"))
        (step,) = children(exporter, turn)
        (own,) = children(exporter, step)
        assert (step.name, own.name) == ("environment.step", "look up")


async def test_turns_of_a_child_episode_are_in_the_step_that_ran_it(spans, exporter):
    spans(EpisodeStarted("e", "t", 0, 0))
    for waiting_for in ("environment.make", "environment.reset", "engine", "environment.step"):
        spans(EpisodeWaiting("e", 0, waiting_for))

    async def child(turn):
        spans(EpisodeWaiting("e", turn, "environment.reset"))
        spans(EpisodeWaiting("e", turn, "engine"))
        await asyncio.sleep(0)
        spans(EpisodeWaiting("e", turn, "environment.step"))
        spans(TurnFinished("e", turn, 1, 1, 0, 0.0, 0.0, 0.0))

    await asyncio.gather(*(asyncio.create_task(child(turn)) for turn in (1, 2, 3)))
    spans(EpisodeWaiting("e", 0, "environment.step"))  # again
    spans(TurnFinished("e", 0, 7, 1, 0, 0.0, 0.0, 0.0))
    spans(EpisodeWaiting("e", 4, "engine"))
    spans(EpisodeEnded("e", "truncated", 0.0, "", 0.0))

    root = episode(exporter, "e")
    assert [span.name for span in children(exporter, root)] == ["environment.make", "environment.reset", "turn", "turn"]
    first, last = children(exporter, root)[2:]
    assert (first.attributes["gen_ai.usage.input_tokens"], last.attributes["mmrollouts.turn"]) == (7, 4)
    engine, step = children(exporter, first)
    assert (engine.name, step.name) == ("engine", "environment.step")
    turns = [span for span in children(exporter, step) if span.name == "turn"]
    assert sorted(span.attributes["mmrollouts.turn"] for span in turns) == [1, 2, 3]
    for turn in turns:
        assert [span.name for span in children(exporter, turn)] == ["engine", "environment.step"]


async def test_an_episode_links_to_the_span_in_which_it_starts_and_leaves_it_current(spans, exporter, provider):
    with provider.get_tracer("a trainer").start_as_current_span("step 7") as step:
        spans(EpisodeStarted("e", "t", 0, 0))
        spans(EpisodeWaiting("e", 0, "engine"))
        spans(EpisodeEnded("e", "cancelled", 0.0, "", 0.0))
        assert trace.get_current_span() is step
    (link,) = episode(exporter, "e").links
    assert link.context == step.get_span_context()


async def test_a_log_line_has_the_ids_of_its_span(spans, exporter):
    stream = io.StringIO()

    async def play(logs):
        for listener in (spans, logs):
            listener(EpisodeStarted("e", "t", 0, 0))
            listener(EpisodeWaiting("e", 0, "environment.step"))
        logging.getLogger("an_environment").info("looking")
        spans(EpisodeEnded("e", "done", 0.0, "", 0.0))

    with JsonLogs(stream) as logs:
        await asyncio.create_task(play(logs))
    (line,) = [each for each in map(json.loads, stream.getvalue().splitlines()) if each["message"] == "looking"]
    (turn,) = children(exporter, episode(exporter, "e"))
    (step,) = children(exporter, turn)
    assert (line["trace_id"], line["span_id"]) == (f"{step.context.trace_id:032x}", f"{step.context.span_id:016x}")


async def test_events_of_unknown_episodes_make_no_span(spans, exporter):
    spans(EpisodeWaiting("unknown", 0, "engine"))
    spans(TurnFinished("unknown", 0, 1, 1, 0, 0.0, 0.0, 0.0))
    spans(EpisodeEnded("unknown", "done", 0.0, "", 0.0))
    assert exporter.get_finished_spans() == ()


async def test_nothing_of_an_ended_episode_is_kept(spans):
    await asyncio.create_task(replayed(spans))
    assert spans._running == {}


def test_without_the_package_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(MissingExtraError, match=re.escape(install_command("opentelemetry"))):
        EpisodeSpans()
