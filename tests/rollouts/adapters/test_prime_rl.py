"""prime-rl's msgspec structs: fields as published in August 2026, since it is in no package index."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from renderers.vision.patches import normalised
from rollouts.training.adapters import AdapterError, prime_rl_micro_batch, prime_rl_sample

msgspec = pytest.importorskip("msgspec")


def struct(name: str, required: dict[str, Any], optional: dict[str, Any]) -> Any:
    fields = [*required.items(), *((field, kind | None, None) for field, kind in optional.items())]
    return msgspec.defstruct(name, fields, array_like=True, gc=False, omit_defaults=bool(optional))


def published() -> SimpleNamespace:
    """The structs by the order of their fields, which is that of the encoded arrays."""
    floats, integers = list[float], list[int]
    tensor = struct("EncodedTensor", {"dtype": str, "shape": integers, "data": bytes}, {})
    media = {"mm_kwargs": dict[str, tensor], "routed_experts": bytes, "mm_token_type_ids": integers}
    weights = {"rl_weights": floats, "ce_weights": floats, "ref_kl_weights": floats}
    sample = {"token_ids": integers, "mask": list[bool], "logprobs": floats, "temperatures": floats, "env_name": str}
    batch = {"input_ids": integers, "loss_mask": list[bool], "advantages": floats, "inference_logprobs": floats}
    batch |= {"position_ids": integers, "sequence_lengths": integers, "temperatures": floats, "env_names": list[str]}
    optional = {"ref_logprobs": floats, **media, **weights}
    return SimpleNamespace(
        EncodedTensor=tensor,
        TrainingSample=struct("TrainingSample", sample, optional | {"advantages": floats}),
        MicroBatch=struct("MicroBatch", batch | {"seq_lens": integers}, optional),
    )


OMIT = {"temperature": 0.7, "env_name": "digits", "omit": ("weight_spans",), "types": published()}


def through_the_wire(value: Any) -> Any:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=type(value))


def floats(values) -> list[float]:
    return np.array(values, np.float32).tolist()


def test_a_sample_with_images_arrives_with_every_column(make_sample):
    sample = make_sample(3, images=2)
    received = through_the_wire(prime_rl_sample(sample, **OMIT))
    assert received.token_ids == sample.token_ids.tolist()
    assert received.mask == sample.loss_mask.tolist()
    assert floats(received.logprobs) == sample.logprobs.tolist()
    assert floats(received.advantages) == sample.advantages.tolist()
    assert received.temperatures == [0.7] * len(sample)
    assert received.env_name == "digits"
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


@settings(max_examples=25)
@given(seeds=st.lists(st.integers(1, 12), min_size=1, max_size=5))
def test_a_packed_micro_batch_divides_into_its_samples(make_sample, seeds):
    samples = [make_sample(seed) for seed in seeds]
    batch = through_the_wire(prime_rl_micro_batch(samples, **OMIT))
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
    assert batch.seq_lens == batch.sequence_lengths


def test_a_micro_batch_of_one_sample_with_media_has_its_arguments(make_sample):
    batch = prime_rl_micro_batch([make_sample(4, images=1)], **OMIT)
    assert batch.mm_kwargs["pixel_values"].shape[0] == 16
    with pytest.raises(AdapterError, match="episode-4/0: media: it is packed with 1 other samples"):
        prime_rl_micro_batch([make_sample(4, images=1), make_sample(1)], **OMIT)
