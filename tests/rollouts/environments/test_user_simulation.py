"""Conversations with a simulated user, against scripted engines and the real renderer of the tiny model."""

import asyncio

import numpy as np
import pytest
from sub_agents import RecordingEngine, play, rows_of_turns, user

from renderers import RendererPool
from renderers.errors import MessageError
from rollouts import SamplingParams
from rollouts.environments import UserSimulation
from rollouts.episodes.errors import EpisodeError
from rollouts.errors import ArgumentError, OverlongPromptError
from rollouts.rewards import Reward
from rollouts.testing import ScriptedEngine
from rollouts.training import samples_from_trajectory

IMAGE = np.arange(32 * 32 * 3, dtype=np.uint8).reshape(32, 32, 3)
OTHER_IMAGE = IMAGE[::-1].copy()


def texts(renderer, engine):
    """The prompts that an engine received, without the number of placeholder tokens."""
    return [
        renderer.tokenizer.decode(list(request.prompt_ids)).replace("<|image_pad|>" * 4, "<|image_pad|>")
        for request in engine.requests
    ]


def episode(renderer, policy, simulated, *, engines=None, user_renderer=..., **options):
    """The trajectory of a policy that says `policy`, with a user that says `simulated`; and both engines."""
    engines = engines or (
        RecordingEngine(policy, renderer=renderer),
        RecordingEngine(simulated, renderer=renderer),
    )
    options = {"instructions": "You are a user.", "engine": engines[1], **options}
    options["renderer"] = renderer if user_renderer is ... else user_renderer
    return play(UserSimulation(**options), engines[0], renderer), *engines


def test_the_user_sees_the_conversation_with_the_roles_exchanged(renderer):
    _, policy, simulated = episode(
        renderer,
        ["hello", "red"],
        ["why?", "thanks STOP"],
        opening=[{"role": "system", "content": "You are the policy."}, user("which colour?")],
        stop_phrase="STOP",
    )
    assert texts(renderer, policy)[1] == (
        "<|im_start|>system\nYou are the policy.<|im_end|>\n<|im_start|>user\nwhich colour?<|im_end|>\n"
        "<|im_start|>assistant\nhello<|im_end|>\n<|im_start|>user\nwhy?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert texts(renderer, simulated)[1] == (
        "<|im_start|>system\nYou are a user.<|im_end|>\n<|im_start|>user\nWrite your first message.<|im_end|>\n"
        "<|im_start|>assistant\nwhich colour?<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n"
        "<|im_start|>assistant\nwhy?<|im_end|>\n<|im_start|>user\nred<|im_end|>\n<|im_start|>assistant\n"
    )


