"""What a completion means in an action space of Gymnasium, and how the space is described."""

import contextlib

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from rollouts.environments.gymnasium.actions import describe_actions, parse_action
from rollouts.errors import RolloutsError

FOUR = spaces.Discrete(4)
NAMES = ["left", "down", "right", "up"]


@given(st.integers(1, 50), st.integers(-20, 20), st.data())
def test_every_discrete_action_is_read_from_its_number(count, start, data):
    space = spaces.Discrete(count, start=start)
    action = data.draw(st.integers(start, start + count - 1))
    for text in (f"{action}", f"I take {action}.", f"{action}.0"):
        read = parse_action(text, space)
        assert (read, type(read)) == (action, int)
        assert space.contains(read)


@pytest.mark.slow
@given(st.lists(st.floats(-1, 1, width=32), min_size=6, max_size=6), st.sampled_from([", ", " ", ";\n"]))
def test_the_numbers_of_a_box_are_read_in_order_and_have_its_shape_and_dtype(numbers, separator):
    space = spaces.Box(-1, 1, (2, 3), np.float32)
    action = parse_action(separator.join(map(repr, numbers)), space)
    assert action.tolist() == np.array(numbers, np.float32).reshape(2, 3).tolist()
    assert space.contains(action)


@given(st.text(max_size=40))
def test_any_text_is_an_action_of_the_space_or_refused_with_a_reason(text):
    for space, names in ((FOUR, NAMES), (FOUR, ()), (spaces.Box(-2, 2, (1,)), ())):
        with contextlib.suppress(ValueError):
            assert space.contains(parse_action(text, space, names))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "there is no action"),
        ("upwards", "there is no action"),
        ("left, then up", "more than one action in the answer: left, up"),
        ("down (2)", "more than one action in the answer: down, right"),
        ("4", "4 is not the number of an action"),
        ("-1", "-1 is not the number of an action"),
        ("\u22121", "\u22121 is not the number of an action"),
        ("1.5", "1.5 is not the number of an action"),
        ("1e400", "1e400 is not the number of an action"),
        ("1.5x", "there is no action"),
    ],
)
def test_a_text_without_one_action_is_refused(text, reason):
    with pytest.raises(ValueError, match=reason):
        parse_action(text, FOUR, NAMES)


@pytest.mark.parametrize("minus", list("-\u2212\u2010\u2011\u2013\ufe63\uff0d"), ids=ascii)
def test_a_minus_directly_before_a_number_is_its_sign(minus):
    befores = (
        "",
        "I push with ",
        "Well...",
        "negative: ",
        "minus = ",
        "a = ",
        "a=",
        "(",
        "**",
        "$",
        "<action>",
        "=> ",
    )
    for before in befores:
        for written in (minus, f"&#x{ord(minus):x};"):
            assert parse_action(f"{before}{written}1", spaces.Discrete(3, start=-1)) == -1
        numbers = parse_action(f"{before}&#{ord(minus)};0.5, {minus}.25 1e-1", spaces.Box(-1, 1, (3,), np.float64))
        assert numbers.tolist() == [-0.5, -0.25, 0.1]


@pytest.mark.parametrize(
    "signs",
    [
        "- |\u2212 |-\t|-\u200b|\u2013\u00a0|- **|-$|-(|{-}",
        "--|-+|- -|\u2014|\u00b1|\u207b",
        "minus |Minus\n|<b>minus</b> |\\text{minus }|\\text{minus}|negative |neg. |minus **|minus <b>|\\minus ",
        'negative: |Minus = |neg.:|negative=|(negative) |negative (|"minus", |**negative:** |negative -> |negative;\n',
        "x-|1-|1\u2013|1 - ",
        "Action: -\n|-\n\n|--- |--\n|x\n---\n- ",
        "-\\text{|-\\mathbf{|-\\boxed{|-\\left(|-\\textcolor{red}{|-<b>|<mo>\u2212</mo><mn>|-<i class='a b'>|a<b -<b>",
        "&#x2212; |&ndash; |&#8212;|<mo>&minus;</mo> ",
        "5e -|5e\u2013 |5^|0.5.|-1..|2e+ ",
    ],
    ids=[
        "apart from the number",
        "another mark",
        "a word",
        "a word and marks",
        "after another word",
        "on another line",
        "before its markup",
        "an entity",
        "within a number",
    ],
)
def test_a_number_whose_sign_is_not_clear_is_refused(signs):
    for sign in signs.split("|"):
        for space in (spaces.Discrete(3, start=-1), spaces.Box(-1, 1, (1,)), spaces.Box(-1, 1, (2,))):
            with pytest.raises(ValueError, match=r"(?s)not clear which number .*1 is; write it in digits"):
                parse_action(f"{sign}1", space)


