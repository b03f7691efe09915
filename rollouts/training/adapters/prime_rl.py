"""prime-rl: `TrainingSample` and `MicroBatch` of `prime_rl.transport.types`, msgspec structs that go over its wire."""

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

_MODULE = "prime_rl.transport.types"
_LACKING = ("weight_spans", "routed_experts", "top_logprobs")
_TEMPERATURE_RULE = "pass the temperature of sampling, a number above 0"
_LOSS = "rl"  # prime-rl's name for the policy gradient among the losses of a token


def prime_rl_sample(
    sample: TrainingSample,
    *,
    temperature: float,
    env_name: str,
    reward: float | None = None,
    omit: Collection[str] = (),
    types: ModuleType | None = None,
) -> Any:
    """A `prime_rl.transport.types.TrainingSample` of one sample.

    `token_ids`, `mask`, `logprobs`, `temperatures` and the advantages have one value per token; `mm_kwargs` are the
    model's arguments, floats in float32, and `mm_token_type_ids` mark media tokens by range. prime-rl divides logits by
    `temperature` before it compares them with `logprobs`: pass 1.0 for the log-probabilities of the raw distribution,
    which engines here report, else the temperature that they include. `types` is the module with the structs,
    `prime_rl.transport.types` by default: prime-rl has changed them often, and the fields that the struct declares
    decide whether advantages are one channel of a loss, one value per token, or one value.

    The struct has no field for weight versions, and its `routed_experts` are bytes of its own inference server:
    `omit=("weight_spans", "routed_experts")` leaves them out. Raises `AdapterError` for
    what the struct cannot hold; `ArgumentError` for a
    temperature that is no positive number, and `ImportError` where prime-rl is not installed.
    """
    target = "prime-rl TrainingSample"
    structs = trainer_module(_MODULE, types)
    positive = check_positive("temperature", temperature, _TEMPERATURE_RULE)

    (sample,) = check_samples(target, [sample], partial(refuse_parts, lacking=_LACKING, omit=omit))
    values: dict[str, Any] = {
        "token_ids": sample.token_ids.tolist(),
        "mask": sample.loss_mask.tolist(),
        "logprobs": trained_values(sample, "logprobs").tolist(),
        "temperatures": [positive] * len(sample),
        "env_name": env_name,
        **_advantages(target, [sample], structs, structs.TrainingSample),
        **_media(target, sample, structs),
    }
    if reward is not None:
        values["reward"] = reward
    return _built(target, f"sample {sample.name}", structs.TrainingSample, values)


def prime_rl_micro_batch(
    samples: Sequence[TrainingSample],
    *,
    temperature: float,
    env_name: str,
    omit: Collection[str] = (),
    types: ModuleType | None = None,
) -> Any:
    """A `prime_rl.transport.types.MicroBatch`: samples of text packed into one row, or one sample with media.

    `position_ids` count from 0 in each sample and `sequence_lengths` has their lengths. prime-rl trains a sample with
    media in a micro batch of its own; others beside it raise `AdapterError`. Otherwise as
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
    values = {
        "input_ids": _column(samples, "token_ids"),
        "loss_mask": _column(samples, "loss_mask"),
        "inference_logprobs": _trained(samples, "logprobs"),
        "position_ids": np.concatenate([np.arange(length) for length in lengths]).tolist(),
        "sequence_lengths": lengths,
        "temperatures": [check_positive("temperature", temperature, _TEMPERATURE_RULE)] * sum(lengths),
        "env_names": [env_name] * sum(lengths),
        **_advantages(target, samples, structs, structs.MicroBatch),
        **(_media(target, samples[0], structs) if with_media else {}),
    }
    if "loss_mask" not in structs.MicroBatch.__struct_fields__:
        del values["loss_mask"]  # the channel of the advantages has the mask
    return _built(target, f"{len(samples)} samples", structs.MicroBatch, values)


def _column(samples: Sequence[TrainingSample], name: str) -> list[Any]:
    values: list[Any] = np.concatenate([getattr(sample, name) for sample in samples]).tolist()
    return values


def _trained(samples: Sequence[TrainingSample], name: str) -> list[float]:
    values: list[float] = np.concatenate([trained_values(sample, name) for sample in samples]).tolist()
    return values


def _advantages(target: str, samples: Sequence[TrainingSample], structs: Any, struct: Any) -> dict[str, Any]:
    """The advantages in the form that the struct declares."""
    values, mask = _trained(samples, "advantages"), _column(samples, "loss_mask")
    if "advantages" in struct.__struct_fields__:
        channel = getattr(structs, "TrainingAdvantage", None)
        return {"advantages": values if channel is None else [channel(loss=_LOSS, values=values, mask=mask)]}
    if "advantage" not in struct.__struct_fields__:
        raise AdapterError(
            target,
            samples[0],
            "advantages",
            "the struct has no field for them. Use a version of prime-rl with TrainingSample.advantages",
        )
    distinct = np.unique(np.concatenate([sample.advantages[sample.loss_mask] for sample in samples]))
    if len(distinct) != 1:
        raise AdapterError(
            target,
            samples[0],
            "advantages",
            f"its tokens have {len(distinct)} different ones, and this version of the struct has one per sample. "
            "Use a version of prime-rl with advantages per token",
        )
    return {"advantage": float(distinct[0])}


def _media(target: str, sample: TrainingSample, structs: Any) -> dict[str, Any]:
    arguments = media_arguments(target, [sample], torch.float32)
    if not arguments:
        return {}
    encoded = {}
    for name, tensor in arguments.items():
        array = np.ascontiguousarray(tensor.numpy())
        encoded[name] = structs.EncodedTensor(dtype=str(array.dtype), shape=list(array.shape), data=array.tobytes())
    return {"mm_kwargs": encoded, "mm_token_type_ids": mm_token_type_ids(sample).tolist()}


def _built(target: str, row: str, struct: Any, values: dict[str, Any]) -> Any:
    unknown = sorted(set(values) - set(struct.__struct_fields__))
    if unknown:
        raise AdapterError(
            target,
            row,
            unknown[0],
            f"the struct has the fields {', '.join(struct.__struct_fields__)} only. "
            "Use a version of prime-rl whose TrainingSample has token_ids and mask",
        )
    return struct(**values)
