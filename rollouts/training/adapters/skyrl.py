"""SkyRL: `TrainingInputBatch` and its `TensorList`, of `skyrl.backends.skyrl_train.training_batch`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import torch

from rollouts.training.adapters.arguments import (
    AdapterError,
    check_samples,
    first_trained,
    media_arguments,
    optional_columns,
    padded,
    presence,
    refuse_other_arguments,
    trained_values,
    trainer_module,
    weight_spans,
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

    `sequences` and `attention_mask` int64 (B, T). A response begins at the first trained token; `response_mask`,
    `loss_mask` int64 and `rollout_logprobs`, `advantages` float32 are (B, R), aligned to the right, R the longest
    response. `pixel_values` (floats of `dtype`) and `image_grid_thw` are `TensorList`s with one tensor per row, None
    if no row has images. `metadata` has `uids` (the names of the samples), `response_length` (R) and `weight_spans`,
    (version, start, end) for each span of a row, and `routed_experts`, if a sample has them.

    SkyRL's models take images in every row of a batch or in none: mixed rows raise `AdapterError`, as do media other
    than the patches and grids of Qwen-VL images and a sampled placeholder token. `types` is the module with the two
    classes; raises `ImportError` where skyrl is not installed.
    """
    samples = check_samples(_TARGET, samples, first_trained, partial(refuse_other_arguments, supported=_MEDIA))
    structs = trainer_module("skyrl.backends.skyrl_train.training_batch", types)
    starts = [first_trained(_TARGET, sample) for sample in samples]

    def responses(columns: list[np.ndarray], kind: type) -> torch.Tensor:
        return padded([column[start:] for column, start in zip(columns, starts, strict=True)], 0, kind, "left")

    lengths = [len(sample) - start for sample, start in zip(samples, starts, strict=True)]
    batch = structs.TrainingInputBatch(
        {
            "sequences": padded([sample.token_ids for sample in samples], pad_id, np.int64, "left"),
            "attention_mask": presence([len(sample) for sample in samples], "left"),
            "response_mask": presence(lengths, "left"),
            "loss_mask": responses([sample.loss_mask for sample in samples], np.int64),
            "rollout_logprobs": responses([trained_values(sample, "logprobs") for sample in samples], np.float32),
            "advantages": responses([trained_values(sample, "advantages") for sample in samples], np.float32),
            **_media(samples, dtype, structs),
        }
    )
    batch.metadata = {
        "uids": [sample.name for sample in samples],
        "response_length": max(lengths),
        "weight_spans": [weight_spans(sample) for sample in samples],
        **optional_columns(samples),
    }
    return batch


def _media(samples: Sequence[TrainingSample], dtype: torch.dtype, structs: Any) -> dict[str, Any]:
    rows = [media_arguments(_TARGET, [sample], dtype) for sample in samples]
    if not any(rows):
        return dict.fromkeys(_MEDIA)
    for sample, row in zip(samples, rows, strict=True):
        if missing := [name for name in _MEDIA if name not in row]:
            raise AdapterError(
                _TARGET,
                sample,
                "media",
                f"it has no {missing[0]} and other rows of the batch have. "
                "Make one batch of the samples with images and another of those without",
            )
    return {name: structs.TensorList([row[name] for row in rows]) for name in _MEDIA}