@pytest.mark.parametrize(
    "text",
    [
        *("---\n\n2", "Action -> 2", "--> 2", "\u2014> 2", "left-handed: 2", "2 - as I said", "+2", "- I push\n2"),
        *("The speed is negative. 2", "Negative!\n2", "negative, so 2", "The minus key: 2"),
        *("2\u2026", "\u2026 2", "\u21e2 2", "<left-action>2", "\\boxed{2}"),
    ],
)
def test_a_dash_that_is_no_sign_of_a_number_does_not_matter(text):
    assert parse_action(text, spaces.Discrete(4, start=-1)) == 2


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("0.5", "the answer has 1 numbers; an action has 2"),
        ("0.5 0.5 0.5", "the answer has 3 numbers; an action has 2"),
        ("0.5, 1.5", "number 2 of the action is 1.5, not between -1 and 1"),
    ],
)
def test_other_numbers_than_those_of_the_box_are_refused(text, reason):
    with pytest.raises(ValueError, match=reason):
        parse_action(text, spaces.Box(-1, 1, (2,)))


def test_the_bound_of_a_box_is_an_action_although_its_dtype_has_no_such_number():
    space = spaces.Box(-0.1, 0.7, (1,), np.float32)
    for text in ("-0.1", "0.7"):
        assert space.contains(parse_action(text, space))


@pytest.mark.parametrize(
    ("space", "names", "text"),
    [
        (spaces.Discrete(3, start=-1), (), "Answer with the number of an action, from -1 to 1."),
        (spaces.Box(-2, 2, (1,)), (), "Answer with a number from -2 to 2."),
        (spaces.Box(-1, 1, (2, 3)), (), "Answer with 6 numbers, each from -1 to 1, separated by commas."),
        (
            spaces.Box(np.array([0, -np.inf]), np.array([0.5, np.inf]), dtype=np.float64),
            (),
            "Answer with 2 numbers, separated by commas: number 1 from 0 to 0.5; number 2 from minus infinity to "
            "infinity.",
        ),
    ],
    ids=["numbers", "one number", "numbers of one range", "numbers of several ranges"],
)
def test_a_space_is_described_with_what_an_answer_must_be(space, names, text):
    assert describe_actions(space, names) == text


@pytest.mark.parametrize(
    ("text", "action"), [("left", 0), ("I turn left.", 1), ("TURN LEFT-2", 2), ("1", 1), ("turn left, turn left", 1)]
)
def test_a_name_or_number_within_a_longer_name_is_no_action_of_its_own(text, action):
    assert parse_action(text, spaces.Discrete(3), ["left", "turn left", "turn left-2"]) == action


def test_a_name_that_is_the_number_of_another_action_is_refused_before_the_first_turn():
    with pytest.raises(RolloutsError, match="has action 0 with the name '1', the number of another action"):
        describe_actions(spaces.Discrete(2), ["1", "0"])
    describe_actions(spaces.Discrete(2, start=1), ["1", "2"])
    assert parse_action("2", spaces.Discrete(2, start=1), ["1", "2"]) == 2


@pytest.mark.parametrize("number", ["1e999", "-1e999", "1e39", "9" * 300_000])
def test_a_box_without_bounds_takes_no_number_that_its_dtype_cannot_hold(number):
    with pytest.raises(ValueError, match=r"number 1 of the action is .*, too large for float32") as refused:
        parse_action(number, spaces.Box(-np.inf, np.inf, (1,), np.float32))
    assert len(str(refused.value)) < 120
