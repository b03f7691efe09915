"""Operations on the rows of a batch: no token moves to another sample, no value changes, no image is copied."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from training_samples import LAYOUTS, LENGTHS, PAD, image, sample, samples_of

from rollouts.errors import SampleError
from rollouts.training import TrainingBatch
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


@pytest.mark.parametrize(
    ("index", "text"),
    [
        (2, "out of bounds"),
        ([0, -3], "index -3 is out of bounds"),
        ("0", "only integers, slices"),
        ([[0]], "pass an integer, a slice"),
    ],
)
def test_an_index_that_selects_nothing_that_exists_is_refused(index, text):
    with pytest.raises(IndexError, match=text):
        batch_of([2, 3])[index]


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


# Concatenation.


def test_an_extra_that_only_one_batch_has_is_none_for_the_samples_of_the_others():
    one, other = batch_of([2]), batch_of([3]).with_extras(values=torch.ones(1, 3))
    for order, absent in (([one, other], 0), ([other, one], 1)):
        joined = TrainingBatch.concat(order)
        assert joined.extras["values"][absent] is None
        with pytest.raises(SampleError, match="extra 'values': sample s0 of 2 tokens has no values"):
            joined.column("values")


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


# Equality.


@pytest.mark.parametrize(
    "change",
    [
        lambda b: replace(b, advantages=b.advantages + 1),
        lambda b: replace(b, samples=(replace(b.samples[0], name="other"), *b.samples[1:])),
        lambda b: replace(b, samples=(b.samples[0], replace(b.samples[1], media=()))),
        lambda b: b.with_extras(values=torch.ones(b.input_ids.shape)),
        lambda b: replace(b, extras={"score": (None, torch.ones(1))}),
        lambda b: b[:1],
    ],
)
def test_batches_that_differ_are_not_equal(change):
    batch = replace(mixed_batch(), extras={"score": (None, torch.tensor([torch.nan]))})
    assert batch == replace(mixed_batch(), extras={"score": (None, torch.tensor([torch.nan]))})
    assert batch != change(batch)


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
    batch = TrainingBatch.from_samples(rows, pad_id=PAD, **layout)
    batch = replace(batch, extras={"score": (None, torch.ones(2))})
    batch = batch.with_extras(values=torch.rand(batch.input_ids.shape))
    copy_ = copied(batch, tmp_path)
    assert copy_ == batch
    assert copy_.position_ids.tolist() == batch.position_ids.tolist()


def test_a_copy_of_a_part_does_not_hold_the_whole():
    long = batch_of([4000] * 20).with_extras(values=torch.rand(20, 4000))
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
    with pytest.raises(SampleError, match=r"batch.mmr' does not hold one TrainingBatch; load what batch.save wrote"):
        TrainingBatch.load(path)


def test_a_message_whose_tensors_contradict_the_samples_is_malformed():
    batch = batch_of([2, 3])
    object.__setattr__(batch, "advantages", torch.zeros(2, 2))
    with pytest.raises(MalformedError, match=r"TrainingBatch.*advantages is torch.float32 \(2, 2\) on cpu"):
        decode(encode(batch))
