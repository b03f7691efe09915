"""What a trajectory refuses because it could not be stored, and what it copies."""

from fractions import Fraction

import numpy as np
import pytest
from test_trajectory_contents import completion, say

from renderers import RenderedTokens
from rollouts import Trajectory
from rollouts.errors import TrajectoryError
from transport import decode, encode


@pytest.mark.parametrize(
    "reward", [1, True, 0.5, np.float32(0.5), np.int64(2), np.bool_(True), np.array(0.5), Fraction(1, 2)]
)
def test_rewards_of_any_real_number_are_kept_as_floats(reward):
    trajectory = Trajectory("e")
    trajectory.add_turn(RenderedTokens([1]), completion(2), say("a"))
    trajectory.record_reward(reward, {})
    assert (trajectory.turns[0].reward, type(trajectory.turns[0].reward)) == (float(reward), float)


@pytest.mark.parametrize("field", ["error", "group_id", "episode_id"])
def test_text_that_cannot_be_stored_is_refused_where_it_is_assigned(field):
    trajectory = Trajectory("e")
    with pytest.raises(TrajectoryError, match=f"^{field} is "):
        setattr(trajectory, field, "half a pair: \udc00")


def test_what_an_info_holds_does_not_change_with_what_the_environment_does_later():
    torch = pytest.importorskip("torch")
    trajectory = Trajectory("e")
    trajectory.add_turn(RenderedTokens(token_ids=[1]), completion(2), {"role": "assistant", "content": "x"})
    info = {"seen": {1}, "raw": bytearray(b"a"), "grid": torch.zeros(2), "board": [[0, 0]], "pair": ([1],)}
    info["seen"].add(2)
    trajectory.record_reward(1.0, info)
    info["seen"].add((3, 4))  # which cannot be stored
    info["raw"] += b"b"
    info["grid"] += 1
    info["board"][0][0] = object()
    info["pair"][0].append(2)
    kept = decode(encode(trajectory)).turns[0].info
    assert (kept["seen"], kept["raw"], kept["grid"].tolist()) == ({1, 2}, b"a", [0, 0])
    assert (kept["board"], kept["pair"]) == ([[0, 0]], ([1],))
