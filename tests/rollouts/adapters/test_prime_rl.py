"""prime-rl's msgspec structs: fields as published for three of its versions, since it is in no package index."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from renderers.vision.patches import normalised
from rollouts.errors import ArgumentError
from rollouts.training.adapters import AdapterError, prime_rl_micro_batch, prime_rl_sample

msgspec = pytest.importorskip("msgspec")

OMIT = {"temperature": 0.7, "env_name": "digits", "omit": ("weight_spans",)}


def struct(name: str, required: dict[str, Any], optional: dict[str, Any]) -> Any:
    fields = [*required.items(), *((field, kind | None, None) for field, kind in optional.items())]
    return msgspec.defstruct(name, fields, array_like=True, gc=False, omit_defaults=bool(optional))


def published(version: str) -> SimpleNamespace:
    """The structs by the order of their fields, which is that of the encoded arrays."""
    tensor = struct("EncodedTensor", {"dtype": str, "shape": list[int], "data": bytes}, {})
    media = {"mm_kwargs": dict[str, tensor], "routed_experts": bytes, "mm_token_type_ids": list[int]}
    sample = {"token_ids": list[int], "mask": list[bool], "logprobs": list[float]}
    sample |= {"temperatures": list[float], "env_name": str}
    batch = {"position_ids": list[int], "sequence_lengths": list[int], "temperatures": list[float]}
    batch |= {"env_names": list[str]}
    head = {"input_ids": list[int]}
    if version == "channels":
        channel = struct("TrainingAdvantage", {"loss": str, "values": list[float], "mask": list[bool]}, {})
        advantages = {"advantages": list[channel]}
        return SimpleNamespace(
            EncodedTensor=tensor,
            TrainingAdvantage=channel,
            TrainingSample=struct("TrainingSample", sample | advantages, {"reward": float, **media}),
            MicroBatch=struct(
                "MicroBatch", head | advantages | {"inference_logprobs": list[float]} | batch, {**media, "run_id": str}
            ),
        )
    per_token = {"advantages": list[float]}
    head |= {"loss_mask": list[bool], **per_token, "inference_logprobs": list[float]}
    optional = {**media, **per_token} if version == "per token" else {"advantage": float, "reward": float, **media}
    return SimpleNamespace(
        EncodedTensor=tensor,
        TrainingSample=struct("TrainingSample", sample, optional),
        MicroBatch=struct("MicroBatch", head | batch, media),
    )


def through_the_wire(value: Any) -> Any:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=type(value))


def floats(values) -> list[float]:
    return np.array(values, np.float32).tolist()


@pytest.mark.parametrize("version", ["channels", "per token"])
def test_a_sample_with_images_arrives_with_every_column(make_sample, version):
    types, sample = published(version), make_sample(3, images=2)
    received = through_the_wire(prime_rl_sample(sample, types=types, **OMIT))
    assert received.token_ids == sample.token_ids.tolist()
    assert received.mask == sample.loss_mask.tolist()
    assert floats(received.logprobs) == sample.logprobs.tolist()
    assert received.temperatures == [0.7] * len(sample)
    assert received.env_name == "digits"
    if version == "channels":
        (channel,) = received.advantages
        assert (channel.loss, channel.mask) == ("rl", received.mask)
        assert floats(channel.values) == sample.advantages.tolist()
    else:
        assert floats(received.advantages) == sample.advantages.tolist()
    for name, form in (("pixel_values", np.float32), ("image_grid_thw", np.int64)):
        tensor = received.mm_kwargs[name]
        array = np.frombuffer(tensor.data, tensor.dtype).reshape(tensor.shape)
        expected = [
            np.atleast_2d(normalised(item, name)) if form == np.float32 else item[name][None]
            for item, _ in sample.media
        ]
        assert array.dtype == form
        assert array.tobytes() == np.concatenate(expected).tobytes()
    runs = [run for _, placeholder in sample.media for run in placeholder.runs]
    assert [index for index, kind in enumerate(received.mm_token_type_ids) if kind] == [
        index for start, end in runs for index in range(start, end)
    ]


def test_a_reward_has_its_field(make_sample):
    sample = make_sample(1, advantages=np.ones(len(make_sample(1)), np.float32))
    assert prime_rl_sample(sample, reward=0.5, types=published("scalar"), **OMIT).reward == 0.5


def test_one_advantage_for_a_sample_is_refused_where_its_tokens_differ(make_sample):
    types = published("scalar")
    equal = make_sample(1, advantages=np.full(len(make_sample(1)), 0.25, np.float32))
    assert prime_rl_sample(equal, types=types, **OMIT).advantage == 0.25
    with pytest.raises(AdapterError, match=r"episode-1/0: advantages: its tokens have \d+ different ones"):
        prime_rl_sample(make_sample(1), types=types, **OMIT)


@settings(max_examples=25)
@given(seeds=st.lists(st.integers(1, 12), min_size=1, max_size=5))
def test_a_packed_micro_batch_divides_into_its_samples(make_sample, seeds):
    samples = [make_sample(seed) for seed in seeds]
    batch = through_the_wire(prime_rl_micro_batch(samples, types=published("per token"), **OMIT))
    start = 0
    for sample, length in zip(samples, batch.sequence_lengths, strict=True):
        columns = slice(start, start + length)
        assert batch.input_ids[columns] == sample.token_ids.tolist()
        assert batch.loss_mask[columns] == sample.loss_mask.tolist()
        assert floats(batch.inference_logprobs[columns]) == sample.logprobs.tolist()
        assert floats(batch.advantages[columns]) == sample.advantages.tolist()
        assert batch.position_ids[columns] == list(range(length))
        start += length
    assert start == len(batch.input_ids) == len(batch.temperatures) == len(batch.env_names)


def test_channels_of_a_micro_batch_have_the_mask(make_sample):
    samples = [make_sample(1), make_sample(2)]
    (channel,) = prime_rl_micro_batch(samples, types=published("channels"), **OMIT).advantages
    assert channel.mask == [bool(value) for sample in samples for value in sample.loss_mask]


def test_a_micro_batch_of_one_sample_with_media_has_its_arguments(make_sample):
    batch = prime_rl_micro_batch([make_sample(4, images=1)], types=published("per token"), **OMIT)
    assert batch.mm_kwargs["pixel_values"].shape[0] == 16
    with pytest.raises(AdapterError, match="episode-4/0: media: it is packed with 1 other samples"):
        prime_rl_micro_batch([make_sample(4, images=1), make_sample(1)], types=published("per token"), **OMIT)


def test_weight_versions_and_experts_are_left_out_only_where_this_is_said(make_sample):
    with pytest.raises(
        AdapterError, match=r"episode-1/0: weight_spans: the type has no field .* omit=\('weight_spans',\)"
    ):
        prime_rl_sample(make_sample(1), temperature=1.0, env_name="", types=published("per token"))
    experts = np.zeros((len(make_sample(1)), 2, 1), np.uint8)
    with pytest.raises(AdapterError, match=r"episode-1/0: routed_experts: the type has no field"):
        prime_rl_sample(make_sample(1, routed_experts=experts), types=published("per token"), **OMIT)
    with pytest.raises(ArgumentError, match="omit is 'weight_spans'; pass a tuple of names"):
        prime_rl_sample(make_sample(1), temperature=1.0, env_name="", omit="weight_spans", types=published("per token"))


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), "1", None])
def test_a_temperature_that_is_no_positive_number_is_refused(make_sample, temperature):
    with pytest.raises(ArgumentError, match="temperature is"):
        prime_rl_sample(make_sample(1), **{**OMIT, "temperature": temperature}, types=published("per token"))


def test_a_version_with_prompt_and_completion_apart_is_refused_by_its_fields(make_sample):
    types = published("per token")
    types.TrainingSample = struct("TrainingSample", {"prompt_ids": list[int]}, {"advantages": list[float]})
    with pytest.raises(AdapterError, match="env_name: the struct has the fields prompt_ids, advantages only"):
        prime_rl_sample(make_sample(1), types=types, **OMIT)


def test_a_sampled_placeholder_token_is_refused(literal_placeholder):
    with pytest.raises(AdapterError, match="episode-1/0: token_ids: the token at position"):
        prime_rl_sample(literal_placeholder, types=published("channels"), **OMIT)
