"""prime-rl: `TrainingSample` and `MicroBatch` of `prime_rl.transports.rollouts.types`, msgspec structs of its wire."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import torch

from rollouts.training.adapters.arguments import (
    AdapterError,
    check_samples,
    media_arguments,
    mm_token_type_ids,
    refuse_parts,
    trained_values,
    trainer_module,
)
from rollouts.training.samples import TrainingSample
from rollouts.values import check_positive

_MODULE = "prime_rl.transports.rollouts.types"
_LACKING = ("weight_spans", "routed_experts", "top_logprobs")
_TEMPERATURE_RULE = "pass the temperature of sampling, a number above 0"


def prime_rl_sample(
    sample: TrainingSample,
    *,
    temperature: float,
    env_name: str,
    omit: Collection[str] = (),
    types: ModuleType | None = None,
) -> Any:
    """A `prime_rl.transports.rollouts.types.TrainingSample` of one sample.

    `token_ids`, `mask`, `logprobs`, `temperatures` and `advantages` have one value per token; `mm_kwargs` are the
    model's arguments, floats in float32, and `mm_token_type_ids` mark media tokens by range. prime-rl divides logits by
    `temperature` before it compares them with `logprobs`: pass 1.0 for the log-probabilities of the raw distribution,
    which engines here report, else the temperature that they include. `types` is the module with the structs.

    The struct has no field for weight versions, and its `routed_experts` are bytes of its own inference server:
    `omit=("weight_spans", "routed_experts")` leaves them out. Raises `AdapterError` for what the struct cannot hold,
    `ArgumentError` for a temperature that is no positive number, and `ImportError` where prime-rl is not installed.
    """
    target = "prime-rl TrainingSample"
    structs = trainer_module(_MODULE, types)
    (sample,) = check_samples(target, [sample], partial(refuse_parts, lacking=_LACKING, omit=omit))
    return structs.TrainingSample(
        token_ids=sample.token_ids.tolist(),
        mask=sample.loss_mask.tolist(),
        logprobs=trained_values(sample, "logprobs").tolist(),
        advantages=trained_values(sample, "advantages").tolist(),
        temperatures=[check_positive("temperature", temperature, _TEMPERATURE_RULE)] * len(sample),
        env_name=env_name,
        **_media(target, sample, structs),
    )


def prime_rl_micro_batch(
    samples: Sequence[TrainingSample],
    *,
    temperature: float,
    env_name: str,
    omit: Collection[str] = (),
    types: ModuleType | None = None,
) -> Any:
    """A `prime_rl.transports.rollouts.types.MicroBatch`: packed samples of text, or one sample with media.

    `position_ids` count from 0 in each sample; `sequence_lengths` and `seq_lens` have the lengths. prime-rl trains a
    sample with media in a micro batch of its own; others beside it raise `AdapterError`. Otherwise as
    `prime_rl_sample`.
    """
    target = "prime-rl MicroBatch"
    samples = check_samples(target, samples, partial(refuse_parts, lacking=_LACKING, omit=omit))
    with_media = [sample for sample in samples if sample.media]
    if with_media and len(samples) > 1:
        raise AdapterError(
            target,
            with_media[0],
            "media",
            f"it is packed with {len(samples) - 1} other samples, and prime-rl packs text only. "
            "Give each sample with media a micro batch of its own",
        )
    structs = trainer_module(_MODULE, types)
    lengths = [len(sample) for sample in samples]
    return structs.MicroBatch(
        input_ids=np.concatenate([sample.token_ids for sample in samples]).tolist(),
        loss_mask=np.concatenate([sample.loss_mask for sample in samples]).tolist(),
        advantages=np.concatenate([trained_values(sample, "advantages") for sample in samples]).tolist(),
        inference_logprobs=np.concatenate([trained_values(sample, "logprobs") for sample in samples]).tolist(),
        position_ids=np.concatenate([np.arange(length) for length in lengths]).tolist(),
        sequence_lengths=lengths,
        seq_lens=list(lengths),
        temperatures=[check_positive("temperature", temperature, _TEMPERATURE_RULE)] * sum(lengths),
        env_names=[env_name] * sum(lengths),
        **(_media(target, samples[0], structs) if with_media else {}),
    )


def _media(target: str, sample: TrainingSample, structs: Any) -> dict[str, Any]:
    arguments = media_arguments(target, [sample], torch.float32)
    if not arguments:
        return {}
    encoded = {}
    for name, tensor in arguments.items():
        array = np.ascontiguousarray(tensor.numpy())
        encoded[name] = structs.EncodedTensor(dtype=str(array.dtype), shape=list(array.shape), data=array.tobytes())
    return {"mm_kwargs": encoded, "mm_token_type_ids": mm_token_type_ids(sample).tolist()}
