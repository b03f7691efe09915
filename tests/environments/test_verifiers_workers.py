"""verifiers environments in a `Runner`. Needs verifiers 0.4: python tests/dropin/verifiers_environment.py"""

import asyncio
import itertools

import pytest
from scripted_chat import ScriptedChat

from rollouts import SamplingParams
from rollouts.episodes.deadlines import UpdatePauses
from rollouts.episodes.limits import EpisodeLimits
from rollouts.errors import ArgumentError, ServerError
from rollouts.rewards import GroupReward
from rollouts.runner import RetryPolicy, Runner, Task
from rollouts.runner.events import EpisodeEnded, EpisodeRetried, TurnFinished
from rollouts.runner.journal import Journal
from rollouts.testing import ScriptedEngine

vf = pytest.importorskip("verifiers.v1")

from colours_v1 import ColoursTaskset  # noqa: E402
from test_verifiers import load_env  # noqa: E402

from rollouts.environments.verifiers import VerifiersTasks, VerifiersWorkers  # noqa: E402

AT_ONCE = RetryPolicy(first_delay=0, max_delay=0)


def run(env, engine, renderer, *, tasks=None, count=None, slots=16, **options):
    """The groups of a runner, in order of their tasks; `count` of them where it is given."""
    options = {"retry": AT_ONCE, "sampling": SamplingParams(max_tokens=64), **options}

    async def collect():
        async with (
            VerifiersWorkers(env, engine, renderer, slots=slots) as workers,
            Runner(None, None, None, workers=workers, **options) as runner,
        ):
            groups = []
            async for group in runner.stream(VerifiersTasks(env) if tasks is None else tasks):
                groups.append(group)
                if len(groups) == count:
                    await runner.acknowledge(group)
                    break
            return sorted(groups, key=lambda group: group.task.task_id)

    return asyncio.run(collect())


def one_episode(env, engine, renderer, **options):
    (group,) = run(env, engine, renderer, tasks=itertools.islice(VerifiersTasks(env), 1), **options)
    (episode,) = group.episodes
    return episode


def red(renderer):
    return ScriptedEngine(lambda request: "red", renderer=renderer)


def test_each_task_has_a_group_with_the_rewards_of_verifiers(renderer):
    ranked = GroupReward("rank", 1.0, lambda episodes: [float(index) for index, _ in enumerate(episodes)])
    engine = red(renderer)
    groups = run(load_env(), engine, renderer, group_size=2, group_rewards=[ranked], seed=3)
    assert [group.task for group in groups] == [Task(str(index), {"index": index}, index) for index in range(4)]
    for group in groups:
        named = group.reward_parts["named"]
        assert named.tolist() == [pytest.approx(1 / 3)] * 2  # one of the three colours is red
        assert group.rewards.tolist() == [pytest.approx(2 / 3), pytest.approx(5 / 3)]
        index = group.task.seed
        assert [episode.episode_id for episode in group.episodes] == [f"{index}/0.0", f"{index}/1.0"]
        assert {(episode.seed, episode.group_id, episode.num_turns) for episode in group.episodes} == {
            (index, str(index), 3)
        }
        assert {episode.turns[-1].info["task"]["index"] for episode in group.episodes} == {index}
        assert all(episode.done and episode.finished for episode in group.episodes)
    seeds = [request.sampling.seed for request in engine.requests]
    assert len(set(seeds)) == len(seeds) == 24


