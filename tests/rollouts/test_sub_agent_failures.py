"""Child episodes and generated turns that fail, are cancelled, or reach a limit."""

import asyncio

import pytest
from sub_agents import Delegating, Echo, RecordingEngine, last_user_text, play, user

from rollouts import SamplingParams, run_episode
from rollouts.episodes.errors import EnvironmentFailedError, EpisodeError, EpisodeLimitError
from rollouts.errors import ArgumentError, ContextLengthError, TrajectoryFinishedError


@pytest.fixture
def engine(renderer):
    return RecordingEngine(lambda request: f"re {last_user_text(renderer, request)}", renderer=renderer)


def agents(trajectory):
    return [turn.agent for turn in trajectory.turns]


def test_a_child_that_fails_is_caught_by_its_parent_and_its_turns_stay(renderer, engine):
    class Breaking(Echo):
        def step(self, assistant):
            if self.step_number == 1:
                raise KeyError("maze")
            return super().step(assistant)

    async def work(context, assistant):
        try:
            await context.run_child(Breaking("sub", turns=5), agent="solver", max_turns=5)
        except EnvironmentFailedError as error:
            return str(error)

    environment = Delegating(work)
    trajectory = play(environment, engine, renderer)
    assert "Breaking.step raised KeyError: 'maze'" in environment.result
    assert trajectory.done
    assert agents(trajectory) == ["", "solver", "solver"]

    async def careless(context, assistant):
        await context.run_child(Breaking("sub", turns=5), agent="solver", max_turns=5)

    with pytest.raises(EpisodeError, match=r"Delegating\.step raised .*Breaking\.step raised KeyError") as caught:
        play(Delegating(careless), engine, renderer)
    assert agents(caught.value.trajectory) == ["", "solver", "solver"]


def test_a_child_that_still_runs_when_the_episode_ends_is_cancelled(renderer):
    started, never = asyncio.Event(), asyncio.Event()

    async def completion(request):
        if last_user_text(renderer, request).startswith("sub"):
            started.set()
            await never.wait()
        return "ok"

    engine = RecordingEngine(completion, renderer=renderer)
    left = []

    async def work(context, assistant):
        left.append(asyncio.create_task(context.run_child(Echo("sub"), agent="solver", max_turns=2)))
        await started.wait()

    trajectory = play(Delegating(work), engine, renderer)
    assert trajectory.done
    assert left[0].cancelled()
    assert engine.cancelled == 1
    assert agents(trajectory) == [""]


async def test_after_its_episode_a_context_generates_nothing(renderer, engine):
    async def work(context, assistant):
        pass

    environment = Delegating(work)
    options = {"sampling": SamplingParams(), "max_turns": 9}
    await run_episode(environment, engine=engine, renderer=renderer, **options)
    with pytest.raises(TrajectoryFinishedError):
        await environment.context.generate_turn([user("late")], agent="critic")
    assert len(engine.requests) == 1


def test_children_at_the_same_time_do_not_exceed_the_limit(renderer, engine):
    async def work(context, assistant):
        children = (context.run_child(Echo(f"s{n}", turns=9), agent=f"s{n}", max_turns=9) for n in range(4))
        return await asyncio.gather(*children)

    environment = Delegating(work)
    trajectory = play(environment, engine, renderer, max_turns=7)
    assert trajectory.num_turns == len(engine.requests) == 7
    assert all(child.truncated for child in environment.result)


def test_a_child_that_reaches_its_own_limit_is_truncated_and_the_episode_goes_on(renderer, engine):
    async def work(context, assistant):
        return await context.run_child(Echo("sub", turns=9), agent="solver", max_turns=2)

    environment = Delegating(work)
    trajectory = play(environment, engine, renderer)
    assert environment.result.truncation_reason == "max_turns: the environment was not done after 2 turns"
    assert (trajectory.done, trajectory.truncated, trajectory.num_turns) == (True, False, 3)


