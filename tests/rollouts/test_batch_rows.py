"""Operations on the rows of a batch: no token moves to another sample, no value changes, no image is copied."""

import copy
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from training_samples import LAYOUTS, LENGTHS, PAD, image, sample, samples_of

from rollouts.errors import ArgumentError, BatchError
from rollouts.training import TensorList, TrainingBatch
from transport import MalformedError, decode, encode


def batch_of(lengths, **layout):
    return TrainingBatch.from_samples(samples_of(lengths), pad_id=PAD, **layout)


def names(batch):
    return [each.name for each in batch.samples]


def mixed_batch():
    return TrainingBatch.from_samples(
        [sample(3, name="text"), sample(6, images=[image(seed=1), image(8, seed=2)], name="images")], pad_id=PAD
    )


# Selection.


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(LENGTHS, LAYOUTS, st.data())
def test_a_selection_equals_a_batch_of_the_selected_samples(lengths, layout, data):
    batch = batch_of(lengths, **layout)
    chosen = data.draw(st.lists(st.integers(-len(lengths), len(lengths) - 1), min_size=1, max_size=8))
    samples = samples_of(lengths)
    assert batch[chosen] == TrainingBatch.from_samples([samples[i] for i in chosen], pad_id=PAD, **layout)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(LENGTHS, LAYOUTS, st.slices(7))
def test_a_slice_selects_what_it_selects_of_a_list(lengths, layout, part):
    assert names(batch_of(lengths, **layout)[part]) == [f"s{i}" for i in range(len(lengths))][part]


def test_the_last_sample_is_at_index_minus_one():
    """SkyRL's TensorBatch turns `[-1]` into the slice -1:0, which is empty."""
    batch = batch_of([2, 3])
    assert names(batch[-1]) == ["s1"]
    assert batch[-1] == batch[1:] == batch[1]


def test_an_empty_selection_is_an_empty_batch_that_concatenates():
    batch = batch_of([2, 3])
    for empty in (batch[5:], batch[[]], batch[torch.zeros(2, dtype=torch.bool)]):
        assert len(empty) == 0
        assert empty.input_ids.shape == (0, 0)
        assert not empty.has_media.any()
        assert TrainingBatch.concat([empty, batch]) == batch


def test_a_mask_selects_the_samples_where_it_is_true():
    batch = batch_of([1, 2, 3])
    for mask in ([True, False, True], np.array([True, False, True]), torch.tensor([True, False, True])):
        assert names(batch[mask]) == ["s0", "s2"]


@pytest.mark.parametrize(
    ("index", "text"),
    [
        (2, "there is no row 2; pass numbers from -2 to 1"),
        ([0, -3], "there is no row -3"),
        ([True], "a mask of 1 values for 2 rows; pass one for each row"),
        ("0", "pass an integer, a slice, a list of integers or a mask"),
        (0.0, "pass an integer, a slice"),
        ([[0]], "pass an integer, a slice"),
        (None, "pass an integer, a slice"),
    ],
)
def test_an_index_that_selects_nothing_that_exists_is_refused(index, text):
    for rows in (batch_of([2, 3]), TensorList([None, None])):
        with pytest.raises(IndexError, match=text):
            rows[index]


def test_values_changed_in_the_tensors_survive_every_operation():
    batch = batch_of([2, 3, 4])
    batch.advantages.mul_(3)
    expected = batch.advantages[1, :3]
    assert torch.equal(batch[[1]].advantages[0], expected)
    assert torch.equal(decode(encode(batch)).advantages, batch.advantages)
    assert torch.equal(pickle.loads(pickle.dumps(batch)).advantages, batch.advantages)
    assert torch.equal(TrainingBatch.concat([batch[:1], batch[1:]]).advantages, batch.advantages)


# Parts.


