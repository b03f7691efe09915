"""Any rows of text through each batch form: every column comes back from its tensors."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollouts import WeightSpan
from rollouts.training import TrainingSample
from rollouts.training.adapters import (
    dataset_row,
    sample_from_row,
    skyrl_training_batch,
    trl_grpo_inputs,
    verl_data_proto,
)

COLUMNS = ("token_ids", "loss_mask", "logprobs", "advantages")
finite = st.floats(-1e6, 1e6, width=32)


@st.composite
def samples(draw):
    """At least two tokens, of which any but the first are trained, at least one."""
    count = draw(st.integers(2, 12))
    mask = np.array([False, *draw(st.lists(st.booleans(), min_size=count - 1, max_size=count - 1))])
    mask[draw(st.integers(1, count - 1))] = True
    ids = draw(st.lists(st.integers(0, 2**31 - 1), min_size=count, max_size=count))
    floats = [np.array(draw(st.lists(finite, min_size=count, max_size=count)), np.float32) * mask for _ in range(2)]
    spans = (WeightSpan(draw(st.text(max_size=4)), 0, int(mask.sum())),)
    experts = np.array(draw(st.lists(st.integers(0, 255), min_size=count, max_size=count)), np.int32)[:, None, None]
    return TrainingSample(
        np.array(ids, np.int32),
        mask,
        *floats,
        weight_spans=spans,
        name=draw(st.text(max_size=4)),
        routed_experts=experts if draw(st.booleans()) else None,
    )


batches = st.lists(samples(), min_size=1, max_size=5)


def assert_columns(sample, token_ids, loss_mask, logprobs, advantages):
    for name, values in zip(COLUMNS, (token_ids, loss_mask, logprobs, advantages), strict=True):
        assert np.asarray(values).tolist() == getattr(sample, name).tolist()


def whole(start, column):
    """A column of a response as one of the sample: 0 in the prompt, which is never trained."""
    return np.concatenate([np.zeros(start), np.asarray(column)])


def spans_of(sample):
    return [(span.version, span.start, span.end) for span in sample.weight_spans]


def assert_experts(sample, experts):
    assert (experts is None) == (sample.routed_experts is None)
    assert experts is None or np.array_equal(experts, sample.routed_experts)


@pytest.mark.slow
@settings(max_examples=40)
@given(batches)
def test_trl_inputs(rows):
    inputs = trl_grpo_inputs(rows, pad_id=0)
    for index, sample in enumerate(rows):
        prompt = inputs["prompt_ids"][index][inputs["prompt_mask"][index].bool()]
        present = inputs["completion_mask"][index].bool()
        keys = ("tool_mask", "sampling_per_token_logps", "advantages")
        columns = [whole(len(prompt), inputs[key][index][present]) for key in keys]
        ids = np.concatenate([prompt, inputs["completion_ids"][index][present]])
        assert_columns(sample, ids, columns[0].astype(bool), *columns[1:])
        assert inputs["weight_spans"][index] == spans_of(sample)
        assert_experts(sample, inputs.get("routed_experts", [None] * len(rows))[index])
    assert (inputs["completion_mask"] * inputs["tool_mask"]).sum() == inputs["num_items_in_batch"]


@pytest.mark.slow
@settings(max_examples=40)
@given(batches)
def test_skyrl_tensors(rows):
    class Batch(dict):
        metadata = None

    batch = skyrl_training_batch(rows, pad_id=0, types=SimpleNamespace(TrainingInputBatch=Batch))
    for index, sample in enumerate(rows):
        ids = batch["sequences"][index][batch["attention_mask"][index].bool()]
        present = batch["response_mask"][index].bool()
        start = len(ids) - int(present.sum())
        columns = [whole(start, batch[key][index][present]) for key in ("loss_mask", "rollout_logprobs", "advantages")]
        assert_columns(sample, ids, columns[0].astype(bool), *columns[1:])
        assert batch.metadata["weight_spans"][index] == spans_of(sample)
        assert_experts(sample, batch.metadata.get("routed_experts", [None] * len(rows))[index])


@pytest.mark.slow
@settings(max_examples=40)
@given(batches)
def test_verl_tensors(rows):
    proto = SimpleNamespace(from_dict=lambda tensors, non_tensors: (tensors, non_tensors))
    tensors, others = verl_data_proto(rows, pad_id=0, mrope=False, types=SimpleNamespace(DataProto=proto))
    width = tensors["prompts"].shape[1]
    for index, sample in enumerate(rows):
        is_token = tensors["attention_mask"][index].bool()
        present, start = is_token[width:], int(is_token[:width].sum())
        keys = ("response_mask", "rollout_log_probs", "advantages")
        columns = [whole(start, tensors[key][index][present]) for key in keys]
        assert_columns(sample, tensors["input_ids"][index][is_token], columns[0].astype(bool), *columns[1:])
        assert others["weight_spans"][index] == spans_of(sample)
        assert_experts(sample, others.get("routed_experts", [None] * len(rows))[index])


@settings(max_examples=40)
@given(samples())
def test_rows_of_a_dataset(sample):
    again = sample_from_row(dataset_row(sample), {})
    assert_columns(sample, *(getattr(again, name) for name in COLUMNS))
    assert (again.weight_spans, again.name) == (sample.weight_spans, sample.name)
    assert_experts(sample, again.routed_experts)
