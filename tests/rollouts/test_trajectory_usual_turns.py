"""Usual turns take a shorter way through `add_turn`; what it stores and refuses is what the general way does."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_trajectory import image, media, say

from renderers import RenderedTokens
from renderers.rendered import TokenSpan
from rollouts import Completion, FinishReason, TokenNode, Trajectory, Turn, WeightSpan
from rollouts.errors import InvalidTurnError
from transport import decode, encode

NUMBERS = st.integers(0, 3)
ODD_IDS = st.sampled_from([-1, 2**31, 2**70, 1.0, True, np.int64(2), None, "1"])
PICTURES = [image(b"a"), image(b"b", 1)]


@st.composite
def prompts(draw, so_far: list[int]) -> RenderedTokens:
    """A prompt that continues the tokens of an episode, or almost does."""
    kept = so_far[: draw(st.sampled_from([len(so_far), len(so_far), len(so_far), len(so_far) // 2]))]
    ids = kept + draw(st.lists(NUMBERS, max_size=4))
    if ids and draw(st.integers(0, 5)) == 0:
        ids[draw(st.integers(0, len(ids) - 1))] = draw(NUMBERS | ODD_IDS)
    at = [place for place in (1, 4) if place + 2 <= len(ids)]
    placed = [(draw(st.sampled_from(PICTURES)), place) for place in at if draw(st.integers(0, 3))]
    edge = draw(st.integers(0, len(ids) + 2))
    spans = (TokenSpan(0, edge, -1, False, False), TokenSpan(edge, len(ids) + draw(NUMBERS), 0, False, True))
    roles = [] if placed else ["user"]
    given_ids = draw(st.sampled_from([list, list, list, tuple]))(ids)
    return RenderedTokens(given_ids, draw(st.sampled_from([(), spans, spans])), roles, media(*placed))


@st.composite
def completions(draw) -> Completion:
    ids = draw(st.lists(NUMBERS, max_size=3))
    logprobs = -np.ones(len(ids), draw(st.sampled_from([np.float32, np.float32, np.float64])))
    if ids and draw(st.integers(0, 9)) == 0:
        logprobs[0] = draw(st.sampled_from([np.nan, 1.0, -np.inf, np.inf, -9999.0]))
    array = np.array(ids, draw(st.sampled_from([np.int32, np.int32, np.int64, np.uint8])))
    if draw(st.integers(0, 9)) == 0:
        array = draw(st.sampled_from([array[:, None], array[::-1], array.astype(float), array - array.dtype.type(9)]))
    spans = draw(st.sampled_from([(), (WeightSpan("0", 0, 1),), [WeightSpan("é", 0, 1)], (WeightSpan("0", 0, 9),)]))
    return Completion(0, array, logprobs, FinishReason.STOP, None, spans)


def outcome(trajectory, prompt, completion, settings):
    messages = [{"role": "user", "content": "Go on."}] if prompt.message_roles else ()
    try:
        return trajectory.add_turn(prompt, completion, say("a"), messages=messages, **settings)
    except InvalidTurnError as error:
        return str(error)


def values(record):
    return {
        field.name: (value.dtype, value.tolist()) if isinstance(value, np.ndarray) else value
        for field in dataclasses.fields(record)
        for value in [getattr(record, field.name)]
    }


@pytest.mark.slow
@given(st.data())
def test_an_episode_is_stored_and_refused_as_without_the_tokens_that_it_keeps(data):
    usual, general = Trajectory("e"), Trajectory("e")
    so_far: list[int] = []
    for _ in range(data.draw(st.integers(1, 6))):
        prompt, completion = data.draw(prompts(so_far)), data.draw(completions())
        settings = {"agent": data.draw(st.sampled_from(["", "", "", "b"])), "seconds": data.draw(st.floats(0, 1))}
        # It is made of its fields alone.
        general = dataclasses.replace(general, nodes=list(general.nodes), turns=list(general.turns))
        result = outcome(usual, prompt, completion, settings)
        assert outcome(general, prompt, completion, settings) == result
        if isinstance(result, int):
            so_far = usual.token_ids(result).tolist()
            usual.record_reward(1.0, {"n": 1})
            general.record_reward(1.0, {"n": 1})
    assert list(map(values, usual.nodes)) == list(map(values, general.nodes))
    assert (usual.turns, usual.forks) == (general.turns, general.forks)


@pytest.mark.slow
@given(st.data())
def test_what_a_turn_adds_passes_the_checks_of_its_classes(data):
    trajectory = Trajectory("e")
    for _ in range(3):
        so_far = trajectory.token_ids(len(trajectory.nodes) - 1).tolist() if trajectory.nodes else []
        outcome(trajectory, data.draw(prompts(so_far)), data.draw(completions()), {})
        if trajectory.turns:
            trajectory.record_reward(0.5, {"a": [1]})
    for record, kind in [(node, TokenNode) for node in trajectory.nodes] + [(turn, Turn) for turn in trajectory.turns]:
        assert type(record) is kind
        made = kind(**{field.name: getattr(record, field.name) for field in dataclasses.fields(record)})
        assert values(made) == values(record)
        arrays = [value for value in values(record) if isinstance(getattr(record, value), np.ndarray)]
        assert not any(getattr(record, name).flags.writeable for name in arrays)
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(record, "node" if kind is Turn else "parent", 0)
    back = decode(encode(trajectory))
    assert list(map(values, back.nodes)) == list(map(values, trajectory.nodes))


def sampled(*ids: int) -> Completion:
    return Completion(0, np.array(ids, np.int32), -np.ones(len(ids), np.float32), FinishReason.STOP)


@pytest.mark.parametrize("place", [0, 3])
@pytest.mark.parametrize("odd", [1.0, -1, "1", 2**31])
def test_tokens_of_earlier_turns_and_new_ones_are_checked_in_each_prompt(odd, place):
    trajectory = Trajectory("e")
    trajectory.add_turn(RenderedTokens([1, 2]), sampled(4), say("a"))
    ids = [1, 2, 4, 5]
    ids[place] = odd
    with pytest.raises(InvalidTurnError, match=r"prompt of .* holds no token ids"):
        trajectory.add_turn(RenderedTokens(ids), sampled(4), say("b"))
    assert len(trajectory.nodes) == 2


def test_arrays_of_two_axes_are_refused():
    trajectory = Trajectory("e")
    square = np.ones((2, 2), np.int32)
    with pytest.raises(InvalidTurnError, match="holds no token ids"):
        trajectory.add_turn(
            RenderedTokens([1]), Completion(0, square, -np.ones(4, np.float32), FinishReason.STOP), say("a")
        )
    with pytest.raises(InvalidTurnError, match=r"float32 of shape \(2, 2\)"):
        trajectory.add_turn(
            RenderedTokens([1]),
            Completion(0, np.ones(4, np.int32), -square.astype(np.float32), FinishReason.STOP),
            say("a"),
        )


def test_a_prompt_with_the_tokens_of_the_last_one_and_other_media_is_another_prompt():
    one, other = (image(name) for name in (b"a", b"b"))
    for third in (media((one, 1), (other, 4)), media((one, 1)), media((other, 1), (other, 4)), None):
        trajectory = Trajectory("e")
        trajectory.add_turn(RenderedTokens([0, 1, 1], multi_modal_data=media((one, 1))), sampled(5), say("a"))
        second = RenderedTokens([0, 1, 1, 5, 1, 1], multi_modal_data=media((one, 1), (other, 4)))
        trajectory.add_turn(second, sampled(6), say("b"))
        trajectory.add_turn(RenderedTokens([0, 1, 1, 5, 1, 1, 6, 7], multi_modal_data=third), sampled(8), say("c"))
        parents = [node.parent for node in trajectory.nodes]
        continued = {True: 3, False: 1 if third == media((one, 1)) else -1}[third == second.multi_modal_data]
        assert parents == [-1, 0, 1, 2, continued, 4]


@pytest.mark.parametrize(("begins", "is_new"), [(3, True), (2, False), (1, False)])
def test_a_message_that_begins_before_the_new_tokens_is_on_the_path_already(begins, is_new):
    trajectory = Trajectory("e")
    trajectory.add_turn(RenderedTokens([0, 1]), sampled(2), say("a"))
    prompt = RenderedTokens([0, 1, 2, 3, 4], (TokenSpan(begins, 4, 0, False, True),), ["user"])
    trajectory.add_turn(prompt, sampled(5), say("b"), messages=[{"role": "user", "content": "new"}])
    assert [message["content"] for message in trajectory.nodes[2].messages] == ["new"] * is_new
    assert trajectory.nodes[2].content.tolist() == [True, False]


def test_nodes_that_were_replaced_in_the_list_are_compared_with_the_next_prompt():
    trajectory = Trajectory("e")
    trajectory.add_turn(RenderedTokens([1, 2]), sampled(4), say("a"))
    trajectory.nodes[0] = dataclasses.replace(trajectory.nodes[0], token_ids=np.array([7, 8], np.int32))
    trajectory.add_turn(RenderedTokens([1, 2, 4, 5]), sampled(4), say("b"))
    assert [node.parent for node in trajectory.nodes] == [-1, 0, -1, 2]
    trajectory.add_turn(RenderedTokens([7, 8, 4, 6]), sampled(4), say("c"))
    assert [node.parent for node in trajectory.nodes] == [-1, 0, -1, 2, 1, 4]


def test_a_long_episode_is_stored_alike():
    trajectory = Trajectory("e")
    ids: list[int] = []
    for turn in range(9):
        ids += [turn] * 1000
        trajectory.add_turn(RenderedTokens(list(ids)), sampled(4), say("a"))
        ids.append(4)
    assert trajectory.token_ids(len(trajectory.nodes) - 1).tolist() == ids
    assert [node.parent for node in trajectory.nodes] == list(range(-1, 17))


class WithNote(Trajectory):
    """A subclass whose instances have attributes of their own."""


@pytest.mark.parametrize("copied", [copy.copy, lambda value: pickle.loads(pickle.dumps(value))])
@pytest.mark.parametrize("is_finished", [False, True])
def test_a_copy_of_a_subclass_has_its_attributes(copied, is_finished):
    trajectory = WithNote("e")
    trajectory.note = "kept"
    trajectory.add_turn(RenderedTokens([1, 2]), sampled(4), say("a"))
    if is_finished:
        trajectory.finish()
    again = copied(trajectory)
    assert (again.note, again.finished, again.num_turns) == ("kept", is_finished, 1)


def test_lists_of_a_finished_trajectory_can_be_made_anew():
    trajectory = Trajectory("e")
    trajectory.finish()
    again = dataclasses.replace(trajectory, nodes=[], turns=[])
    assert again.add_turn(RenderedTokens([1, 2]), sampled(4), say("a")) == 1
