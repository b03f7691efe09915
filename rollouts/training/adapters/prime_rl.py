"""prime-rl: `TrainingSample` and `MicroBatch` of `prime_rl.transports.rollouts.types`, msgspec structs of its wire."""

from collections.abc import Collection, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch

from rollouts.training.adapters.arrays import token_arrays
from rollouts.training.adapters.checks import (
    AdapterError,
    check_samples,
    media_arguments,
    trainer_module,
    without_parts,
)
from rollouts.training.samples import TrainingSample
from rollouts.values import check_positive

_LACKING = ("weight_spans", "routed_experts", "top_logprobs")


def prime_rl_sample(
    sample: TrainingSample,
    *,
    temperature: float,
    env_name: str,
    omit: Collection[str] = (),
    types: ModuleType | None = None,
) -> Any:
    """A `prime_rl.transports.rollouts.types.TrainingSample` of one sample.

    `token_ids`, `mask`, `logprobs`, `temperatures` and `advantages` have one value per token; `mm_kwargs` are
    the model's arguments, floats in float32, and `mm_token_type_ids` mark media tokens by range. prime-rl
    divides logits by `temperature` before it compares them with `logprobs`: pass 1.0 for the
    log-probabilities of the raw distribution, which engines here report, else the temperature that they
    include. `types` is the module with the structs.

    The struct has no field for weight versions, and its `routed_experts` are bytes of its own inference
    server: `omit=("weight_spans", "routed_experts")` leaves them out. Raises `AdapterError` for what the
    struct cannot hold, `ArgumentError` for a temperature that is no positive number, and `ImportError` where
    prime-rl is not installed.
    """
    structs, columns = _columns("prime-rl TrainingSample", [sample], temperature, omit, types)
    return structs.TrainingSample(env_name=env_name, **columns)


def prime_rl_micro_batch(
    samples: Sequence[TrainingSample],
    *,
    temperature: float,
    env_name: str,
    omit: Collection[str] = (),
    types: ModuleType | None = None,
) -> Any:
    """A `prime_rl.transports.rollouts.types.MicroBatch`: packed samples of text, or one sample with media.

    `position_ids` count from 0 in each sample; `sequence_lengths` and `seq_lens` have the lengths. prime-rl
    trains a sample with media in a micro batch of its own; others beside it raise `AdapterError`. Otherwise
    as `prime_rl_sample`.
    """
    target = "prime-rl MicroBatch"
    structs, columns = _columns(target, samples, temperature, omit, types)
    with_media = [sample for sample in samples if sample.media]
    if with_media and len(samples) > 1:
        others = f"it is packed with {len(samples) - 1} other samples, and prime-rl packs text only"
        reason = f"{others}. Give each sample with media a micro batch of its own"
        raise AdapterError(target, with_media[0], "media", reason)
    lengths = [len(sample) for sample in samples]
    renamed = {"token_ids": "input_ids", "mask": "loss_mask", "logprobs": "inference_logprobs"}
    return structs.MicroBatch(
        position_ids=[position for length in lengths for position in range(length)],
        sequence_lengths=lengths,
        seq_lens=list(lengths),
        env_names=[env_name] * sum(lengths),
        **{renamed.get(name, name): values for name, values in columns.items()},
    )


def _columns(
    target: str, samples: Sequence[TrainingSample], temperature: float, omit: Collection[str], types: ModuleType | None
) -> tuple[Any, dict[str, Any]]:
    """The module of the structs, and the fields of a `TrainingSample`: those of all samples, one after another."""
    check_samples(target, samples, without_parts(_LACKING, omit))
    rule = "pass the temperature of sampling, a number above 0"
    temperature = check_positive("temperature", temperature, rule)
    structs = trainer_module("prime_rl.transports.rollouts.types", types)
    rows = token_arrays(samples)
    of_tokens = {name: column[rows.is_token.bool()] for name, column in rows._asdict().items()}
    columns = {
        "token_ids": of_tokens["token_ids"].tolist(),
        "mask": of_tokens["loss_mask"].bool().tolist(),
        "logprobs": of_tokens["logprobs"].tolist(),
        "advantages": of_tokens["advantages"].tolist(),
        "temperatures": [temperature] * len(of_tokens["token_ids"]),
    }
    if arguments := media_arguments(target, samples, torch.float32):
        arrays = {name: np.ascontiguousarray(tensor.numpy()) for name, tensor in arguments.items()}
        columns["mm_kwargs"] = {
            name: structs.EncodedTensor(dtype=str(array.dtype), shape=list(array.shape), data=array.tobytes())
            for name, array in arrays.items()
        }
        columns["mm_token_type_ids"] = of_tokens["media_types"].tolist()
    return structs, columns
