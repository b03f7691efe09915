"""An episode that reaches a limit ends truncated, with the reason and its completed turns, and is no failure."""

import asyncio

import pytest
from images import png
from runner_world import Counting, HeldEngine, advance_clock, make_runner, run_groups, tasks

from rollouts import SamplingParams, StepResult
from rollouts.errors import ContextLengthError
from rollouts.runner import Asynchronous, EpisodeLimits
from rollouts.runner.events import EpisodeEnded
from rollouts.testing import ScriptedEngine

RED, BLUE = png("red"), png("blue")


class Showing(Counting):
    """Shows a red image in every turn but the third, which has a blue one."""

    turns = 10

    def _message(self):
        image = BLUE if self.taken == 2 else RED
        return {"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "?"}]}

    def reset(self, seed):
        return [self._message()]

    def step(self, assistant):
        self.taken += 1
        return StepResult([self._message()], reward=1.0, done=self.taken == self.turns)


class Endless(Counting):
    turns = 10**9


@pytest.mark.parametrize(
    ("limits", "turns", "reason"),
    [
        ({"max_turns": 3}, 3, "max_turns: the environment was not done after 3 turns"),
        ({"max_images": 2}, 2, "max_images: the prompt of turn 2 has 3 images, videos and sounds, the limit is 2"),
        ({"max_images": 0}, 0, "max_images: the prompt of turn 0 has 1 images, videos and sounds, the limit is 0"),
        ({"max_media_bytes": len(RED)}, 2, f"max_media_bytes: the prompt of turn 2 has {len(RED) + len(BLUE)} bytes"),
        ({"max_media_bytes": len(RED) + len(BLUE), "max_turns": 9}, 9, "max_turns"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else None,
)
def test_a_limit_on_an_amount_ends_the_episode_truncated_with_its_turns(renderer, limits, turns, reason):
    groups, runner = run_groups(renderer, tasks(1), Showing, limits=EpisodeLimits(**limits))
    (episode,) = groups["t0"].episodes
    assert episode.truncated
    assert not episode.error
    assert not episode.done
    assert episode.num_turns == turns == episode.reward
    assert episode.truncation_reason.startswith(reason)
    assert runner.metrics()["episodes_ended/truncated"] == 1


def test_no_prompt_with_its_completion_is_longer_than_the_limit_on_tokens(renderer):
    engine = ScriptedEngine(lambda request: [65] * 1000, renderer=renderer)
    limits = EpisodeLimits(max_tokens=200)
    groups, _ = run_groups(
        renderer, tasks(1), Endless, engine=engine, limits=limits, sampling=SamplingParams(max_tokens=60)
    )
    (episode,) = groups["t0"].episodes
    lengths = [len(episode.token_ids(turn.node)) for turn in episode.turns]
    assert lengths[-1] == 200, "the last completion uses what is left"
    assert len(engine.requests[-1].prompt_ids) + engine.requests[-1].sampling.max_tokens == 200
    assert [request.sampling.max_tokens for request in engine.requests[:-1]] == [60] * (len(engine.requests) - 1)
    assert episode.truncation_reason.startswith("max_tokens: the prompt of turn")


@pytest.mark.parametrize("turns", [0, 2])
def test_a_prompt_that_does_not_fit_into_the_model_ends_the_episode_truncated(renderer, turns):
    def script(request):
        if request.request_id.endswith(f"-{turns}"):
            raise ContextLengthError(request.request_id, 5000, 4096)
        return "yes"

    engine = ScriptedEngine(script, renderer=renderer)
    groups, _ = run_groups(renderer, tasks(1), Endless, engine=engine)
    (episode,) = groups["t0"].episodes
    assert (episode.num_turns, episode.truncated, episode.error) == (turns, True, "")
    assert episode.truncation_reason.startswith("overlong prompt: ")
    assert "5000 tokens" in episode.truncation_reason


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("turn_seconds", "environment.make"),
        ("turn_seconds", "environment.reset"),
        ("turn_seconds", "engine"),
        ("turn_seconds", "context of the engine"),
        ("episode_seconds", "environment.step"),
        ("episode_seconds", "engine"),
    ],
)
async def test_a_deadline_cancels_what_the_episode_waits_for_and_names_it(renderer, name, part):
    stopped = asyncio.Event()

    async def stop(at):
        if at == part:
            stopped.set()
            await asyncio.Event().wait()

    class Environment(Counting):
        async def reset(self, seed):
            await stop("environment.reset")
            return super().reset(seed)

        async def step(self, assistant):
            await stop("environment.step")
            return super().step(assistant)

    async def make(task):
        await stop("environment.make")
        return Environment(task)

    class AskedEngine(HeldEngine):
        async def context_length(self):
            await stop("context of the engine")

    engine = AskedEngine(renderer)
    if part != "engine":
        engine.release.set()
    ended = []
    options = {"limits": EpisodeLimits(**{name: 10.0}), "listeners": [ended.append]}
    async with make_runner(renderer, make, engine, **options) as runner:
        receiving = asyncio.ensure_future(anext(runner.stream(tasks(1))))
        await (engine.wait_for_in_flight(1) if part == "engine" else stopped.wait())
        advance_clock(10.0)
        group = await receiving
    assert len(engine.cancelled) == (part == "engine")
    assert [event.outcome for event in ended if isinstance(event, EpisodeEnded)] == ["truncated"]
    episode = group.episodes[0]
    assert episode.truncated
    assert not episode.error
    assert episode.truncation_reason == f"{name}: 10 s passed in turn 0, which waited for {part.split()[-1]}"
    assert episode.num_turns == (part == "environment.step")


def test_the_time_of_a_turn_begins_again_with_each_turn(renderer):
    class Sleeping(Counting):
        turns = 8

        async def step(self, assistant):
            advance_clock(5.0)
            await asyncio.sleep(0)
            return super().step(assistant)

    groups, _ = run_groups(renderer, tasks(1), Sleeping, limits=EpisodeLimits(turn_seconds=20.0))
    assert groups["t0"].episodes[0].done

    limits = EpisodeLimits(turn_seconds=20.0, episode_seconds=20.0)
    (episode,) = run_groups(renderer, tasks(1), Sleeping, limits=limits)[0]["t0"].episodes
    assert episode.truncation_reason.startswith("episode_seconds: 20 s passed")
    assert 1 <= episode.num_turns < 8


async def run_with_an_update_of_an_hour(renderer, in_flight, sent_before, *, by_another_runner=False):
    """The episode whose request is sent before or during an update; another hour passes on the clock of the loop."""
    engine = HeldEngine(renderer)
    options = {"limits": EpisodeLimits(turn_seconds=60, episode_seconds=120), "mode": Asynchronous(1)}
    async with (
        make_runner(renderer, Counting, engine, tasks=tasks(1), **options) as runner,
        make_runner(renderer, Counting, engine) as another,
    ):
        collecting = None
        if sent_before:
            collecting = asyncio.ensure_future(runner.collect(1))
            await engine.wait_for_in_flight(1)
        updater = another if by_another_runner else runner
        updating = asyncio.ensure_future(updater.update_weights(None, "1", in_flight))
        await engine.update_begun.wait()
        if not sent_before:
            collecting = asyncio.ensure_future(runner.collect(1))
            await engine.wait_for_in_flight(1)
        advance_clock(3600)
        for _ in range(20):
            await asyncio.sleep(0)
        engine.update_release.set()
        await updating
        engine.release.set()
        (group,) = await collecting
        return group.episodes[0]


@pytest.mark.parametrize("sent_before", [True, False])
def test_an_update_by_another_runner_of_the_engine_counts_for_no_limit_either(renderer, sent_before):
    run = run_with_an_update_of_an_hour(renderer, "abort", sent_before, by_another_runner=True)
    episode = asyncio.run(run)
    assert (episode.done, episode.truncation_reason, episode.num_turns) == (True, "", 2)


def test_a_request_that_runs_to_its_end_before_an_update_keeps_its_deadline(renderer):
    """Otherwise the update would wait for ever for a request that hangs."""
    episode = asyncio.run(run_with_an_update_of_an_hour(renderer, "wait", True))
    assert episode.truncation_reason == "turn_seconds: 60 s passed in turn 0, which waited for engine"
