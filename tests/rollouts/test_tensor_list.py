"""Lists of one tensor per row."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollouts.training import TensorList


def rows(*sizes):
    return TensorList([None if size is None else torch.full((size, 2), float(size)) for size in sizes])


def sizes(tensors):
    return [None if tensor is None else len(tensor) for tensor in tensors]


@given(st.lists(st.none() | st.integers(0, 4), max_size=6), st.slices(6))
def test_a_slice_is_a_tensor_list_of_what_the_slice_selects(lengths, part):
    selected = rows(*lengths)[part]
    assert isinstance(selected, TensorList)
    assert sizes(selected) == lengths[part]


@pytest.mark.parametrize(
    "other",
    [
        TensorList([torch.ones(2, dtype=torch.float64)]),
        TensorList([torch.ones(2, 1)]),
        TensorList([None]),
        TensorList([]),
        TensorList([torch.zeros(2)]),
        [torch.ones(2)],
    ],
)
def test_lists_that_differ_in_dtype_shape_value_or_presence_are_not_equal(other):
    assert TensorList([torch.ones(2)]) == TensorList([torch.ones(2)])
    assert TensorList([torch.ones(2)]) != other
