"""SkyRL: `TrainingInputBatch` and its `TensorList`, of `skyrl.backends.skyrl_train.training_batch`."""

from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import Any

import torch

from rollouts.training.adapters.arrays import other_columns, token_arrays
from rollouts.training.adapters.checks import (
    AdapterError,
    check_samples,
    fits_response_of_images,
    media_arguments,
    trainer_module,
)
from rollouts.training.samples import TrainingSample

_TARGET = "SkyRL TrainingInputBatch"
_MEDIA = ("pixel_values", "image_grid_thw")


def skyrl_training_batch(
    samples: Sequence[TrainingSample],
    *,
    pad_id: int,
    dtype: torch.dtype = torch.float32,
    types: ModuleType | None = None,
) -> Any:
    """A SkyRL `TrainingInputBatch` of B rows, padded on the left to T tokens.

    `sequences` and `attention_mask` int64 (B, T). A response begins at the first trained token;
    `response_mask`, `loss_mask` int64 and `rollout_logprobs`, `advantages` float32 are (B, R), aligned to the
    right, R the longest response. `pixel_values` (floats of `dtype`) and `image_grid_thw` are `TensorList`s
    with one tensor per row, None if no row has images. `metadata` has `uids` (the names of the samples),
    `response_length` (R) and `weight_spans`, (version, start, end) for each span of a row, and
    `routed_experts`, if a sample has them.

    SkyRL's models take images in every row of a batch or in none: mixed rows raise `AdapterError`, as do
    media other than the patches and grids of Qwen-VL images and a sampled placeholder token. `types` is the
    module with the two classes; raises `ImportError` where skyrl is not installed.
    """
    check_samples(_TARGET, samples, partial(fits_response_of_images, tensors=_MEDIA))
    structs = trainer_module("skyrl.backends.skyrl_train.training_batch", types)
    rows, responses = (token_arrays(samples, pad_id=pad_id, side="left", part=part) for part in ("all", "response"))
    batch = structs.TrainingInputBatch(
        {
            "sequences": rows.token_ids,
            "attention_mask": rows.is_token,
            "response_mask": responses.is_token,
            "loss_mask": responses.loss_mask,
            "rollout_logprobs": responses.logprobs,
            "advantages": responses.advantages,
            **_media(samples, dtype, structs),
        }
    )
    batch.metadata = {
        "uids": [sample.name for sample in samples],
        "response_length": responses.is_token.shape[1],
        **other_columns(samples),
    }
    return batch


def _media(samples: Sequence[TrainingSample], dtype: torch.dtype, structs: Any) -> dict[str, Any]:
    if not any(sample.media for sample in samples):
        return dict.fromkeys(_MEDIA)
    rows = [media_arguments(_TARGET, [sample], dtype) for sample in samples]
    for sample, row in zip(samples, rows, strict=True):
        if missing := [name for name in _MEDIA if name not in row]:
            rule = "Make one batch of the samples with images and another of those without"
            reason = f"it has no {missing[0]} and other rows of the batch have. {rule}"
            raise AdapterError(_TARGET, sample, "media", reason)
    return {name: structs.TensorList([row[name] for row in rows]) for name in _MEDIA}
