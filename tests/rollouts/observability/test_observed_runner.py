"""The listeners in a real `Runner`, with a real renderer."""

import asyncio
import io
import json
import logging

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from rollouts import SamplingParams, StepResult, ThreadedEnvironment
from rollouts.observability import EpisodeSpans, JsonLogs, RendererStats, RunMetrics, WaitWatcher
from rollouts.runner import EpisodeLimits, RetryPolicy, Runner, Task
from rollouts.testing import ScriptedEngine

log = logging.getLogger("an_environment")


class LoggingEnvironment:
    """Two turns; logs its task and turn in each of them."""

    def __init__(self, task):
        self.task, self.turn = task, 0

    def reset(self, seed):
        return [{"role": "user", "content": f"Task {self.task.task_id}"}]

    def step(self, assistant):
        log.info("%s %d", self.task.task_id, self.turn)
        self.turn += 1
        return StepResult([{"role": "user", "content": "Again"}], reward=0.5, done=self.turn == 2)


def runner(renderer, engine, listeners, make_environment=None, **options):
    options = {"group_size": 2, "limits": EpisodeLimits(max_turns=4), "retry": RetryPolicy(max_attempts=1), **options}
    return Runner(
        make_environment or (lambda task: ThreadedEnvironment(LoggingEnvironment(task))),
        engine,
        renderer,
        sampling=SamplingParams(max_tokens=8),
        listeners=listeners,
        **options,
    )


def tasks(count):
    return [Task(f"task-{number}") for number in range(count)]


async def run(runner, tasks):
    async with runner:
        return [group async for group in runner.stream(tasks)]


async def test_metrics_of_events_are_those_that_the_runner_counts_itself(renderer):
    completions = iter(["yes"] * 7 + [TimeoutError("down")] + ["yes"] * 100)
    run_metrics = RunMetrics(sources=[RendererStats(renderer)])
    observed = runner(renderer, ScriptedEngine(lambda request: next(completions), renderer=renderer), [run_metrics])
    groups = await run(observed, tasks(5))
    values, counted = run_metrics.metrics(), observed.metrics()
    assert {key: values[key] for key in counted} == pytest.approx(counted)
    assert counted["episodes_started"] == 10
    assert counted["episodes_ended/failed"] == 1
    assert values["turns"] == sum(episode.num_turns for group in groups for episode in group.episodes)
    assert values["completion_tokens"] > 0
    assert values["total_reward_mean"] == pytest.approx(sum(group.rewards.sum() for group in groups) / 10)
    assert values["longest_wait_seconds"] == 0.0
    assert values["bridges"] >= 9


async def test_every_line_that_an_environment_logs_on_a_thread_names_its_episode(renderer):
    stream = io.StringIO()
    engine = ScriptedEngine(lambda request: "yes", renderer=renderer)
    with JsonLogs(stream) as logs:
        groups = await run(runner(renderer, engine, [logs]), tasks(5))
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    own = [line for line in lines if line["logger"] == "an_environment"]
    assert len(own) == 20
    for line in own:
        task_id, turn = line["message"].split()
        assert (line["task_id"], line["turn"]) == (task_id, int(turn))
    episodes = {episode.episode_id for group in groups for episode in group.episodes}
    assert {line["episode_id"] for line in own} == episodes
    ended = [line for line in lines if line.get("event") == "EpisodeEnded"]
    assert {line["episode_id"] for line in ended} == episodes
    assert all(line["episode_id"].startswith(f"{line['task_id']}/") for line in ended)


async def test_every_episode_is_a_trace_with_its_turns(renderer):
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    engine = ScriptedEngine(lambda request: "yes", renderer=renderer)
    await run(runner(renderer, engine, [EpisodeSpans(provider)]), tasks(3))
    spans = exporter.get_finished_spans()
    names = [span.name for span in spans]
    assert (names.count("episode"), names.count("turn")) == (6, 12)
    for turn in (span for span in spans if span.name == "turn"):
        inner = [span for span in spans if span.parent and span.parent.span_id == turn.context.span_id]
        inner.sort(key=lambda span: span.start_time)
        assert [span.name for span in inner] == ["renderer", "engine", "renderer", "environment.step"]
        assert turn.attributes["gen_ai.usage.output_tokens"] > 0
    assert len({span.context.trace_id for span in spans}) == 6


@pytest.mark.parametrize("stuck", ["environment.make", "environment.reset", "environment.step", "engine"])
async def test_a_stuck_episode_is_reported_with_what_it_waits_for(renderer, stuck):
    never, reached = asyncio.Event(), asyncio.Event()

    async def wait(part):
        if part == stuck:
            reached.set()
            await never.wait()

    class Environment:
        async def reset(self, seed):
            await wait("environment.reset")
            return [{"role": "user", "content": "?"}]

        async def step(self, assistant):
            await wait("environment.step")
            return StepResult(done=True)

    async def make_environment(task):
        await wait("environment.make")
        return Environment()

    async def complete(request):
        await wait("engine")
        return "yes"

    waits = WaitWatcher()
    engine = ScriptedEngine(complete, renderer=renderer)
    running = asyncio.ensure_future(run(runner(renderer, engine, [waits], make_environment, group_size=1), tasks(1)))
    await asyncio.wait_for(reached.wait(), 30)
    (wait_found,) = waits.report()
    assert (wait_found.waiting_for, wait_found.task_id, wait_found.turn) == (stuck, "task-0", 0)
    running.cancel()
    await asyncio.wait([running])
    assert waits.report() == []
