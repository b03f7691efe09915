"""Arguments of a wrong type or range are errors that name the argument, its value and the cure."""

import asyncio
import math

import numpy as np
import pytest

from renderers import RenderedTokens
from rollouts import Completion, FinishReason, GenerateRequest, SamplingParams, Trajectory, pack_episodes
from rollouts.engines.local import LocalEngine
from rollouts.errors import ArgumentError, EngineError, InvalidRequestError, InvalidTurnError
from rollouts.testing import ScriptedEngine
from rollouts.training import (
    samples_from_trajectory,
)

COMPLETION = Completion(0, np.array([7], np.int32), np.array([-1], np.float32), FinishReason.STOP)


@pytest.fixture(scope="module")
def trajectory(renderer):
    image = {"type": "image", "image": np.zeros((32, 32, 3), np.uint8)}
    prompt = renderer.render([{"role": "user", "content": [image]}], add_generation_prompt=True)
    episode = Trajectory("e1")
    episode.add_turn(prompt, COMPLETION, {"role": "assistant", "content": "x"})
    return episode


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda episode, own: pack_episodes(episode), r"episodes is <Trajectory e1.*; pass a list .*\[trajectory\]"),
        (lambda episode, own: pack_episodes([own]), "episodes is .*; pass a list of Trajectory"),
        (
            lambda episode, own: samples_from_trajectory(episode, advantage=np.ones(8), processors=own.processors),
            "advantage is array.*; pass one finite number for episode e1",
        ),
        (
            lambda episode, own: samples_from_trajectory(episode, advantage=math.nan, processors=own.processors),
            "advantage is nan; pass one finite number for episode e1",
        ),
    ],
)
def test_trajectories(trajectory, renderer, call, error):
    with pytest.raises(ArgumentError, match=f"^.*{error}"):
        call(trajectory, renderer)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: LocalEngine.from_pretrained("/no/dir"), "directory is '/no/dir'; pass a checkpoint directory"),
        (lambda: LocalEngine(None, max_batch_rows=0), "max_batch_rows is 0; pass an integer of at least 1"),
    ],
)
def test_the_local_engine(call, error):
    with pytest.raises(ArgumentError, match=error):
        call()


@pytest.mark.parametrize("config", [None, "{}", "{", '{"model_type": "no_such_model"}'])
def test_a_directory_that_is_no_checkpoint(tmp_path, config):
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(ArgumentError, match=r"directory is .*; pass a checkpoint directory with config.json and"):
        LocalEngine.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("prompt", "completion", "error"),
    [
        (
            RenderedTokens([1]),
            Completion(0, np.array([7]), np.array([0.5]), FinishReason.STOP),
            "token 0 has log-probability 0.5; pass the sampler's log-probability of each sampled token",
        ),
        (
            RenderedTokens([1]),
            Completion(0, np.array([7, 8]), np.array([-0.5]), FinishReason.STOP),
            "2 tokens and 1 log-probabilities; pass the sampler's",
        ),
    ],
)
def test_turns(prompt, completion, error):
    trajectory = Trajectory("e1")
    with pytest.raises(InvalidTurnError, match=error):
        trajectory.add_turn(prompt, completion, {"role": "assistant", "content": "x"})
    assert not trajectory.turns


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"max_tokens": 0}, r"SamplingParams.max_tokens is 0; pass at least 1$"),
        ({"top_p": 1.5}, r"SamplingParams.top_p is 1.5; pass a number above 0, up to 1$"),
        ({"temperature": -1}, r"SamplingParams.temperature is -1.0; pass 0 \(greedy\) or more$"),
    ],
)
def test_sampling(options, error):
    with pytest.raises(InvalidRequestError, match=error):
        SamplingParams(**options)


def test_an_entry_of_a_script_is_named_by_its_number():
    engine = ScriptedEngine([[1], None])
    request = GenerateRequest([1], SamplingParams())
    asyncio.run(engine.generate(request))
    with pytest.raises(EngineError, match=r"entry 1 of the script is None \(NoneType\); pass text, token ids"):
        asyncio.run(engine.generate(request))
