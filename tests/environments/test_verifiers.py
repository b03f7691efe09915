"""verifiers environments against our engines. Needs verifiers 0.4: python tests/dropin/verifiers_environment.py"""

import asyncio
import re
from pathlib import Path

import pytest

from renderers import load_renderer
from rollouts import SamplingParams, Trajectory
from rollouts.errors import ArgumentError
from rollouts.testing import ScriptedEngine
from rollouts.training import samples_from_trajectory

vf = pytest.importorskip("verifiers.v1")

from rollouts.environments.verifiers import EngineClient  # noqa: E402


def load_env(options=None, **agent):
    """The taskset of colours; `options` are fields of its tasks' data."""
    taskset = {"id": "colours-v1", "options": options or {}}
    return vf.load_environment(
        vf.resolve_env_config({"taskset": taskset, "agent": {"runtime": {"type": "subprocess"}, **agent}})
    )


def play(env, client, *, task=0, **sampling):
    """Run an episode in verifiers' own runner."""

    async def run():
        context = vf.ModelContext(model="policy", client=client.config, sampling=vf.SamplingConfig(**sampling))
        async with env.serving():
            return await env.run_episode(list(env.taskset)[task], context)

    return asyncio.run(run())


class CountingRenderer:
    """Counts the calls of a renderer."""

    def __init__(self, renderer):
        self.renderer, self.calls = renderer, []

    def __getattr__(self, name):
        value = getattr(self.renderer, name)
        if name not in ("render", "bridge_to_next_turn"):
            return value

        def counted(*arguments, **options):
            self.calls.append(name)
            return value(*arguments, **options)

        return counted


@pytest.fixture
def counting(tiny_model_dir):
    return CountingRenderer(load_renderer(tiny_model_dir))


def recorded_alike(trajectory: Trajectory, trace) -> bool:
    """Whether verifiers recorded the same tokens, and the same of them as sampled."""

    def sampled(leaf):
        return tuple(bool(value) for index in trajectory.path(leaf) for value in trajectory.nodes[index].sampled)

    branches = {(tuple(branch.token_ids), tuple(branch.sampled_mask)) for branch in trace.branches}
    return branches == {(tuple(trajectory.token_ids(leaf).tolist()), sampled(leaf)) for leaf in trajectory.leaves()}


def test_a_rollout_in_verifiers_own_runner_is_the_exact_tree_of_what_the_engine_sampled(counting):
    engine = ScriptedEngine(["It is red.", "green", "I do not know."], renderer=counting.renderer)
    with EngineClient(engine, counting, sampling=SamplingParams(max_tokens=64)) as client:
        episode = play(load_env(), client)
        (trace,) = episode.traces
        trajectory = client.pop_trajectory(trace)
    assert episode.ok, (episode.errors, trace.errors)

    # One prompt is rendered; each later one extends what was sampled, and has one image more.
    assert counting.calls == ["render", "bridge_to_next_turn", "bridge_to_next_turn"]
    assert [len(request.media) for request in engine.requests] == [1, 2, 3]
    assert [node.parent for node in trajectory.nodes] == [-1, 0, 1, 2, 3, 4]
    for turn, request in zip(trajectory.turns, engine.requests, strict=True):
        ids = trajectory.token_ids(turn.node).tolist()
        assert ids[: len(request.prompt_ids)] == list(request.prompt_ids)
    stop = counting.renderer.get_stop_token_ids()[0]
    sampled = [node.token_ids.tolist() for node in trajectory.nodes if node.sampled.all()]
    encode = counting.renderer.tokenizer.encode_scaffold
    assert sampled == [[*encode(text), stop] for text in ("It is red.", "green", "I do not know.")]
    assert len(trajectory.media(trajectory.turns[-1].node)) == 3

    # verifiers recorded the same tokens.
    (branch,) = trace.branches
    leaf = trajectory.turns[-1].node
    assert branch.token_ids == trajectory.token_ids(leaf).tolist()
    assert branch.sampled_mask == [
        bool(value) for index in trajectory.path(leaf) for value in trajectory.nodes[index].sampled
    ]
    assert [node.message.role for node in branch.nodes] == ["system", *["user", "assistant"] * 3]

    # Rewards and metrics.
    assert trajectory.finished
    assert trajectory.reward == pytest.approx(trace.reward) == pytest.approx(4 / 3)
    assert trajectory.turns[-1].info["rewards"] == {"named": {"score": pytest.approx(2 / 3), "weight": 2.0}}
    assert trajectory.metrics == {"answers": 3.0}
    assert trajectory.done
    assert trajectory.episode_id == trace.id


