"""A step that returns the conversation again, and not only what is new, is an error: the model would read it twice."""

import numpy as np
import pytest
from sub_agents import play

from rollouts import StepResult
from rollouts.episodes.errors import EnvironmentProtocolError, EpisodeError
from rollouts.testing import ScriptedEngine

IMAGE = {"type": "image", "image": np.zeros((32, 32, 3), np.uint8)}
FIRST = {"text": {"role": "user", "content": "one"}, "image": {"role": "user", "content": [IMAGE]}}


class Returning:
    """Asks twice; `step` returns `messages(first message, answer of the model)`."""

    def __init__(self, first, messages):
        self.first, self.messages, self.taken = first, messages, 0

    def reset(self, seed):
        return [self.first]

    def step(self, assistant):
        self.taken += 1
        return StepResult(self.messages(self.first, assistant), done=self.taken == 2)


def requests_of(renderer, first, messages):
    engine = ScriptedEngine(["yes", "no"], renderer=renderer)
    play(Returning(FIRST[first], messages), engine, renderer)
    return engine.requests


def new(text="two"):
    return {"role": "user", "content": text}


@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize(
    ("messages", "number"),
    [
        (lambda first, answer: [first, answer, new()], 2),
        (lambda first, answer: [answer, new()], 1),
        (lambda first, answer: [first, {"role": "assistant", "content": "yes"}, new()], 2),
    ],
    ids=["the conversation", "the answer", "a copy of the answer"],
)
def test_a_step_that_returns_the_conversation_again_is_an_error(renderer, first, messages, number):
    with pytest.raises(EpisodeError) as caught:
        requests_of(renderer, first, messages)
    error = caught.value.__cause__
    assert isinstance(error, EnvironmentProtocolError)
    assert f"Returning.step returned for turn 0 messages of which the first {number} are in the conversation" in str(
        error
    )
    assert "return only the messages that come after it" in str(error)


@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize(
    "messages",
    [
        lambda first, answer: [first, {"role": "assistant", "content": "maybe"}, new()],
        lambda first, answer: [new("an example"), answer, new()],
        lambda first, answer: [{"role": "assistant", "content": "maybe"}, new()],
        lambda first, answer: [first],
    ],
    ids=["another answer", "an example with the same answer", "a second answer", "the same question"],
)
def test_messages_that_only_look_like_the_conversation_are_shown(renderer, first, messages):
    assert len(requests_of(renderer, first, messages)) == 2
