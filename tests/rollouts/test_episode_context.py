"""Further turns and child episodes of an environment: one tree, exactly as the engine saw it."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sub_agents import Delegating, Echo, Nested, RecordingEngine, last_user_text, play, rows_of_turns, user

from rollouts import StepResult, ThreadedEnvironment


@pytest.fixture
def engine(renderer):
    return RecordingEngine(lambda request: f"re {last_user_text(renderer, request)}", renderer=renderer)


def agents(trajectory):
    return [turn.agent for turn in trajectory.turns]


def test_a_generated_turn_is_in_the_tree_with_its_agent_and_its_reward(renderer, engine):
    async def work(context, assistant):
        turn = await context.generate_turn([user(f"judge {assistant['content']}")], agent="critic")
        context.record_reward(turn, 0.5, {"verdict": turn.message["content"]})

    trajectory = play(Delegating(work), engine, renderer)
    assert agents(trajectory) == ["", "critic"]
    assert [turn.reward for turn in trajectory.turns] == [100.0, 0.5]
    assert trajectory.turns[1].info == {"verdict": "re judge re delegate"}
    assert rows_of_turns(trajectory) == engine.rows
    assert trajectory.forks == 0
    assert len(trajectory.leaves()) == 2


def test_tools_of_a_generated_turn_are_in_its_prompt(renderer, engine):
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}

    async def work(context, assistant):
        turn = await context.generate_turn([user("use")], agent="critic", tools=[tool])
        await context.generate_turn([user("again")], agent="critic", after=turn)

    play(Delegating(work), engine, renderer)
    texts = [renderer.tokenizer.decode(list(request.prompt_ids)) for request in engine.requests]
    assert ["look" in text for text in texts] == [False, True, True]


def test_a_child_episode_has_its_turns_and_rewards_in_the_tree_of_its_parent(renderer, engine):
    async def work(context, assistant):
        return await context.run_child(Echo("sub", turns=3, base=10.0), agent="solver", max_turns=5)

    environment = Delegating(work)
    trajectory = play(environment, engine, renderer)
    child = environment.result
    assert agents(trajectory) == ["", "solver", "solver", "solver"]
    assert [turn.reward for turn in trajectory.turns] == [100.0, 11.0, 12.0, 13.0]
    assert (child.turns, child.reward, child.done, child.truncated) == ((1, 2, 3), 36.0, True, False)
    assert child.message["content"] == "re sub 2"
    assert rows_of_turns(trajectory) == engine.rows
    assert len(trajectory.leaves()) == 2, "the child's turns are one branch"
    assert trajectory.forks == 0


# A child: how many turns it has, and the children that it runs at the same time after its first turn.
trees = st.recursive(
    st.tuples(st.integers(1, 3), st.just(())),
    lambda children: st.tuples(st.integers(1, 3), st.lists(children, min_size=1, max_size=3).map(tuple)),
    max_leaves=6,
)


def size(tree):
    return tree[0] + sum(map(size, tree[1]))


@pytest.mark.slow
@settings(max_examples=20)
@given(tree=trees, order=st.randoms(use_true_random=False))
def test_any_tree_of_children_in_any_order_is_what_the_engine_saw(renderer, tree, order):
    async def completion(request):
        for _ in range(order.randrange(6)):  # other episodes run: the order of the turns is any
            await asyncio.sleep(0)
        return f"re {last_user_text(renderer, request)}"

    def episode():
        engine = RecordingEngine(completion, renderer=renderer)
        trajectory = play(Nested("t", tree), engine, renderer, max_turns=size(tree))
        return engine, trajectory

    engine, trajectory = episode()
    assert trajectory.done
    assert sorted(rows_of_turns(trajectory)) == sorted(engine.rows)
    assert trajectory.num_turns == size(tree)
    for turn in trajectory.turns:
        name, number = turn.message["content"].removeprefix("re ").split(" ")
        assert (turn.agent or "t") == name
        assert turn.reward == int(number) + 1
    ids = [request.request_id for request in engine.requests]
    seeds = {request.request_id.split("-", 1)[1]: request.sampling.seed for request in engine.requests}
    assert len(set(ids)) == len(ids)
    assert len(set(seeds.values())) == len(seeds)
    again, _ = episode()
    assert seeds == {request.request_id.split("-", 1)[1]: request.sampling.seed for request in again.requests}


def test_a_child_environment_is_attached_reset_with_a_derived_seed_and_closed(renderer, engine):
    calls = []

    class Child(Echo):
        def attach(self, context):
            calls.append(("attach", context.agent, context.episode_id))

        def reset(self, seed):
            calls.append(("reset", seed))
            return super().reset(seed)

        def close(self):
            calls.append("close")

    async def work(context, assistant):
        await context.run_child(Child("a", turns=1), agent="solver", max_turns=1)
        await context.run_child(Child("b", turns=1), agent="solver", max_turns=1, seed=9)
        assert calls[-1] == "close"

    play(Delegating(work), engine, renderer, episode_id="e")
    derived = calls[1][1]
    assert calls == [
        ("attach", "solver", "e"),
        ("reset", derived),
        "close",
        ("attach", "solver", "e"),
        ("reset", 9),
        "close",
    ]
    assert derived not in (3, 5, 9)


def test_a_threaded_environment_passes_the_context_on(renderer, engine):
    async def work(context, assistant):
        await context.generate_turn([user("x")], agent="critic")

    trajectory = play(ThreadedEnvironment(Delegating(work)), engine, renderer)
    assert agents(trajectory) == ["", "critic"]


def test_a_step_may_end_the_episode_with_the_reward_of_another_turn(renderer, engine):
    class Deferred(Delegating):
        async def step(self, assistant):
            child = await self.context.run_child(Echo("sub", turns=1), agent="solver", max_turns=1)
            self.context.record_reward(child.turns[0], -1.0, {"by": "parent"})
            return StepResult(reward=1.0, done=True)

    trajectory = play(Deferred(None), engine, renderer)
    assert [(turn.reward, turn.info) for turn in trajectory.turns] == [(1.0, {}), (-1.0, {"by": "parent"})]