def test_calls_of_tools_and_their_images_extend_what_was_sampled(counting):
    call = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    engine = ScriptedEngine([call, "red", "green", call, call, "blue"], renderer=counting.renderer)
    with EngineClient(engine, counting, sampling=SamplingParams(max_tokens=100)) as client:
        (trace,) = play(load_env({"tool": True}), client).traces
        trajectory = client.pop_trajectory(trace)
    assert trace.ok, trace.errors
    assert counting.calls == ["render", *["bridge_to_next_turn"] * 5]
    assert [len(request.media) for request in engine.requests] == [1, 2, 3, 4, 5, 6]
    has_calls = ["tool_calls" in turn.message for turn in trajectory.turns]
    assert has_calls == [True, False, False, True, True, False]
    assert trajectory.forks == 0
    assert recorded_alike(trajectory, trace)


def test_a_history_that_the_harness_changes_is_another_branch(counting):
    engine = ScriptedEngine(["red", "green", "blue"], renderer=counting.renderer)
    with EngineClient(engine, counting) as client:
        (trace,) = play(load_env({"forgets": True}), client).traces
        trajectory = client.pop_trajectory(trace)
    assert counting.calls == ["render"] * 3
    assert [len(request.media) for request in engine.requests] == [1, 1, 1]
    assert trajectory.forks == 2
    assert len(trajectory.leaves()) == len(trace.branches) == 3
    for branch, leaf in zip(trace.branches, trajectory.leaves(), strict=True):
        assert branch.token_ids == trajectory.token_ids(leaf).tolist()
    assert recorded_alike(trajectory, trace)


@pytest.mark.parametrize("answers", [["red"] * 6, ["red", "green", "blue", "red", "green", "blue"]])
def test_calls_at_the_same_time_are_siblings_that_share_their_prompt(counting, answers):
    engine = ScriptedEngine(answers, renderer=counting.renderer)
    with EngineClient(engine, counting) as client:
        (trace,) = play(load_env({"asks": 2}), client).traces
        trajectory = client.pop_trajectory(trace)
    assert trace.ok, trace.errors
    assert counting.calls == ["render"] * 2 + ["bridge_to_next_turn"] * 4
    assert sum(node.sampled.all() for node in trajectory.nodes) == 6
    assert len(trajectory.nodes) == 9  # each of the three prompts is stored once
    assert sum(len(node.media) for node in trajectory.nodes) == 3
    assert recorded_alike(trajectory, trace)


def test_a_message_that_the_task_rewrites_is_not_taken_for_what_was_sampled(counting):
    engine = ScriptedEngine(["red", "a bad word", "blue"], renderer=counting.renderer)
    with EngineClient(engine, counting) as client:
        (trace,) = play(load_env({"censored": "bad word"}), client).traces
        trajectory = client.pop_trajectory(trace)
    assert trace.ok, trace.errors
    assert counting.calls == ["render", "bridge_to_next_turn", "render"]
    assert trajectory.turns[1].message["content"] == "a bad word"
    assert trajectory.forks == 1
    removed = counting.renderer.tokenizer.encode_scaffold("[removed]")
    last_prompt = list(engine.requests[2].prompt_ids)
    assert any(last_prompt[at : at + len(removed)] == removed for at in range(len(last_prompt)))


