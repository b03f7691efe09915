"""The layouts of a batch: every token of every sample is where `starts` says, and padding is neutral."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from training_samples import LAYOUTS, LENGTHS, PAD, image, sample, samples_of

from rollouts.errors import ArgumentError, BatchError
from rollouts.training import TrainingBatch

COLUMNS = {"input_ids": "token_ids", "loss_mask": "loss_mask", "logprobs": "logprobs", "advantages": "advantages"}


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(LENGTHS, LAYOUTS)
def test_every_layout_holds_each_sample_at_its_start_and_neutral_padding_elsewhere(lengths, layout):
    samples = samples_of(lengths)
    batch = TrainingBatch.from_samples(samples, pad_id=PAD, **layout)
    padding = np.ones(batch.input_ids.shape, bool)
    for number, ((row, column), each) in enumerate(zip(batch.starts.tolist(), samples, strict=True)):
        tokens = (row, slice(column, column + len(each)))
        assert padding[tokens].all()
        padding[tokens] = False
        for name, source in COLUMNS.items():
            np.testing.assert_array_equal(getattr(batch, name)[tokens], getattr(each, source))
        assert batch.position_ids[tokens].tolist() == list(range(len(each)))
        assert set(batch.sequence_ids[tokens].tolist()) == {number}
    assert (~batch.attention_mask.numpy() == padding).all()
    assert (batch.input_ids.numpy()[padding] == PAD).all()
    assert (batch.sequence_ids.numpy()[padding] == -1).all()
    for name in ("loss_mask", "logprobs", "advantages", "position_ids"):
        assert not getattr(batch, name).numpy()[padding].any()
    assert batch.input_ids.shape[1] % layout["multiple_of"] == 0


def test_the_tensors_have_the_documented_dtypes():
    batch = TrainingBatch.from_samples(samples_of([2, 3]), pad_id=PAD, layout="packed", multiple_of=4)
    assert {name: getattr(batch, name).dtype for name in (*COLUMNS, "attention_mask", "position_ids", "starts")} == {
        "input_ids": torch.int64,
        "loss_mask": torch.bool,
        "logprobs": torch.float32,
        "advantages": torch.float32,
        "attention_mask": torch.bool,
        "position_ids": torch.int64,
        "starts": torch.int64,
    }
    assert batch.sequence_ids.dtype == torch.int32
    assert batch.sequence_ids.tolist() == [[0, 0, 1, 1, 1, -1, -1, -1]]
    assert batch.lengths.tolist() == [2, 3]


def test_left_padding_ends_all_rows_in_one_column():
    batch = TrainingBatch.from_samples(samples_of([1, 3]), pad_id=PAD, side="left")
    assert batch.attention_mask.tolist() == [[False, False, True], [True, True, True]]
    assert batch.starts.tolist() == [[0, 2], [1, 0]]


@pytest.mark.parametrize(
    ("layout", "types"),
    [({"side": "left"}, [[0, 0, 0, 0], [0, 1, 2, 0]]), ({"layout": "packed"}, [[0, 0, 0, 1, 2, 0]])],
)
def test_token_types_follow_the_ranges_in_every_layout(layout, types):
    mixed = [sample(2), sample(4, images=[image(), image(modality="video")])]
    batch = TrainingBatch.from_samples(mixed, pad_id=PAD, **layout)
    assert batch.mm_token_type_ids.tolist() == types
    assert batch.has_media.tolist() == ([True] if layout == {"layout": "packed"} else [False, True])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"layout": "ragged"}, "layout is 'ragged'; pass one of padded, packed"),
        ({"side": "up"}, "side is 'up'; pass one of left, right"),
        ({"multiple_of": 0}, "multiple_of is 0; pass an integer of at least 1"),
        ({"layout": "packed", "side": "left"}, "a packed row is padded on the right"),
    ],
)
def test_layouts_that_do_not_exist_are_refused(arguments, text):
    with pytest.raises(ArgumentError, match=text):
        TrainingBatch.from_samples(samples_of([2]), pad_id=PAD, **arguments)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"input_ids": torch.zeros(3, dtype=torch.int64)}, r"input_ids is .*; pass an int64 tensor \(rows, columns\)"),
        (
            {"logprobs": torch.zeros(2, 3, dtype=torch.float64)},
            r"logprobs is torch.float64 \(2, 3\) on cpu; 2 samples in",
        ),
        ({"loss_mask": torch.zeros(2, 2, dtype=torch.bool)}, r"loss_mask is torch.bool \(2, 2\)"),
        ({"starts": torch.tensor([[0, 0], [2, 0]])}, r"sample 1 \(s1\) of 3 tokens is said to have 3 at .* \[2, 0\]"),
        ({"lengths": torch.tensor([3, 3])}, r"sample 0 \(s0\) of 2 tokens is said to have 3"),
        ({"media_dtype": "int8"}, "media_dtype is 'int8'; pass the name of a floating-point dtype of torch"),
        ({"media_dtype": "load"}, "media_dtype is 'load'"),
        ({"pad_id": -1}, "pad_id is -1; pass a token id"),
        ({"starts": torch.tensor([[0, 0], [0, 1]])}, r"sample 1 \(s1\) of 3 tokens is said to have 3 at .* \[0, 1\]"),
        ({"extras": {"values": [None, None]}}, "extra 'values' is .*; pass a TensorList of 2 rows"),
    ],
)
def test_tensors_that_contradict_the_samples_are_refused(changes, text):
    batch = TrainingBatch.from_samples(samples_of([2, 3]), pad_id=PAD)
    with pytest.raises((BatchError, ArgumentError), match=text):
        replace(batch, **changes)
