"""A turn attaches to the node that the rule names, in any tree: compared with the rule in plain Python."""

import copy

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_trajectory import image, media, say

from renderers import RenderedTokens
from rollouts import Completion, FinishReason, Trajectory
from transport import decode, encode

TOKENS = st.lists(st.integers(0, 1), max_size=3)
PICTURES = [image(b"a", 1), image(b"b", 1), image(b"a", 2)]
SENT = {
    "as it is": lambda trajectory: trajectory,
    "copied": copy.copy,
    "decoded": lambda trajectory: decode(encode(trajectory)),
}


def sampled(ids: list[int]) -> Completion:
    return Completion(0, np.array(ids, np.int32), -np.ones(len(ids), np.float32), FinishReason.STOP)


def what_it_holds(ids, placed):
    """Each token with the image that begins there, as (token, hash, length)."""
    begins = {at: (item.mm_hash, item.num_tokens) for item, at in placed}
    return [(token, *begins.get(at, ("", 0))) for at, token in enumerate(ids)]


def path_holds(trajectory: Trajectory, leaf: int):
    if leaf == -1:
        return []
    begins = {one.placeholder.offset: (one.mm_hash, one.placeholder.length) for one in trajectory.media(leaf)}
    return [(token, *begins.get(at, ("", 0))) for at, token in enumerate(trajectory.token_ids(leaf).tolist())]


def parent_by_the_rule(trajectory: Trajectory, prompt, agent: str, after: int | None) -> int:
    """The deepest node whose path begins the prompt; of several, the last that is no completion of another agent."""

    def begins(node: int) -> bool:
        held = path_holds(trajectory, node)
        return prompt[: len(held)] == held

    possible = [node for node in range(-1, len(trajectory.nodes)) if begins(node)]
    if after in possible:
        possible = [node for node in possible if node != -1 and after in trajectory.path(node)]
    length = max(len(path_holds(trajectory, node)) for node in possible)
    deepest = [node for node in possible if len(path_holds(trajectory, node)) == length]
    of_others = {turn.node for turn in trajectory.turns if turn.agent != agent}
    return next((node for node in reversed(deepest) if node not in of_others), deepest[0])


@st.composite
def prompts(draw, trajectory: Trajectory):
    """A prompt that begins with a path of the tree, or almost does: its ids, and its images with their places."""
    leaf = draw(st.integers(-1, len(trajectory.nodes) - 1)) if trajectory.nodes else -1
    held = path_holds(trajectory, leaf)
    held = held[: draw(st.sampled_from([len(held), len(held), len(held) - 1]))]
    ids = [token for token, _, _ in held] + draw(TOKENS)
    placed, end = [], 0
    for at in range(len(ids)):
        earlier = [one for one in PICTURES if at < len(held) and held[at][1:] == (one.mm_hash, one.num_tokens)]
        chosen = earlier or ([draw(st.sampled_from(PICTURES))] if at >= len(held) and draw(st.booleans()) else [])
        if chosen and draw(st.integers(0, 9)) == 0:
            chosen = [draw(st.sampled_from(PICTURES))]  # another one at a place that the path has, too
        if chosen and at >= end and at + chosen[0].num_tokens <= len(ids):
            placed.append((chosen[0], at))
            end = at + chosen[0].num_tokens
    return ids, placed


@pytest.mark.slow
@given(st.data())
def test_each_turn_of_several_agents_attaches_to_the_node_that_the_rule_names(data):
    trajectory = Trajectory("e")
    for _ in range(data.draw(st.integers(1, 9))):
        trajectory = SENT[data.draw(st.sampled_from(["as it is"] * 4 + list(SENT)))](trajectory)
        ids, placed = data.draw(prompts(trajectory))
        agent = data.draw(st.sampled_from(["", "a", "b"]))
        after = data.draw(st.none() | st.integers(0, len(trajectory.nodes) - 1)) if trajectory.nodes else None
        parent = parent_by_the_rule(trajectory, what_it_holds(ids, placed), agent, after)
        count, length = len(trajectory.nodes), len(path_holds(trajectory, parent))

        prompt = RenderedTokens(ids, multi_modal_data=media(*placed) if placed else None)
        trajectory.add_turn(prompt, sampled(data.draw(TOKENS)), say("a"), agent=agent, after=after)

        assert trajectory.nodes[count].parent == parent
        assert len(trajectory.nodes) - count == (2 if len(ids) > length else 1)
