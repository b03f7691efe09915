"""Sub-agents in the groups of a runner, under an engine with latency, failures, aborts and new weights."""

import asyncio

import pytest
from simulated_engine import SimulatedEngine
from sub_agents import Nested, rows_of_turns

from rollouts import SamplingParams
from rollouts.runner import Asynchronous, RetryPolicy, Runner, Task

TREE = (2, ((2, ()), (1, ((2, ()), (1, ())))))
TURNS = 8


class RecordingSimulation(SimulatedEngine):
    """Keeps a row of ids for each completion."""

    def __init__(self, **options):
        super().__init__(**options)
        self.rows = set()

    async def generate(self, request, listen=None):
        result = await super().generate(request)
        self.rows.add((*request.prompt_ids, *result.completions[0].token_ids.tolist()))
        return result


@pytest.mark.slow
@pytest.mark.parametrize("in_flight", ["abort", "wait", "keep"])
async def test_children_survive_failures_aborts_and_weight_updates(renderer, in_flight):
    engine = RecordingSimulation(seed=3, error_rate=0.03, abort_rate=0.02, tokens=(1, 6), token_ids=range(97, 123))
    retry = RetryPolicy(max_attempts=20, first_delay=0.0)
    sampling = SamplingParams(max_tokens=16, seed=0)
    groups = []
    options = {"sampling": sampling, "group_size": 3, "retry": retry, "mode": Asynchronous(max_staleness=9)}
    async with Runner(lambda task: Nested("t", TREE), engine, renderer, **options) as runner:
        async for group in runner.stream([Task(f"t{number}") for number in range(5)]):
            groups.append(group)
            await runner.update_weights({}, str(len(groups)), in_flight=in_flight)
    assert engine.running == 0
    assert asyncio.all_tasks() == {asyncio.current_task()}
    episodes = [episode for group in groups for episode in group.episodes]
    assert len(episodes) == 15
    assert any(attempts > 1 for group in groups for attempts in group.attempts)
    for episode in episodes:
        assert (episode.done, episode.error, episode.num_turns) == (True, "", TURNS)
        assert set(map(tuple, rows_of_turns(episode))) <= engine.rows
        turns_of = {}
        for turn in episode.turns:
            turns_of[turn.agent] = turns_of.get(turn.agent, 0) + 1
            assert turn.reward == turns_of[turn.agent]
        assert sorted(turns_of.values()) == [1, 1, 2, 2, 2]
        assert all(node.weight_spans for node in episode.nodes if node.sampled.all())
