"""The check of placeholder ranges against the tokens that they lie in."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from renderers import PlaceholderRange
from renderers.placement import placement_error


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), max_size=6), st.integers(0, 3))
def test_ranges_that_follow_each_other_inside_the_tokens_are_right(pairs: list[tuple[int, int]], rest: int) -> None:
    ends = list(itertools.accumulate(gap + length for gap, length in pairs))
    placeholders = [PlaceholderRange(end - length, length) for end, (_, length) in zip(ends, pairs, strict=True)]
    num_tokens = (ends[-1] if ends else 0) + rest
    assert placement_error(placeholders, num_tokens) is None
    if placeholders:
        assert placement_error(placeholders, ends[-1] - 1) is not None


@pytest.mark.parametrize(
    ("placeholders", "said"),
    [
        ([PlaceholderRange(7, 6)], "outside of the 12 tokens"),
        ([PlaceholderRange(-1, 6)], "outside of the 12 tokens"),
        ([PlaceholderRange(3, 0)], "of 0 tokens at 3"),
        ([PlaceholderRange(1, 6), PlaceholderRange(5, 6)], "before the end of the previous one at 7"),
        *(
            ([PlaceholderRange(1, 6, runs)], "embed_runs")
            for runs in (((0, 7),), ((-1, 2),), ((3, 5), (1, 2)), ((4, 2),), ((0, 3), (2, 5)))
        ),
    ],
)
def test_a_range_that_is_empty_overlaps_or_reaches_outside_is_found(
    placeholders: list[PlaceholderRange], said: str
) -> None:
    found = placement_error(placeholders, 12)
    assert found is not None
    assert found.position == len(placeholders) - 1
    assert said in found.reason
