"""Sub-agents in the groups of a runner, under an engine with latency, failures, aborts and new weights;
log-probabilities of all agents of an episode."""

import asyncio

import numpy as np
import pytest
import torch
from simulated_engine import SimulatedEngine
from sub_agents import Delegating, Echo, Nested, play, rows_of_turns, user
from transformers import AutoModelForImageTextToText

from rollouts import LocalEngine, SamplingParams, StepResult
from rollouts.runner import Asynchronous, RetryPolicy, Runner, Task
from rollouts.testing import ScriptedEngine
from rollouts.training import TrainingBatch, mismatch_report, samples_from_trajectory, token_logprobs

TREE = (2, ((2, ()), (1, ((2, ()), (1, ())))))
TURNS = 8


class RecordingSimulation(SimulatedEngine):
    """Keeps a row of ids for each completion."""

    def __init__(self, **options):
        super().__init__(**options)
        self.rows = set()

    async def generate(self, request):
        result = await super().generate(request)
        self.rows.add((*request.prompt_ids, *result.completions[0].token_ids.tolist()))
        return result


@pytest.mark.slow
@pytest.mark.parametrize("in_flight", ["abort", "wait", "keep"])
def test_children_survive_failures_aborts_and_weight_updates(renderer, in_flight):
    async def main():
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
        return engine, groups

    engine, groups = asyncio.run(main())
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


def test_a_cancelled_run_leaves_no_request_of_a_child(renderer):
    """The consumer goes away while a child waits for the engine."""

    async def main():
        is_waiting, never = asyncio.Event(), asyncio.Event()

        async def held(request):
            is_waiting.set()
            try:
                await never.wait()
            finally:
                is_waiting.clear()

        policy = ScriptedEngine(
            lambda request: held(request) if len(request.prompt_ids) > 80 else "ok", renderer=renderer
        )

        class Delegating:
            def attach(self, context):
                self.context = context

            def reset(self, seed):
                return [user("delegate")]

            async def step(self, assistant):
                await self.context.generate_turn([user("x" * 100)], agent="child")
                return StepResult(done=True)

        runner = Runner(lambda task: Delegating(), policy, renderer, sampling=SamplingParams(max_tokens=8))
        stream = runner.stream([Task("a")])
        consumer = asyncio.create_task(anext(stream))
        await is_waiting.wait()
        consumer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await consumer
        await runner.close()
        assert not is_waiting.is_set()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


# Log-probabilities of all agents of an episode, sampled and recomputed by the tiny model.

IMAGE = np.arange(32 * 32 * 3, dtype=np.uint8).reshape(32, 32, 3)


@pytest.fixture(scope="module")
def model(tiny_model_dir):
    return AutoModelForImageTextToText.from_pretrained(tiny_model_dir, dtype=torch.float32)


@pytest.mark.slow
def test_the_trainer_computes_the_log_probabilities_of_every_agent(tiny_model_dir, renderer, model):
    """Children with images run at the same time, with a critic that continues its own turn."""

    async def work(context, assistant):
        async def criticise():
            first = await context.generate_turn([user("look", IMAGE[::-1].copy())], agent="critic")
            await context.generate_turn([user("and now?", IMAGE)], agent="critic", after=first)

        await asyncio.gather(
            criticise(),
            context.run_child(Echo("one", turns=3, images=[IMAGE]), agent="solver-1", max_turns=3),
            context.run_child(Echo("two", turns=2), agent="solver-2", max_turns=3),
        )

    engine = LocalEngine.from_pretrained(tiny_model_dir)
    trajectory = play(Delegating(work), engine, renderer, sampling=SamplingParams(max_tokens=12, seed=1))
    assert sorted(turn.agent for turn in trajectory.turns) == [
        "",
        *["critic"] * 2,
        *["solver-1"] * 3,
        *["solver-2"] * 2,
    ]

    for agents in ({""}, {"critic"}, {"solver-1"}, {"solver-2"}, None):
        samples = samples_from_trajectory(trajectory, advantage=1.0, processors=renderer.processors, agents=agents)
        batch = TrainingBatch.from_samples(samples, pad_id=0)
        with torch.no_grad():
            report = mismatch_report(batch, token_logprobs(model, batch))
        sampled = [turn for turn in trajectory.turns if agents is None or turn.agent in agents]
        assert report.tokens == sum(len(trajectory.nodes[turn.node].logprobs) for turn in sampled)
        assert report.max_abs < 1e-5
