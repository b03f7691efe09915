"""`drop=` of every adapter: a sample that the type cannot hold is left out and recorded; the others are unchanged."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_prime_rl import published

from rollouts import Completion, FinishReason, Trajectory
from rollouts.errors import ArgumentError, BatchError
from rollouts.training import Quarantine, sample_from_rendered
from rollouts.training.adapters import (
    AdapterError,
    dataset_row,
    prime_rl_micro_batch,
    prime_rl_sample,
    record_dataset,
    skyrl_training_batch,
    tinker_datum,
    trl_grpo_inputs,
    trl_sft_batch,
    trl_sft_row,
    verl_data_proto,
)
from transport import RecordWriter

OMITTED = ("weight_spans", "routed_experts")
ALL = ("logprobs", "advantages", *OMITTED)

#: Types with the names that the adapters use, which keep what they are made of.
SKYRL = SimpleNamespace(TrainingInputBatch=lambda columns: SimpleNamespace(columns=columns), TensorList=list)
VERL = SimpleNamespace(DataProto=SimpleNamespace(from_dict=lambda **parts: parts))
PRIME = {"temperature": 1.0, "env_name": "e", "omit": OMITTED, "types": published("per token")}

BATCHES = {
    "trl_grpo_inputs": lambda samples, drop=None: trl_grpo_inputs(samples, pad_id=0, drop=drop),
    "trl_sft_batch": lambda samples, drop=None: trl_sft_batch(samples, pad_id=0, omit=ALL, drop=drop),
    "skyrl_training_batch": lambda samples, drop=None: vars(
        skyrl_training_batch(samples, pad_id=0, types=SKYRL, drop=drop)
    ),
    "verl_data_proto": lambda samples, drop=None: verl_data_proto(samples, pad_id=0, mrope=True, types=VERL, drop=drop),
    "prime_rl_micro_batch": lambda samples, drop=None: prime_rl_micro_batch(samples, drop=drop, **PRIME),
}


FILM = [{"role": "user", "content": [{"type": "video", "video": np.zeros((4, 32, 32, 3), np.uint8), "fps": 2.0}]}]


def episode(renderer, name, messages):
    trajectory = Trajectory(name)
    prompt = renderer.render(messages, add_generation_prompt=True)
    ids, logprobs = np.array([65, 66], np.int32), np.zeros(2, np.float32)
    completion = Completion(0, ids, logprobs, FinishReason.LENGTH)
    trajectory.add_turn(prompt, completion, {"role": "assistant", "content": "AB"}, messages=messages)
    return trajectory


def equal(one, other):
    """Whether two values of nested dicts, lists, tensors and arrays are equal."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) or (isinstance(one, np.ndarray) and one.dtype == object):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, torch.Tensor | np.ndarray):
        return one.shape == other.shape and bool((one == other).all())
    return one == other


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_is_that_of_the_samples_that_fit_and_the_other_one_is_recorded(name, make_sample, literal_placeholder):
    adapt = BATCHES[name]
    fitting = [make_sample(2, images=1), make_sample(3, images=1)] if name != "prime_rl_micro_batch" else []
    fitting = fitting or [make_sample(2, images=1)]
    samples = [fitting[0], literal_placeholder, *fitting[1:]]
    with pytest.raises(AdapterError, match=r"token_ids: .*Leave the sample out, as drop=Quarantine\(\) does"):
        adapt(samples)
    dropped = Quarantine()
    assert equal(adapt(samples, dropped), adapt(fitting))
    assert (dropped.seen, dropped.counts) == (len(samples), {"token_ids": 1})
    assert dropped.rows[0].name == literal_placeholder.name
    assert "a placeholder token outside of all media" in dropped.rows[0].reason
    adapt(fitting, dropped)
    assert (dropped.seen, len(dropped)) == (2 * len(samples) - 1, 1)


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_of_which_no_sample_is_left_is_an_error_with_the_reasons(name, literal_placeholder):
    with pytest.raises(BatchError, match="no sample is left: 1 of 1 rows left out: 1 token_ids"):
        BATCHES[name]([literal_placeholder], Quarantine())


def test_what_concerns_the_batch_and_not_a_sample_is_an_error_with_drop_too(make_sample):
    dropped = Quarantine()
    with pytest.raises(AdapterError, match="Make one batch of the samples with images and another of those without"):
        BATCHES["skyrl_training_batch"]([make_sample(1, images=1), make_sample(2)], dropped)
    with pytest.raises(AdapterError, match="prime-rl packs text only"):
        BATCHES["prime_rl_micro_batch"]([make_sample(1, images=1), make_sample(2)], dropped)
    assert len(dropped) == 0


def test_a_function_of_one_sample_returns_none_for_one_that_it_drops(make_sample, literal_placeholder, renderer):
    small_video = sample_from_rendered(renderer.render([*FILM, {"role": "assistant", "content": "A"}]), name="film")
    dropped = Quarantine()
    assert trl_sft_row(make_sample(1, images=1), omit=ALL, drop=dropped) is None
    assert trl_sft_row(make_sample(1), omit=ALL, drop=dropped) == trl_sft_row(make_sample(1), omit=ALL)
    assert prime_rl_sample(literal_placeholder, drop=dropped, **PRIME) is None
    assert prime_rl_sample(make_sample(1), drop=dropped, **PRIME) == prime_rl_sample(make_sample(1), **PRIME)
    assert tinker_datum(make_sample(1), drop=dropped) is None  # it has weight versions
    assert tinker_datum(small_video, omit=OMITTED, drop=dropped) is None
    assert dataset_row(small_video, drop=dropped) is None
    assert dataset_row(make_sample(1), drop=dropped) == dataset_row(make_sample(1))
    assert dropped.seen == 8
    assert dropped.counts == {"media": 3, "token_ids": 1, "weight_spans": 1}


def test_a_streamed_dataset_goes_on_after_samples_that_a_row_cannot_hold(tmp_path, renderer):
    path = tmp_path / "episodes.mmr"
    with RecordWriter(path) as out:
        out.append(episode(renderer, "film", FILM))
        out.append(episode(renderer, "text", [{"role": "user", "content": "Hello."}]))
    with pytest.raises(AdapterError, match="rows have images and sounds only"):
        list(record_dataset([path]))
    dropped = Quarantine()
    assert [row["name"] for row in record_dataset([path], drop=dropped)] == ["text/1"]
    assert (dropped.seen, dropped.counts) == (2, {"media": 1})


@pytest.mark.parametrize("drop", [True, [], "yes"], ids=repr)
def test_another_value_of_drop_names_what_it_takes(drop, make_sample):
    with pytest.raises(ArgumentError, match=r"pass a Quarantine\(\)"):
        trl_grpo_inputs([make_sample(1)], pad_id=0, drop=drop)
