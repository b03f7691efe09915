"""TRL: what `GRPOTrainer` trains on after generation, and what `SFTTrainer` and its data collators take."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import torch

from rollouts.training.adapters.arguments import (
    AdapterError,
    check_samples,
    checked_samples,
    first_trained,
    media_arguments,
    mm_token_type_ids,
    optional_columns,
    padded,
    presence,
    refuse_other_arguments,
    refuse_parts,
    trained_values,
    weight_spans,
)
from rollouts.training.samples import TrainingSample

_GRPO, _SFT = "TRL GRPO inputs", "TRL SFT inputs"
_SFT_LACKING = ("logprobs", "advantages", "weight_spans", "routed_experts", "top_logprobs")
_NOT_TRAINED = -100

TypeIds = Literal["mm_token_type_ids", "token_type_ids"] | None
"""The argument of the model's forward that marks media tokens: Qwen-VL has the first, Gemma the second, others none."""


def trl_grpo_inputs(
    samples: Sequence[TrainingSample],
    *,
    pad_id: int,
    dtype: torch.dtype = torch.float32,
    type_ids: TypeIds = "mm_token_type_ids",
) -> dict[str, Any]:
    """The dict that `GRPOTrainer` computes its loss from: B prompts, padded left to P, and completions, right to C.

    A completion begins at the first trained token. `prompt_ids`, `prompt_mask` int64 (B, P); `completion_ids`,
    `completion_mask`, `tool_mask` int64 (B, C), `tool_mask` 1 on trained tokens and on padding; `advantages` and
    `sampling_per_token_logps` float32 (B, C); `num_items_in_batch` the number of trained tokens. With images also
    `pixel_values` (floats of `dtype`), `image_grid_thw` or `image_sizes`, `num_images` per row and, under the name
    `type_ids`, int64 (B, P + C) with 1 on the tokens of images. `weight_spans` has (version, start, end) for each span
    of a row; `routed_experts`, if a sample has them, its array or None for each row.

    TRL takes the present policy as the old one unless `old_per_token_logps` is there: to clip against the sampler, add
    `sampling_per_token_logps` under that name. Raises `AdapterError` for a sampled placeholder token and for media
    whose tensors TRL cannot divide among rows.
    """
    samples = check_samples(
        _GRPO,
        samples,
        first_trained,
        partial(refuse_other_arguments, supported=("pixel_values", "image_grid_thw", "image_sizes")),
    )
    starts = [first_trained(_GRPO, sample) for sample in samples]
    lengths = [len(sample) - start for sample, start in zip(samples, starts, strict=True)]

    def completions(columns: list[np.ndarray], kind: type, fill: int = 0) -> torch.Tensor:
        return padded([column[start:] for column, start in zip(columns, starts, strict=True)], fill, kind, "right")

    prompts = [sample.token_ids[:start] for sample, start in zip(samples, starts, strict=True)]
    return {
        "prompt_ids": padded(prompts, pad_id, np.int64, "left"),
        "prompt_mask": presence(starts, "left"),
        "completion_ids": completions([sample.token_ids for sample in samples], np.int64, pad_id),
        "completion_mask": presence(lengths, "right"),
        "tool_mask": completions([sample.loss_mask for sample in samples], np.int64, 1),
        "advantages": completions([trained_values(sample, "advantages") for sample in samples], np.float32),
        "sampling_per_token_logps": completions([trained_values(sample, "logprobs") for sample in samples], np.float32),
        "num_items_in_batch": torch.tensor(sum(int(sample.loss_mask.sum()) for sample in samples)),
        "weight_spans": [weight_spans(sample) for sample in samples],
        **optional_columns(samples),
        **_grpo_media(samples, starts, dtype, type_ids),
    }


def trl_sft_row(sample: TrainingSample, *, omit: Collection[str] = ()) -> dict[str, list[int]]:
    """A row of a tokenised dataset for `SFTTrainer`: `input_ids` and `labels`, -100 where a token is not trained.

    For samples of text; `trl_sft_batch` takes media too. Labels say neither advantages nor log-probabilities nor weight
    versions nor routed experts: `omit` names those of "advantages", "logprobs", "weight_spans" and "routed_experts" to
    leave out. Raises `AdapterError`.
    """
    (checked,) = checked_samples([sample])
    refuse_parts(_SFT, checked, _SFT_LACKING, omit)
    if checked.media:
        reason = "a row of ids and labels has no place for them. Use trl_sft_batch"
        raise AdapterError(_SFT, checked, "media", reason)
    return {"input_ids": checked.token_ids.tolist(), "labels": _labels(checked).tolist()}


def trl_sft_batch(
    samples: Sequence[TrainingSample],
    *,
    pad_id: int,
    dtype: torch.dtype = torch.float32,
    type_ids: TypeIds = "mm_token_type_ids",
    omit: Collection[str] = (),
) -> dict[str, torch.Tensor]:
    """A batch as a data collator of TRL or transformers returns it: the keyword arguments of the model, with labels.

    `input_ids`, `attention_mask`, `labels` int64 (B, T), padded on the right; with media, the model's arguments, floats
    of `dtype`, and under the name `type_ids` int64 (B, T), 1 on tokens of images and 2 on those of videos.
    `functools.partial(trl_sft_batch, pad_id=...)` is a `data_collator` for a list of samples. `omit` and errors are
    those of `trl_sft_row`.
    """
    samples = check_samples(_SFT, samples, partial(refuse_parts, lacking=_SFT_LACKING, omit=omit))
    batch = {
        "input_ids": padded([sample.token_ids for sample in samples], pad_id, np.int64, "right"),
        "attention_mask": presence([len(sample) for sample in samples], "right"),
        "labels": padded([_labels(sample) for sample in samples], _NOT_TRAINED, np.int64, "right"),
    }
    if any(sample.media for sample in samples):
        types = padded([mm_token_type_ids(sample) for sample in samples], 0, np.int64, "right")
        batch |= {**_named(type_ids, types), **media_arguments(_SFT, samples, dtype)}
    return batch


def _labels(sample: TrainingSample) -> np.ndarray:
    return np.where(sample.loss_mask, sample.token_ids, _NOT_TRAINED)


def _named(type_ids: TypeIds, values: torch.Tensor) -> dict[str, torch.Tensor]:
    return {} if type_ids is None else {type_ids: values}


def _grpo_media(
    samples: Sequence[TrainingSample], starts: Sequence[int], dtype: torch.dtype, type_ids: TypeIds
) -> dict[str, Any]:
    if not any(sample.media for sample in samples):
        return {}
    arguments = media_arguments(_GRPO, samples, dtype)
    num_images = [len(sample.media) for sample in samples]
    if "image_grid_thw" not in arguments and len(arguments["pixel_values"]) != sum(num_images):
        raise AdapterError(
            _GRPO,
            f"{len(samples)} samples",
            "media",
            f"pixel_values has {len(arguments['pixel_values'])} rows for {sum(num_images)} images and there is no "
            "image_grid_thw, so TRL cannot divide them. "
            "Train these samples with token_logprobs",
        )
    types = [mm_token_type_ids(sample) for sample in samples]
    prompts = padded([row[:start] for row, start in zip(types, starts, strict=True)], 0, np.int64, "left")
    completions = padded([row[start:] for row, start in zip(types, starts, strict=True)], 0, np.int64, "right")
    all_types = torch.cat([prompts, completions], dim=1)
    return {**arguments, "num_images": num_images, **_named(type_ids, all_types)}
