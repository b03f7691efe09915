"""The token tree: what the engine saw, shared prefixes once, images on the node that introduced them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from renderers import MediaItem, MediaSource, MultiModalData, PlaceholderRange, RenderedTokens
from renderers.media.item import PixelScale
from rollouts import Completion, FinishReason, Trajectory, WeightSpan
from transport import decode, encode


def completion(*ids: int, version: str = "0") -> Completion:
    count = len(ids)
    logprobs = -np.arange(1, count + 1, dtype=np.float32)
    return Completion(
        0, np.array(ids, np.int32), logprobs, FinishReason.STOP, ids[-1], (WeightSpan(version, 0, count),)
    )


def image(name: bytes, tokens: int = 2) -> MediaItem:
    return MediaItem("image", f"hash-{name.decode()}", MediaSource.of(name), {}, tokens, PixelScale())


def media(*placed: tuple[MediaItem, int]) -> MultiModalData:
    return MultiModalData.from_items((item, PlaceholderRange(at, item.num_tokens)) for item, at in placed)


def prompted(ids: list[int], media: MultiModalData | None = None) -> RenderedTokens:
    return RenderedTokens(list(ids), multi_modal_data=media)


def say(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_a_turn_that_extends_the_last_one_stores_only_what_is_new():
    trajectory = Trajectory("e")
    trajectory.add_turn(prompted([1, 2, 3]), completion(4, 5), say("a"))
    trajectory.add_turn(prompted([1, 2, 3, 4, 5, 6, 7]), completion(8), say("b"))

    assert [node.token_ids.tolist() for node in trajectory.nodes] == [[1, 2, 3], [4, 5], [6, 7], [8]]
    assert [node.parent for node in trajectory.nodes] == [-1, 0, 1, 2]
    assert trajectory.leaves() == [3]
    assert trajectory.forks == 0


def test_equal_tokens_with_another_image_are_another_branch():
    trajectory = Trajectory("e")
    trajectory.add_turn(prompted([9, 0, 0, 2], media((image(b"a"), 1))), completion(1), say("x"))
    trajectory.add_turn(prompted([9, 0, 0, 2, 1, 5], media((image(b"b"), 1))), completion(1), say("y"))

    names = [[r.mm_hash for r in trajectory.media(leaf)] for leaf in trajectory.leaves()]
    assert names == [["hash-a"], ["hash-b"]]
    assert trajectory.forks == 1


TURNS = st.lists(
    st.tuples(st.integers(-1, 5), st.lists(st.integers(0, 3), min_size=1, max_size=4), st.integers(0, 3)),
    min_size=1,
    max_size=8,
)


@given(TURNS)
def test_every_leaf_read_from_the_root_is_what_some_turn_saw(turns):
    """Each turn extends an earlier turn (or starts anew) with tokens of a tiny alphabet, so that prefixes recur."""
    trajectory = Trajectory("e")
    seen: list[list[int]] = []
    for base, added, sampled in turns:
        prompt = [*(seen[base % len(seen)] if seen and base >= 0 else []), *added]
        node = trajectory.add_turn(prompted(prompt), completion(sampled), say("x"))
        seen.append([*prompt, sampled])
        assert trajectory.token_ids(node).tolist() == seen[-1]
    for turn, expected in zip(trajectory.turns, seen, strict=True):
        assert trajectory.token_ids(turn.node).tolist() == expected
    leaves = {tuple(trajectory.token_ids(leaf).tolist()) for leaf in trajectory.leaves()}
    assert leaves <= {tuple(ids) for ids in seen}


@pytest.mark.slow
@given(TURNS)
def test_a_trajectory_crosses_the_wire_unchanged(turns):
    trajectory = Trajectory("e", seed=3, group_id="g")
    seen: list[list[int]] = []
    for index, (base, added, sampled) in enumerate(turns):
        prompt = [*(seen[base % len(seen)] if seen and base >= 0 else []), *added, 0, 0]
        item = image(b"%d" % (index % 2))
        node = trajectory.add_turn(prompted(prompt, media((item, len(prompt) - 2))), completion(sampled), say("x"))
        trajectory.record_reward(index / 2, {"turn": index})
        seen.append([*prompt, sampled])
        assert trajectory.media(node)[-1].mm_hash == item.mm_hash
    copy = decode(encode(trajectory))

    assert (copy.episode_id, copy.seed, copy.group_id, copy.turns) == ("e", 3, "g", trajectory.turns)
    for node, other in zip(trajectory.nodes, copy.nodes, strict=True):
        assert (node.parent, node.weight_spans, node.media) == (other.parent, other.weight_spans, other.media)
        for column in ("token_ids", "sampled", "logprobs"):
            ours, theirs = getattr(node, column), getattr(other, column)
            assert ours.dtype == theirs.dtype
            np.testing.assert_array_equal(ours, theirs)
    for turn in trajectory.turns:
        assert copy.media(turn.node) == trajectory.media(turn.node)
    sources = {reference.source.digest: bytes(reference.source.data) for reference in copy.all_media()}
    assert sources == {reference.source.digest: reference.source.data for reference in trajectory.all_media()}