def test_a_generated_turn_beyond_the_limit_ends_the_episode_truncated_where_nobody_catches_its_error(renderer, engine):
    async def work(context, assistant):
        for _ in range(9):
            await context.generate_turn([user("more")], agent="critic")

    trajectory = play(Delegating(work), engine, renderer, max_turns=3)
    assert (trajectory.done, trajectory.truncated, trajectory.num_turns, trajectory.error) == (False, True, 3, "")
    assert trajectory.truncation_reason.startswith("max_turns: ")

    async def careful(context, assistant):
        with pytest.raises(EpisodeLimitError):
            await work(context, assistant)

    trajectory = play(Delegating(careful), engine, renderer, max_turns=3)
    assert (trajectory.done, trajectory.truncated, trajectory.num_turns) == (True, False, 3)


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda context: context.generate_turn([user("x")], agent=""), "agent"),
        (lambda context: context.generate_turn([user("x")], agent="c", sampling=SamplingParams(n=2)), "sampling.n"),
        (lambda context: context.generate_turn([], agent="c"), "messages"),
        (lambda context: context.run_child(Echo("sub"), agent="s", max_turns=0), "max_turns"),
        (lambda context: context.run_child(Echo("sub"), agent="s", max_turns=1, seed="x"), "seed"),
        (lambda context: context.run_child(Echo, agent="s", max_turns=1), "environment"),
    ],
    ids=["no agent", "n", "no messages", "max_turns", "seed", "a class"],
)
def test_wrong_arguments_are_refused_by_name_before_anything_is_sampled(renderer, engine, call, argument):
    async def work(context, assistant):
        with pytest.raises(ArgumentError) as caught:
            await call(context)
        return caught.value.name

    environment = Delegating(work)
    play(environment, engine, renderer)
    assert environment.result == argument
    assert len(engine.requests) == 1


async def reward(context, turn):
    context.record_reward(turn, 9.0)


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda context, foreign: context.generate_turn([user("x")], agent="c", after=foreign), "after"),
        (reward, "turn"),
    ],
    ids=["after", "record_reward"],
)
def test_a_turn_of_another_episode_is_refused(renderer, engine, call, argument):
    async def other(context, assistant):
        return await context.generate_turn([user("of the other")], agent="c")

    async def work(context, assistant):
        await context.generate_turn([user("own")], agent="c")
        with pytest.raises(ArgumentError, match="it belongs to another episode, 'first'; pass a turn") as caught:
            await call(context, environment.result)
        return caught.value.name

    environment = Delegating(other)
    play(environment, engine, renderer, episode_id="first")
    refusing = Delegating(work)
    trajectory = play(refusing, engine, renderer, episode_id="second")
    assert refusing.result == argument
    assert [turn.reward for turn in trajectory.turns] == [100.0, 0.0]
    assert len(engine.requests) == 4


def test_an_attach_that_raises_is_named(renderer, engine):
    class Refusing(Echo):
        def attach(self, context):
            raise ValueError("no")

    with pytest.raises(EpisodeError, match=r"Refusing\.attach raised ValueError: no"):
        play(Refusing("x"), engine, renderer)


def test_limits_that_several_children_reach_at_once_truncate_the_episode(renderer, engine):
    async def work(context, assistant):
        async with asyncio.TaskGroup() as group:
            for number in range(3):
                group.create_task(context.generate_turn([user(f"{number}")], agent="critic"))

    trajectory = play(Delegating(work), engine, renderer, max_turns=2)
    assert (trajectory.truncated, trajectory.error) == (True, "")


def test_a_prompt_that_is_too_long_for_the_model_truncates_the_child_or_the_episode(renderer):
    overlong = ContextLengthError("r", 9000, 8192)

    async def child(context, assistant):
        return await context.run_child(Echo("sub"), agent="solver", max_turns=2)

    environment = Delegating(child)
    trajectory = play(environment, RecordingEngine(["a", "b", overlong], renderer=renderer), renderer)
    assert (trajectory.done, environment.result.turns, environment.result.truncated) == (True, (1,), True)
    assert "9000 tokens" in environment.result.truncation_reason

    async def turn(context, assistant):
        await context.generate_turn([user("x")], agent="critic")

    trajectory = play(Delegating(turn), RecordingEngine(["a", overlong], renderer=renderer), renderer)
    assert (trajectory.done, trajectory.truncated, trajectory.error) == (False, True, "")
    assert "9000 tokens" in trajectory.truncation_reason