def test_without_an_opening_the_user_writes_the_first_message(renderer):
    trajectory, policy, simulated = episode(
        renderer, ["hello"], ["hi", "STOP"], begin="Ask something.", stop_phrase="STOP"
    )
    assert texts(renderer, simulated)[0] == (
        "<|im_start|>system\nYou are a user.<|im_end|>\n<|im_start|>user\nAsk something.<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert texts(renderer, policy) == ["<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"]
    assert trajectory.turns[0].info == {"ended_by": "stop_phrase", "user_turns": 2, "user_message": "STOP"}


def test_images_are_visible_to_the_user_in_a_message_of_the_role_user(renderer):
    opening = [user("hi", OTHER_IMAGE), {"role": "assistant", "content": "hello"}, user("what is it?", IMAGE)]
    _, policy, simulated = episode(renderer, ["a"], ["STOP"], opening=opening, stop_phrase="STOP")
    picture = "<|vision_start|><|image_pad|><|vision_end|>"
    assert texts(renderer, simulated)[0] == (
        "<|im_start|>system\nYou are a user.<|im_end|>\n"
        f"<|im_start|>user\n{picture}Write your first message.<|im_end|>\n<|im_start|>assistant\nhi<|im_end|>\n"
        f"<|im_start|>user\n{picture}hello<|im_end|>\n<|im_start|>assistant\nwhat is it?<|im_end|>\n"
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    )
    hashes = [[item.mm_hash for item, _ in engine.requests[0].media] for engine in (policy, simulated)]
    assert hashes[0] == hashes[1]
    assert len(set(hashes[0])) == 2


def test_reasoning_and_tool_calls_of_the_policy_are_hidden_from_the_user(renderer):
    response = '<think>secret</think>seen\n<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    _, _, simulated = episode(renderer, [response], ["STOP"], opening=[user("hi")], stop_phrase="STOP")
    (text,) = texts(renderer, simulated)
    assert "seen" in text
    assert "secret" not in text
    assert "look" not in text


def test_the_prompts_of_the_user_continue_its_sampled_tokens(renderer):
    _, _, simulated = episode(renderer, ["a", "b", "c"], ["x", "y", "z"], opening=[user("hi")], max_user_turns=2)
    assert len(simulated.rows) == 2
    assert simulated.rows[1][: len(simulated.rows[0])] == simulated.rows[0]


def test_the_calls_of_another_model_are_not_in_the_trajectory(renderer):
    trajectory, policy, _ = episode(renderer, ["a", "b"], ["x", "STOP"], opening=[user("hi")], stop_phrase="STOP")
    assert rows_of_turns(trajectory) == policy.rows
    assert {turn.agent for turn in trajectory.turns} == {""}
    assert trajectory.leaves() == [trajectory.turns[-1].node]


def test_the_policy_plays_the_user_if_there_is_no_other_engine(renderer):
    engine = RecordingEngine(["a", "x", "b", "y STOP"], renderer=renderer)
    trajectory, *_ = episode(
        renderer, (), (), engines=(engine, None), user_renderer=None, opening=[user("hi")], stop_phrase="STOP"
    )
    assert [turn.agent for turn in trajectory.turns] == ["", "user", "", "user"]
    assert rows_of_turns(trajectory) == engine.rows
    assert len(trajectory.leaves()) == 2

    def trained(**options):
        samples = samples_from_trajectory(trajectory, advantage=1.0, processors=renderer.processors, **options)
        return [renderer.tokenizer.decode(sample.token_ids[sample.loss_mask].tolist()) for sample in samples]

    assert trained() == ["a<|im_end|>b<|im_end|>", "x<|im_end|>y STOP<|im_end|>"]
    assert trained(agents={""}) == ["a<|im_end|>b<|im_end|>"]


def test_the_seed_of_the_environment_decides_what_another_model_samples(renderer):
    def seeds(seed, sampling_seed):
        engines = [ScriptedEngine(lambda request: "x", renderer=renderer) for _ in range(2)]
        environment = UserSimulation(
            instructions="u", engine=engines[1], renderer=renderer, opening=[user("hi")], max_user_turns=3
        )
        play(environment, engines[0], renderer, seed=seed, sampling=SamplingParams(seed=sampling_seed))
        return [request.sampling.seed for request in engines[1].requests]

    assert seeds(1, 10) == seeds(1, 11)
    assert seeds(1, 10) != seeds(2, 10)
    assert len(set(seeds(1, 10))) == 3


def test_the_conversation_ends_with_the_response_to_the_last_message_of_the_user(renderer):
    trajectory, policy, simulated = episode(
        renderer, ["a", "b", "c"], ["x", "y"], opening=[user("hi")], max_user_turns=2
    )
    assert (len(policy.requests), len(simulated.requests)) == (3, 2)
    assert trajectory.done
    assert trajectory.turns[-1].info == {"ended_by": "max_user_turns", "user_turns": 2}


@pytest.mark.parametrize("is_async", [False, True])
def test_a_judge_ends_the_conversation_and_a_score_rewards_it(renderer, is_async):
    def is_over(conversation):
        return "red" in conversation[-1]["content"]

    def score(conversation):
        assert [message["role"] for message in conversation] == ["user", "assistant", "user", "assistant"]
        return 0.75

    async def is_over_async(conversation):
        await asyncio.sleep(0)
        return is_over(conversation)

    async def score_async(conversation):
        return score(conversation)

    functions = {"is_over": is_over_async, "score": score_async} if is_async else {"is_over": is_over, "score": score}
    trajectory, *_ = episode(renderer, ["blue", "red"], ["no"], opening=[user("hi")], **functions)
    assert [turn.reward for turn in trajectory.turns] == [0.0, 0.75]
    assert trajectory.turns[-1].info["ended_by"] == "is_over"


def test_a_message_with_the_stop_phrase_alone_scores_what_the_policy_said_last(renderer):
    trajectory, *_ = episode(
        renderer,
        ["red"],
        ["STOP"],
        opening=[user("hi")],
        stop_phrase="STOP",
        score=lambda conversation: float(conversation[-1]["content"] == "red"),
    )
    assert trajectory.reward == 1.0


def test_several_rewards_are_weighted_and_logged_apart(renderer):
    trajectory, *_ = episode(
        renderer,
        ["red"],
        ["STOP"],
        opening=[user("hi")],
        stop_phrase="STOP",
        score=[Reward("short", 0.5, lambda conversation: 1.0), Reward("polite", 2.0, lambda conversation: 0.25)],
    )
    assert trajectory.reward == 1.0
    assert trajectory.turns[0].info["rewards"] == {
        "short": {"score": 1.0, "weight": 0.5},
        "polite": {"score": 0.25, "weight": 2.0},
    }


def test_a_first_message_with_the_stop_phrase_is_an_error(renderer):
    with pytest.raises(EpisodeError, match="the first message of the simulated user contains the stop phrase 'STOP'"):
        episode(renderer, ["a"], ["STOP"], stop_phrase="STOP")


def test_an_empty_message_of_the_user_fails_the_episode_and_says_what_to_do(renderer):
    with pytest.raises(EpisodeError, match="message 1 of the simulated user is empty; raise max_tokens") as caught:
        episode(renderer, ["a"], [" "], opening=[user("hi")])
    assert caught.value.trajectory.num_turns == 1


def test_a_conversation_that_the_user_s_model_cannot_read_any_more_is_truncated(renderer):
    overlong = OverlongPromptError("r", 9000, 8192)
    trajectory, *_ = episode(renderer, ["a", "b"], ["x", overlong], opening=[user("hi")])
    assert (trajectory.truncated, trajectory.error, trajectory.num_turns) == (True, "", 2)
    assert "9000 tokens" in trajectory.truncation_reason


def test_a_shared_pool_is_left_open(renderer):
    with RendererPool(renderer) as pool:
        for _ in range(2):
            trajectory, *_ = episode(
                renderer, ["a"], ["STOP"], user_renderer=pool, opening=[user("hi")], stop_phrase="STOP"
            )
            assert trajectory.done


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"instructions": ""}, ArgumentError),
        ({"engine": None}, ArgumentError),
        ({"renderer": None}, ArgumentError),
        ({"max_user_turns": 0}, ArgumentError),
        ({"stop_phrase": ""}, ArgumentError),
        ({"score": 3}, ArgumentError),
        ({"opening": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, ArgumentError),
        ({"opening": [{"role": "nobody", "content": "x"}]}, MessageError),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_wrong_arguments_are_refused_when_the_environment_is_made(renderer, options, error):
    valid = {"instructions": "u", "engine": ScriptedEngine(["x"], renderer=renderer), "renderer": renderer}
    with pytest.raises(error):
        UserSimulation(**{**valid, **options})