@settings(max_examples=30, deadline=None)
@given(LENGTHS, LAYOUTS, st.integers(1, 9))
def test_the_parts_of_a_batch_concatenate_to_the_batch(lengths, layout, count):
    batch = batch_of(lengths, **layout)
    chunks = batch.chunk(count)
    assert len(chunks) == count
    assert max(map(len, chunks)) - min(map(len, chunks)) <= 1
    assert TrainingBatch.concat(chunks) == batch


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda batch: batch.chunk(0), "count is 0"),
        (lambda batch: batch.to(dtype=torch.int32), "dtype is torch.int32; pass a floating-point dtype"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(call, text):
    with pytest.raises(ArgumentError, match=text):
        call(batch_of([2]))


# Concatenation.


def test_text_and_image_batches_concatenate_in_either_order_and_keep_their_images():
    """SkyRL's concatenation keeps the keys of the first batch: images are lost one way, a KeyError the other."""
    text, images = mixed_batch().chunk(2)
    for order in ([text, images], [images, text]):
        joined = TrainingBatch.concat(order)
        assert joined.has_media.tolist() == [bool(each.samples[0].media) for each in order]
        assert joined.concatenated_media("pixel_values").shape == (12, 12)
        assert [t is None for t in joined.media_tensors("pixel_values")] == [
            not bool(b.samples[0].media) for b in order
        ]


def test_an_extra_that_only_one_batch_has_is_none_for_the_samples_of_the_others():
    one, other = batch_of([2]), batch_of([3]).with_extras(values=torch.ones(1, 3))
    for order, absent in (([one, other], 0), ([other, one], 1)):
        joined = TrainingBatch.concat(order)
        assert joined.extras["values"][absent] is None
        with pytest.raises(BatchError, match="extra 'values': sample s0 of 2 tokens has no values"):
            joined.column("values")


@pytest.mark.parametrize(
    ("batches", "text"),
    [
        ([], "at least one TrainingBatch"),
        (None, "at least one TrainingBatch"),
        ([batch_of([2]), 5], "at least one TrainingBatch"),
        ([batch_of([2]), batch_of([2], layout="packed")], "layout is 'padded' in batch 0 and 'packed' in batch 1"),
        ([batch_of([2]), batch_of([2], side="left")], "side is 'right' in batch 0"),
        ([batch_of([2]), replace(batch_of([2]), pad_id=7)], "pad_id is 9 in batch 0 and 7 in batch 1"),
    ],
)
def test_batches_of_different_layouts_do_not_concatenate(batches, text):
    with pytest.raises(BatchError, match=text):
        TrainingBatch.concat(batches)


# Neutral samples.


# Extras.


@settings(max_examples=30, deadline=None)
@given(LENGTHS, LAYOUTS, st.data())
def test_an_extra_of_each_token_follows_its_tokens_through_a_selection(lengths, layout, data):
    batch = batch_of(lengths, **layout)
    batch = batch.with_extras(ids=batch.input_ids, pairs=torch.stack([batch.logprobs, batch.advantages], dim=-1))
    chosen = batch[data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=5))]
    masked = torch.where(chosen.attention_mask, chosen.input_ids, 0)
    assert torch.equal(chosen.column("ids"), masked.to(chosen.column("ids").dtype))
    if len(chosen):
        assert torch.equal(chosen.column("pairs")[..., 1], chosen.advantages)


@pytest.mark.parametrize(
    ("extras", "text"),
    [
        ({"advantages": torch.zeros(2, 3)}, r"change it with dataclasses.replace\(batch, advantages=...\)"),
        ({"values": torch.zeros(3, 3)}, r"extra 'values' is of shape \(3, 3\); pass a tensor \(2, 3, '...'\)"),
        ({"values": [1.0]}, r"extra 'values' is \[1.0\]"),
        ({"values": TensorList([None])}, "pass a TensorList of 2 rows"),
    ],
)
def test_extras_that_do_not_fit_are_refused(extras, text):
    with pytest.raises(BatchError, match=text):
        batch_of([2, 3]).with_extras(**extras)


# Devices and dtypes.


def float_image():
    item = image()
    return replace(
        item, tensors={"pixel_values": np.ones((4, 12), np.float32), "image_grid_thw": item["image_grid_thw"]}
    )


def test_a_dtype_changes_floating_media_only():
    """SkyRL's `to(dtype)` casts token ids as well: id 4,097 becomes 4,096 in bfloat16."""
    rows = [sample(4, images=[float_image()]), sample(4, images=[image()])]
    batch = TrainingBatch.from_samples(rows, pad_id=PAD).with_extras(values=torch.ones(2, 4))
    moved = batch.to("cpu", dtype=torch.bfloat16)
    pixels = moved.media_tensors("pixel_values")
    assert [tensor.dtype for tensor in pixels] == [torch.bfloat16, torch.uint8]
    assert moved.media_tensors("image_grid_thw")[0].dtype == torch.int64
    for name in ("input_ids", "attention_mask", "loss_mask", "logprobs", "advantages", "position_ids"):
        assert torch.equal(getattr(moved, name), getattr(batch, name))
    assert moved.extras == batch.extras
    assert moved[:1].media_tensors("pixel_values")[0].dtype == torch.bfloat16


def test_tensors_move_to_a_device_and_starts_stay_on_the_cpu():
    batch = batch_of([2, 3]).with_extras(values=torch.ones(2, 3))
    moved = batch.to("meta")
    assert {moved.input_ids.device.type, moved.position_ids.device.type, moved.extras["values"][0].device.type} == {
        "meta"
    }
    assert moved.starts.device.type == moved.lengths.device.type == "cpu"


# Equality.


