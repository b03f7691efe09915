"""Lists of one tensor per row."""

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollouts.errors import BatchError
from rollouts.training import TensorList
from transport import decode, encode


def rows(*sizes):
    return TensorList([None if size is None else torch.full((size, 2), float(size)) for size in sizes])


def sizes(tensors):
    return [None if tensor is None else len(tensor) for tensor in tensors]


@given(st.lists(st.none() | st.integers(0, 4), max_size=6), st.slices(6))
def test_a_slice_is_a_tensor_list_of_what_the_slice_selects(lengths, part):
    selected = rows(*lengths)[part]
    assert isinstance(selected, TensorList)
    assert sizes(selected) == lengths[part]


def test_an_integer_gives_the_tensor_of_a_row_and_negative_counts_from_the_end():
    tensors = rows(1, None, 3)
    assert len(tensors[-1]) == 3
    assert tensors[1] is None
    assert sizes(tensors[[2, 0]]) == [3, 1]


def test_cat_concatenates_the_present_tensors():
    assert rows(1, None, 3).cat().tolist() == [[1.0, 1.0], *[[3.0, 3.0]] * 3]
    assert rows(None).cat() is None
    assert rows().cat() is None


def test_cat_names_the_row_that_does_not_fit():
    with pytest.raises(
        BatchError, match=r"row 2 is torch.int64 of shape \(1, 2\), row 0 torch.float32 of shape \(1, 2\)"
    ):
        TensorList([torch.zeros(1, 2), None, torch.zeros(1, 2, dtype=torch.int64)]).cat()
    with pytest.raises(BatchError, match="row 1 is"):
        TensorList([torch.zeros(1, 2), torch.zeros(1, 3)]).cat()


def test_parts_and_concatenating_keep_absent_rows():
    tensors = rows(1, None, 3)
    assert sizes(tensors[:2]) == [1, None]
    assert TensorList.concat([tensors[:2], tensors[2:]]) == tensors


def test_a_dtype_changes_floating_point_tensors_only():
    moved = TensorList([torch.ones(2), torch.ones(2, dtype=torch.int64), None]).to("cpu", dtype=torch.float16)
    assert [None if t is None else t.dtype for t in moved] == [torch.float16, torch.int64, None]


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


@pytest.mark.parametrize("copied", [lambda t: pickle.loads(pickle.dumps(t)), lambda t: decode(encode(t))])
def test_a_copy_has_the_elements_of_a_view_and_not_its_storage(copied):
    whole = torch.rand(1000, 64)
    part = TensorList([whole[3:5], None, whole[:1].T, torch.tensor(1.0)])
    assert copied(part) == part
    assert len(pickle.dumps(part)) < 10_000
    assert copied(part)[0].untyped_storage().nbytes() < 10_000


@pytest.mark.parametrize("value", [5, torch.zeros(2), [1.0]])
def test_only_tensors_and_none_are_rows(value):
    with pytest.raises(BatchError, match=r"TensorList"):
        TensorList(value)
