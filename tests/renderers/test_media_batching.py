"""Items become the tensors of a batch by what they say of themselves."""

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from renderers import MediaSource
from renderers.errors import MediaError
from renderers.media.item import MediaItem, PackedArray, TensorField
from renderers.messages import Modality
from renderers.vision.batching import batch_tensors

ROWS = TensorField("flat")
ONE = TensorField("batched")


def item(
    tensors: Mapping[str, np.ndarray | PackedArray],
    fields: Mapping[str, TensorField],
    modality: Modality = "image",
) -> MediaItem:
    return MediaItem(modality, "hash", MediaSource.of(b"image"), tensors, 1, scale=None, fields=fields)


def items_of(name: str, field: TensorField, arrays: Sequence[np.ndarray]) -> list[MediaItem]:
    return [item({name: array}, {name: field}) for array in arrays]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=5))
def test_rows_of_items_follow_one_another(counts: list[int]) -> None:
    arrays = [np.full((count, 3), index, dtype=np.float32) for index, count in enumerate(counts)]
    batch = batch_tensors(items_of("pixels", ROWS, arrays))["pixels"]
    assert batch.dtype == np.float32
    assert batch[:, 0].tolist() == [index for index, count in enumerate(counts) for _ in range(count)]


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=4), st.sampled_from([-1.0, 0.0, 7.0])
)
def test_stacked_items_are_padded_at_their_ends_to_the_largest(shapes: list[tuple[int, int]], pad: float) -> None:
    arrays = [np.full(shape, 100 + index, dtype=np.int64) for index, shape in enumerate(shapes)]
    batch = batch_tensors(items_of("pixels", TensorField("batched", pad), arrays))["pixels"]
    assert batch.dtype == np.int64
    assert batch.shape == (len(shapes), max(h for h, _ in shapes), max(w for _, w in shapes))
    for index, (height, width) in enumerate(shapes):
        for (row, column), value in np.ndenumerate(batch[index]):
            assert value == (100 + index if row < height and column < width else pad)


@pytest.mark.parametrize(
    ("field", "arrays", "reason"),
    [
        (ROWS, [np.zeros((1, 2)), np.zeros((1, 3))], r"has size 2 .* has size 3"),
        (ROWS, [np.zeros(1, dtype=np.float32), np.zeros(1)], r"different types .*float32.*float64"),
        (ONE, [np.zeros(2), np.zeros(3)], "not seen to pad"),
        (TensorField("batched", 0.0), [np.zeros(2), np.zeros((2, 2))], "make batches of equal shapes"),
        (TensorField("shared"), [np.zeros(2), np.ones(2)], "all items share has different values"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(field: TensorField, arrays: list[np.ndarray], reason: str) -> None:
    with pytest.raises(MediaError, match=f"pixels: .*{reason}"):
        batch_tensors(items_of("pixels", field, arrays))


@pytest.mark.parametrize(
    "other",
    [
        item({"pixels": np.zeros((1, 2))}, {"pixels": ONE}),
        item({"pixels": np.zeros((1, 2)), "mask": np.zeros(1)}, {"pixels": ROWS, "mask": ROWS}),
        item({"pixels": np.zeros((1, 2))}, {}),
        item({}, {"pixels": ROWS}),
    ],
    ids=["another kind", "one more", "unknown", "missing"],
)
def test_items_of_different_processors_are_not_mixed(other: MediaItem) -> None:
    first = item({"pixels": np.zeros((1, 2))}, {"pixels": ROWS})
    with pytest.raises(MediaError, match="process them with one processor") as caught:
        batch_tensors([first, other])
    assert caught.value.digest == other.source.digest


def test_modalities_that_lay_one_tensor_out_differently_are_not_mixed() -> None:
    image = item({"pixels": np.zeros((1, 2))}, {"pixels": ROWS})
    video = item({"pixels": np.zeros((1, 2))}, {"pixels": ONE}, "video")
    with pytest.raises(MediaError, match="pixels: the modalities of a batch"):
        batch_tensors([image, video])