@pytest.mark.parametrize(
    "change",
    [
        lambda b: replace(b, advantages=b.advantages + 1),
        lambda b: replace(b, pad_id=8),
        lambda b: replace(b, media_dtype="bfloat16"),
        lambda b: replace(b, samples=(replace(b.samples[0], name="other"), *b.samples[1:])),
        lambda b: replace(b, samples=(b.samples[0], replace(b.samples[1], media=()))),
        lambda b: b.with_extras(values=torch.ones(b.input_ids.shape)),
        lambda b: b[::-1],
        lambda b: b[:1],
        lambda b: "a batch",
    ],
)
def test_batches_that_differ_are_not_equal(change):
    batch = mixed_batch()
    assert batch == mixed_batch()
    assert batch != change(batch)


def test_equality_minds_the_dtype_of_extras_and_pixels():
    batch = batch_of([2])
    halves = [batch.with_extras(values=torch.ones(1, 2, dtype=dtype)) for dtype in (torch.float32, torch.float64)]
    assert halves[0] != halves[1]
    item = image()
    as_float = replace(item, tensors={**item.tensors, "pixel_values": item["pixel_values"].astype(np.float32)})
    rows = [TrainingBatch.from_samples([sample(4, images=[each])], pad_id=PAD) for each in (item, as_float)]
    assert rows[0] != rows[1]


def test_nan_equals_nan_in_an_extra():
    batch = batch_of([2]).with_extras(values=torch.full((1, 2), torch.nan))
    assert batch == batch_of([2]).with_extras(values=torch.full((1, 2), torch.nan))


# Copies and files.


@pytest.mark.parametrize(
    "copied",
    [
        lambda b, path: pickle.loads(pickle.dumps(b)),
        lambda b, path: decode(encode(b)),
        lambda b, path: copy.deepcopy(b),
        lambda b, path: (b.save(path / "batch.mmr"), TrainingBatch.load(path / "batch.mmr"))[1],
        lambda b, path: pickle.loads(pickle.dumps(decode(encode(b)))),
    ],
    ids=["pickle", "codec", "deepcopy", "file", "pickle of a decoded batch"],
)
@pytest.mark.parametrize("layout", [{"side": "left", "multiple_of": 4}, {"layout": "packed"}])
def test_copies_equal_the_batch(copied, layout, tmp_path):
    rows = [sample(3), sample(6, images=[image(seed=1), image(8, modality="video")])]
    batch = TrainingBatch.from_samples(rows, pad_id=PAD, **layout).to(dtype=torch.bfloat16)
    batch = batch.with_extras(values=torch.rand(batch.input_ids.shape), score=TensorList([None, torch.ones(2)]))
    copy_ = copied(batch, tmp_path)
    assert copy_ == batch
    assert copy_.position_ids.tolist() == batch.position_ids.tolist()


def test_a_copy_of_a_part_does_not_hold_the_whole():
    long = batch_of([4000] * 20).with_extras(values=torch.rand(20, 4000), whole=TensorList(list(torch.rand(20, 4000))))
    part = long[:1]
    assert len(pickle.dumps(part)) < len(pickle.dumps(long)) / 15
    assert len(encode(part)) < len(encode(long)) / 15
    view = replace(part, advantages=long.advantages[:1])
    assert len(pickle.dumps(view)) < len(pickle.dumps(long)) / 15


def test_saving_replaces_the_file_and_another_file_is_refused(tmp_path):
    path = tmp_path / "batch.mmr"
    batch_of([2, 3]).save(path)
    batch_of([4]).save(path)
    assert TrainingBatch.load(path) == batch_of([4])
    assert [each.name for each in tmp_path.iterdir()] == ["batch.mmr"]
    from transport import RecordWriter

    with RecordWriter(path) as out:
        out.append("something else")
    with pytest.raises(BatchError, match=r"batch.mmr' does not hold one TrainingBatch; load what batch.save wrote"):
        TrainingBatch.load(path)


def test_a_message_whose_tensors_contradict_the_samples_is_malformed():
    batch = batch_of([2, 3])
    object.__setattr__(batch, "starts", torch.tensor([[0, 0], [0, 1]]))
    with pytest.raises(MalformedError, match=r"TrainingBatch.*sample 1 \(s1\) of 3 tokens is said to have 3"):
        decode(encode(batch))


@pytest.mark.slow
def test_batches_pass_through_a_data_loader_with_workers():
    rows = [sample(3, name="text"), sample(6, images=[image(seed=1)], name="image")]
    loader = torch.utils.data.DataLoader(
        rows, batch_size=2, num_workers=1, collate_fn=lambda part: TrainingBatch.from_samples(part, pad_id=PAD)
    )
    (batch,) = list(loader)
    assert batch == TrainingBatch.from_samples(rows, pad_id=PAD)