def test_tasks_are_loaded_once_for_an_environment_and_only_those_that_are_needed():
    env = load_env()
    ColoursTaskset.loads = 0
    assert [task.seed for task in VerifiersTasks(env)] == [0, 1, 2, 3]
    assert VerifiersTasks(env).verifiers_task(2).data.idx == 2
    with pytest.raises(ArgumentError, match="seed is 9; pass the index of a task"):
        VerifiersTasks(env).verifiers_task(9)
    assert ColoursTaskset.loads == 1
    env.taskset = env.taskset.take(2)
    assert [task.seed for task in VerifiersTasks(env)] == [0, 1]

    class Endless(type(env.taskset)):
        INFINITE = True

        def load(self):
            for number in itertools.count():
                assert number < 3, "loaded more than was asked for"
                yield next(iter(super().load()))

    env.taskset = Endless(env.taskset.config)
    assert [task.task_id for task in itertools.islice(VerifiersTasks(env), 3)] == ["0", "1", "2"]


def test_a_runner_with_a_journal_goes_on_where_another_stopped(renderer, tmp_path):
    env = load_env()
    first = red(renderer)
    delivered = run(env, first, renderer, count=1, slots=1, group_size=2, journal=Journal.open(tmp_path))
    second = red(renderer)
    rest = run(env, second, renderer, group_size=2, journal=Journal.open(tmp_path))
    tasks = [group.task.task_id for group in [*delivered, *rest]]
    assert sorted(tasks) == ["0", "1", "2", "3"]
    assert len(second.requests) < 4 * 2 * 3


def test_an_episode_is_repeated_when_its_engine_fails(renderer, caplog):
    script = ["red", ConnectionError("the server went away"), "red", "green", "blue"]
    engine, events = ScriptedEngine(script, renderer=renderer), []
    episode = one_episode(load_env(), engine, renderer, listeners=[events.append])
    assert (episode.error, episode.num_turns, episode.episode_id) == ("", 3, "0/0.1")
    assert "model call failed" in caplog.text  # verifiers' own warning, of failures alone
    (repeated,) = [event for event in events if isinstance(event, EpisodeRetried)]
    assert "the server went away" in repeated.error
    assert len([event for event in events if isinstance(event, TurnFinished)]) == 4


def test_an_episode_that_fails_for_good_has_its_turns_and_the_error(renderer):
    engine = ScriptedEngine(["red", ServerError("r", "refused", status=400, body="no such model")], renderer=renderer)
    events = []
    episode = one_episode(load_env(), engine, renderer, listeners=[events.append])
    assert episode.num_turns == 1
    assert "no such model" in episode.error
    assert [event.outcome for event in events if isinstance(event, EpisodeEnded)] == ["failed"]


@pytest.mark.parametrize(("kinds", "attempts"), [(["engine"], 1), (["engine", "environment"], 3)])
def test_what_a_task_raises_is_an_error_of_the_environment(renderer, kinds, attempts, caplog):
    retry = RetryPolicy(kinds=kinds, first_delay=0, max_delay=0)
    env = load_env({"unscorable": True})
    (group,) = run(env, red(renderer), renderer, tasks=itertools.islice(VerifiersTasks(env), 1), retry=retry)
    assert group.attempts == (attempts,)
    (episode,) = group.episodes
    assert episode.num_turns == 3
    assert episode.error.startswith("TaskError: ")
    assert "there is no such colour" in episode.error
    assert "raise LookupError" in caplog.text  # the line of the task, of the traceback


@pytest.mark.parametrize(
    ("limits", "turns", "named"),
    [
        ({"max_turns": 2}, 2, "max_turns: "),
        ({"max_images": 1}, 1, "max_images: the prompt of turn 1 has 2 images"),
        ({"max_media_bytes": 1}, 0, "max_media_bytes: "),
        ({"max_tokens": 100}, 1, "max_tokens: the prompt of turn 1"),
    ],
)
def test_an_episode_that_reaches_a_limit_is_scored_as_it_is(renderer, limits, turns, named, caplog):
    episode = one_episode(load_env(), red(renderer), renderer, limits=EpisodeLimits(**limits))
    assert (episode.truncated, episode.done, episode.error) == (True, False, "")
    assert episode.truncation_reason.startswith(named)
    assert episode.num_turns == turns
    assert episode.reward == pytest.approx(2 / 3 if turns else 0)  # the first colour is red
    assert "model call failed" not in caplog.text


