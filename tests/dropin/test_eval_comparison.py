"""The comparison of evaluations finds what it must find."""

from __future__ import annotations

import dataclasses

import pytest
from eval_comparison import Side, table, violations

THEIRS = Side("theirs", 0.625, 0.5, 8, 2.0, 3.0, 2.5)
OURS = dataclasses.replace(THEIRS, name="ours", seconds=1.0)


def test_equal_results_are_no_violation_whatever_the_speed():
    assert violations([THEIRS, OURS], 8) == []
    assert "8    2.0x" in table("title", [THEIRS, OURS])


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"mean_reward": 0.6250000000000001}, "ours: mean_reward 0.6250000000000001, with verifiers 0.625"),
        ({"pass_at_1": 0.25}, "ours: pass_at_1 0.25, with verifiers 0.5"),
        ({"episodes": 7}, "ours: 7 episodes, not 8"),
    ],
)
def test_each_violation_is_found(change, found):
    assert violations([THEIRS, dataclasses.replace(OURS, **change)], 8) == [found]
