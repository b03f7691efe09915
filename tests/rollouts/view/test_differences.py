"""Differences between the tokens of a branch and those of a render."""

from hypothesis import given
from hypothesis import strategies as st

from rollouts.view.drift import token_differences

IDS = st.lists(st.integers(0, 3), max_size=30)


@given(IDS, IDS)
def test_replacing_each_difference_gives_the_render(ids, rendered):
    differences = token_differences(ids, rendered)
    replaced = list(ids)
    for each in reversed(differences):
        assert rendered[each.rendered_start : each.rendered_start + len(each.rendered_ids)] == each.rendered_ids
        replaced[each.start : each.end] = each.rendered_ids
    assert replaced == rendered
    assert bool(differences) == (ids != rendered)


def test_long_parts_that_differ_are_one_difference_around_which_all_tokens_are_equal():
    ids, rendered = [1, *[2] * 5000, 9], [1, *[3] * 6000, 9]
    (difference,) = token_differences(ids, rendered)
    assert (difference.start, difference.end, len(difference.rendered_ids)) == (1, 5001, 6000)