@pytest.mark.parametrize("limit", ["turn_seconds", "episode_seconds"])
def test_an_episode_whose_time_passes_is_truncated_with_its_turns(renderer, limit):
    async def waits(request):
        await asyncio.Event().wait()

    engine = ScriptedEngine(["red", waits], renderer=renderer)
    episode = one_episode(load_env(), engine, renderer, limits=EpisodeLimits(**{limit: 2.0}))
    assert (episode.truncated, episode.error, episode.num_turns) == (True, "", 1)
    assert episode.truncation_reason == f"{limit}: 2 s passed in turn 1, which waited for engine"


def test_the_agents_of_an_episode_are_in_one_trajectory(renderer):
    env = vf.load_environment(vf.resolve_env_config({"taskset": {"id": "two-colours-v1"}}))
    episode = one_episode(env, red(renderer), renderer)
    assert [turn.agent for turn in episode.turns] == ["first", "second"]
    assert [node.parent for node in episode.nodes] == [-1, 0, -1, 2]
    prompt = renderer.tokenizer.decode(episode.token_ids(episode.turns[1].node).tolist())
    assert prompt.count("Name the colour.") == 1
    assert episode.reward == pytest.approx(2 * 2 / 3)  # the rewards of both
    assert episode.metrics == {"first/answers": 1.0, "second/answers": 1.0}
    assert episode.done


def test_an_environment_that_runs_no_agent_fails(renderer):
    env = load_env()

    class Idle(type(env)):
        async def run(self, task, agents):
            pass

    episode = one_episode(Idle(env.config), red(renderer), renderer)
    assert "no agent" in episode.error


def test_a_chat_endpoint_plays_without_a_renderer():
    endpoint = ScriptedChat("red", "green", "blue")
    episode = one_episode(load_env(), endpoint, None)
    assert episode.reward == pytest.approx(2.0)
    assert not episode.has_tokens
    assert episode.metrics == {"answers": 3.0, "endpoint_prompt_tokens": 120, "endpoint_completion_tokens": 9}
    assert [len(call["messages"]) for call in endpoint.calls] == [2, 4, 6]
    (leaf,) = episode.leaves()
    assert [message["role"] for message in episode.to_messages(leaf)] == ["system", *["user", "assistant"] * 3]
    assert len({call["seed"] for call in endpoint.calls}) == 3


def test_the_time_of_an_update_of_the_weights_does_not_count(renderer):
    ends = []

    async def updates(request):
        (deadlines,) = UpdatePauses.of(engine).requesting
        for in_flight in (None, "keep", None):
            workers.set_update(in_flight)
            ends.append(deadlines.scope.when())
        return "red"

    engine = ScriptedEngine(updates, renderer=renderer)
    env = load_env()

    async def collect():
        nonlocal workers
        limits, sampling = EpisodeLimits(turn_seconds=600), SamplingParams(max_tokens=64)
        async with (
            VerifiersWorkers(env, engine, renderer) as workers,
            Runner(None, engine, None, workers=workers, sampling=sampling, limits=limits) as runner,
        ):
            return await anext(runner.stream(itertools.islice(VerifiersTasks(env), 1)))

    workers = None
    (episode,) = asyncio.run(collect()).episodes
    assert episode.num_turns == 3
    assert [end is None for end in ends] == [False, True, False] * 3


@pytest.mark.parametrize(
    ("arguments", "named"),
    [({"engine": None}, "engine is None"), ({"renderer": None}, "renderer is None"), ({"slots": 0}, "slots is 0")],
)
def test_arguments_that_cannot_work_are_named(renderer, arguments, named):
    async def enter():
        given = {"engine": red(renderer), "renderer": renderer, **arguments}
        async with VerifiersWorkers(load_env(), **given):
            pass

    with pytest.raises(ArgumentError, match=named):
        asyncio.run(enter())
