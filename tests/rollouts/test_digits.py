"""The digits environment."""

import numpy as np
import pytest

from rollouts.demo.task import SECOND_QUESTION, DigitsEnvironment, load_digit_sets


@pytest.fixture(scope="module")
def sets():
    return load_digit_sets()


def say(text):
    return {"role": "assistant", "content": text}


def shown(messages):
    (message,) = messages
    picture, text = message["content"]
    return picture["image"], text["text"]


def test_a_wrong_answer_gets_another_view_of_the_same_digit_and_one_more_try(sets):
    environment = DigitsEnvironment(sets[0])
    first, _ = shown(environment.reset(5))
    wrong = environment.step(say("nonsense"))
    second, text = shown(wrong.messages)
    assert (wrong.reward, wrong.done, text) == (0.0, False, SECOND_QUESTION)
    assert not np.array_equal(first, second)
    assert np.array_equal(second, sets[0].sharp[5])
    right = environment.step(say(str(sets[0].labels[5])))
    assert (right.reward, right.done) == (0.5, True)


def test_two_wrong_answers_pay_nothing(sets):
    environment = DigitsEnvironment(sets[0])
    environment.reset(5)
    environment.step(say(""))
    last = environment.step(say(f" {sets[0].labels[5]}"))
    assert (last.reward, last.done) == (0.0, True), "the digit and nothing else"
