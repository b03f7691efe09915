"""Differences between the tokens of a branch and those of a render."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollouts.view import drift
from rollouts.view.drift import token_differences

IDS = st.lists(st.integers(0, 3), max_size=30)


def check(ids, rendered):
    """Replacing each difference gives the render."""
    differences = token_differences(ids, rendered)
    replaced = list(ids)
    for each in reversed(differences):
        assert rendered[each.rendered_start : each.rendered_start + len(each.rendered_ids)] == each.rendered_ids
        replaced[each.start : each.end] = each.rendered_ids
    assert replaced == rendered
    assert bool(differences) == (ids != rendered)


@given(IDS, IDS)
def test_replacing_each_difference_gives_the_render(ids, rendered):
    check(ids, rendered)


@given(IDS, IDS, st.integers(1, 4), st.integers(0, 3000))
def test_replacing_each_difference_of_divided_parts_gives_the_render(ids, rendered, run, work):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drift, "_RUN", run)
        patch.setattr(drift, "_MAX_WORK", work)
        check(ids, rendered)


def test_long_parts_without_a_common_run_are_one_difference_that_says_so():
    ids, rendered = [1, *[2] * 5000, 9], [1, *[3] * 6000, 9]
    (difference,) = token_differences(ids, rendered)
    assert (difference.start, difference.end, len(difference.rendered_ids)) == (1, 5001, 6000)
    assert difference.is_coarse
