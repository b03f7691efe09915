"""Any rows of text through each batch form: every column comes back from its tensors."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
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


def assert_columns(sample, token_ids, loss_mask, logprobs, advantages):
    for name, values in zip(COLUMNS, (token_ids, loss_mask, logprobs, advantages), strict=True):
        assert np.asarray(values).tolist() == getattr(sample, name).tolist()


def assert_experts(sample, experts):
    assert (experts is None) == (sample.routed_experts is None)
    assert experts is None or np.array_equal(experts, sample.routed_experts)


# Of each form: ids, which are tokens, which of a response are tokens, the columns of responses, and what is no tensor.


def of_trl(rows):
    inputs = trl_grpo_inputs(rows, pad_id=0)
    assert (inputs["completion_mask"] * inputs["tool_mask"]).sum() == inputs["num_items_in_batch"]
    ids, is_token = (
        torch.cat([inputs[f"prompt_{name}"], inputs[f"completion_{name}"]], dim=1) for name in ("ids", "mask")
    )
    columns = [inputs[name] for name in ("tool_mask", "sampling_per_token_logps", "advantages")]
    return ids, is_token, inputs["completion_mask"], columns, inputs


def of_skyrl(rows):
    class Batch(dict):
        metadata = None

    batch = skyrl_training_batch(rows, pad_id=0, types=SimpleNamespace(TrainingInputBatch=Batch))
    columns = [batch[name] for name in ("loss_mask", "rollout_logprobs", "advantages")]
    return batch["sequences"], batch["attention_mask"], batch["response_mask"], columns, batch.metadata


def of_verl(rows):
    proto = SimpleNamespace(from_dict=lambda tensors, non_tensors: (tensors, non_tensors))
    tensors, others = verl_data_proto(rows, pad_id=0, mrope=False, types=SimpleNamespace(DataProto=proto))
    is_token = tensors["attention_mask"]
    columns = [tensors[name] for name in ("response_mask", "rollout_log_probs", "advantages")]
    return tensors["input_ids"], is_token, is_token[:, tensors["prompts"].shape[1] :], columns, others


@pytest.mark.slow
@pytest.mark.parametrize("form", [of_trl, of_skyrl, of_verl])
@settings(max_examples=40)
@given(rows=st.lists(samples(), min_size=1, max_size=5))
def test_every_column_of_every_row_comes_back_from_a_batch(form, rows):
    ids, is_token, is_response, columns, others = form(rows)
    for index, sample in enumerate(rows):
        own, present = ids[index][is_token[index].bool()], is_response[index].bool()
        # A column of a response as one of the sample: 0 in the prompt, which is never trained.
        prompt = np.zeros(len(own) - int(present.sum()))
        mask, *floats = (np.concatenate([prompt, column[index][present]]) for column in columns)
        assert_columns(sample, own, mask.astype(bool), *floats)
        assert others["weight_spans"][index] == [(span.version, span.start, span.end) for span in sample.weight_spans]
        assert_experts(sample, others.get("routed_experts", [None] * len(rows))[index])


@settings(max_examples=40)
@given(samples())
def test_rows_of_a_dataset(sample):
    again = sample_from_row(dataset_row(sample), {})
    assert_columns(sample, *(getattr(again, name) for name in COLUMNS))
    assert (again.weight_spans, again.name) == (sample.weight_spans, sample.name)
    assert_experts(sample, again.routed_experts)
