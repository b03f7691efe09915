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


def test_the_split_covers_every_digit_once_and_keeps_their_shares(sets):
    train, held_out = sets
    assert len(train) + len(held_out) == 1797
    together = {image.tobytes() for part in sets for image in part.images}
    from sklearn.datasets import load_digits

    assert len(together) == len({image.tobytes() for image in load_digits().images})
    shares = np.bincount(held_out.labels) / np.bincount(np.concatenate([train.labels, held_out.labels]))
    assert (abs(shares - 0.2) < 0.01).all()


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