def test_limits_of_the_agent_truncate(renderer):
    engine = ScriptedEngine(lambda request: "red", renderer=renderer)
    with EngineClient(engine, renderer) as client:
        trajectory = client.pop_trajectory(*play(load_env(max_turns=2), client).traces)
    assert trajectory.num_turns == 2
    assert trajectory.truncated
    assert not trajectory.done


def test_options_of_the_template_are_refused_with_what_to_do(renderer):
    engine = ScriptedEngine(["red"], renderer=renderer)
    with EngineClient(engine, renderer) as client:
        (trace,) = play(load_env(), client, chat_template_kwargs={"enable_thinking": False}).traces
    assert "load the renderer with them" in trace.errors[-1].message
    assert not engine.requests


def test_the_configuration_of_a_closed_client_is_an_error(renderer):
    with EngineClient(ScriptedEngine(["red"], renderer=renderer), renderer) as client:
        pass
    (trace,) = play(load_env(), client).traces
    assert "not open in this process" in trace.errors[-1].message


def test_verifiers_eval_runner_takes_the_client(renderer, tmp_path):
    from verifiers.v1.cli.eval.runner import run_eval
    from verifiers.v1.configs.cli.eval import EvalConfig

    engine = ScriptedEngine(lambda request: "red", renderer=renderer)
    with EngineClient(engine, renderer) as client:
        config = EvalConfig(
            env=load_env().config, model="policy", client=client.config, rich=None, push=False, output_dir=tmp_path
        )
        episodes = asyncio.run(run_eval(config))
        trajectories = [client.pop_trajectory(trace) for episode in episodes for trace in episode.traces]
    assert [trajectory.num_turns for trajectory in trajectories] == [3] * 4
    assert [trajectory.reward for trajectory in trajectories] == [
        pytest.approx(trace.reward) for episode in episodes for trace in episode.traces
    ]


def run_blocks(page, names):
    """The blocks of a page of the docs that need verifiers, run in order as one program."""
    text = (Path(__file__).parents[2] / "docs" / page).read_text("utf-8").replace('"my-taskset"', '"colours-v1"')
    for number, block in enumerate(re.findall(r"^```py\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)):
        exec(compile(block, f"{page}, block {number}", "exec"), names)
    return names


def test_the_section_of_the_docs(renderer):
    given = {"asyncio": asyncio, "SamplingParams": SamplingParams}
    names = run_blocks("environments.md", {"ScriptedEngine": ScriptedEngine, "renderer": renderer, **given})
    assert names["first"].rewards.tolist() == [pytest.approx(2 / 3)] * 2
    for trajectory in names["first"].episodes:
        (sample,) = samples_from_trajectory(trajectory, advantage=trajectory.reward, processors=renderer.processors)
        assert sample.name == f"{trajectory.episode_id}/{trajectory.leaves()[0]}"
        assert sample.advantages[sample.loss_mask] == pytest.approx(2 / 3)
    assert recorded_alike(names["exact"][0], names["episode"].traces[0])


def test_sampling_options_of_verifiers_replace_those_of_the_client(renderer):
    engine = ScriptedEngine(lambda request: "red", renderer=renderer)
    given = SamplingParams(max_tokens=7, top_k=5, temperature=0.5, extra={"min_p": 0.1})
    with EngineClient(engine, renderer, sampling=given) as client:
        play(load_env(), client, temperature=0.9, top_k=-1, repetition_penalty=1.1, seed=3, n=1, logprobs=True)
    params = [request.sampling for request in engine.requests]
    assert {(each.max_tokens, each.top_k, each.temperature) for each in params} == {(7, 0, 0.9)}
    assert params[0].extra == {"min_p": 0.1, "repetition_penalty": 1.1}
    assert len({each.seed for each in params}) == 3
    with pytest.raises(ArgumentError, match=r"sampling\.n"):
        EngineClient(engine, renderer, sampling=SamplingParams(n=2))
