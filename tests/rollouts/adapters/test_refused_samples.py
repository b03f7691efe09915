"""A sample that a type cannot hold is an error with its index, from every adapter of lists."""

from types import SimpleNamespace

import numpy as np
import pytest
from test_prime_rl import published

from renderers import build_training_sample
from rollouts import Completion, FinishReason, Trajectory
from rollouts.errors import ArgumentError
from rollouts.training import sample_from_rendered
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
PRIME = {"temperature": 1.0, "env_name": "e", "omit": OMITTED, "types": published()}

BATCHES = {
    "trl_grpo_inputs": lambda samples: trl_grpo_inputs(samples, pad_id=0),
    "trl_sft_batch": lambda samples: trl_sft_batch(samples, pad_id=0, omit=ALL),
    "skyrl_training_batch": lambda samples: skyrl_training_batch(samples, pad_id=0, types=SKYRL),
    "verl_data_proto": lambda samples: verl_data_proto(samples, pad_id=0, mrope=True, types=VERL),
    "prime_rl_micro_batch": lambda samples: prime_rl_micro_batch(samples, **PRIME),
}


FILM = [{"role": "user", "content": [{"type": "video", "video": np.zeros((4, 32, 32, 3), np.uint8), "fps": 2.0}]}]


def episode(renderer, name, messages):
    trajectory = Trajectory(name)
    prompt = renderer.render(messages, add_generation_prompt=True)
    ids, logprobs = np.array([65, 66], np.int32), np.zeros(2, np.float32)
    completion = Completion(0, ids, logprobs, FinishReason.LENGTH)
    trajectory.add_turn(prompt, completion, {"role": "assistant", "content": "AB"}, messages=messages)
    return trajectory


@pytest.mark.parametrize("name", BATCHES)
def test_the_index_of_the_error_is_the_place_of_the_sample_and_the_others_make_a_batch(
    name, make_sample, literal_placeholder
):
    samples = [make_sample(2, images=1), literal_placeholder]
    with pytest.raises(AdapterError, match=r"token_ids: .*Leave the sample out \(the `index`") as caught:
        BATCHES[name](samples)
    assert (caught.value.index, caught.value.part) == (1, "token_ids")
    del samples[caught.value.index]
    BATCHES[name](samples)


def test_what_concerns_the_batch_has_no_index(make_sample):
    with pytest.raises(AdapterError, match="Make one batch of the samples with images and another") as mixed:
        BATCHES["skyrl_training_batch"]([make_sample(1, images=1), make_sample(2)])
    with pytest.raises(AdapterError, match="prime-rl packs text only") as packed:
        BATCHES["prime_rl_micro_batch"]([make_sample(1, images=1), make_sample(2)])
    assert mixed.value.index is packed.value.index is None


def test_a_function_of_one_sample_refuses_what_its_row_cannot_hold(make_sample, literal_placeholder, renderer):
    with_experts = make_sample(1, routed_experts=np.zeros((len(make_sample(1)), 2, 1), np.uint8))
    messages = [*FILM, {"role": "assistant", "content": "A"}]
    small_video = sample_from_rendered(build_training_sample(renderer, messages), name="film")
    refused = {
        "media": [
            lambda: trl_sft_row(make_sample(1, images=1), omit=ALL),
            lambda: tinker_datum(small_video, omit=OMITTED),
            lambda: dataset_row(small_video),
        ],
        "token_ids": [lambda: prime_rl_sample(literal_placeholder, **PRIME)],
        "weight_spans": [
            lambda: tinker_datum(make_sample(1)),
            lambda: prime_rl_sample(make_sample(1), **{**PRIME, "omit": ()}),
        ],
        "routed_experts": [lambda: prime_rl_sample(with_experts, **{**PRIME, "omit": ("weight_spans",)})],
        "logprobs": [
            lambda: tinker_datum(make_sample(1), loss="cross_entropy", omit=OMITTED),
            lambda: trl_sft_row(make_sample(1)),
        ],
        "advantages": [lambda: trl_sft_row(make_sample(1), omit=("logprobs",))],
    }
    for part, calls in refused.items():
        for call in calls:
            with pytest.raises(AdapterError) as caught:
                call()
            assert caught.value.part == part
    with pytest.raises(ArgumentError, match="omit is 'weight_spans'; pass a tuple of names"):
        prime_rl_sample(make_sample(1), **{**PRIME, "omit": "weight_spans"})
    with pytest.raises(ArgumentError, match=r"temperature is 0.0"):
        prime_rl_sample(make_sample(1), **{**PRIME, "temperature": 0.0})
    with pytest.raises(ArgumentError, match="loss is 'ppo'"):
        tinker_datum(make_sample(1), loss="ppo", omit=OMITTED)
    omit = ("logprobs", "advantages", "weight_spans")
    assert trl_sft_row(make_sample(1), omit=omit)["input_ids"] == make_sample(1).token_ids.tolist()


def test_a_streamed_dataset_refuses_a_sample_that_a_row_cannot_hold(tmp_path, renderer):
    path = tmp_path / "episodes.mmr"
    with RecordWriter(path) as out:
        out.append(episode(renderer, "film", FILM))
    with pytest.raises(AdapterError, match="rows have images and sounds only"):
        list(record_dataset([path]))
