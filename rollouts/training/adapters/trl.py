"""TRL: what `GRPOTrainer` trains on after generation, and what `SFTTrainer` and its data collators take."""

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any, Literal

import torch

from rollouts.training.adapters.arrays import TokenArrays, other_columns, token_arrays
from rollouts.training.adapters.checks import (
    AdapterError,
    Violations,
    check_samples,
    fits_response_of_images,
    media_arguments,
    without_parts,
)
from rollouts.training.samples import TrainingSample

_GRPO, _SFT = "TRL GRPO inputs", "TRL SFT inputs"
_SFT_LACKING = ("logprobs", "advantages", "weight_spans", "routed_experts", "top_logprobs")
_NOT_TRAINED = -100

TypeIds = Literal["mm_token_type_ids", "token_type_ids"] | None
"""The argument of the model's forward that marks media tokens: Qwen-VL has the first, Gemma the second,
others none."""


def trl_grpo_inputs(
    samples: Sequence[TrainingSample],
    *,
    pad_id: int,
    dtype: torch.dtype = torch.float32,
    type_ids: TypeIds = "mm_token_type_ids",
) -> dict[str, Any]:
    """The dict that `GRPOTrainer` computes its loss from: B prompts, padded left to P, and completions, right to C.

    A completion begins at the first trained token. `prompt_ids`, `prompt_mask` int64 (B, P);
    `completion_ids`, `completion_mask`, `tool_mask` int64 (B, C), `tool_mask` 1 on trained tokens and on
    padding; `advantages` and `sampling_per_token_logps` float32 (B, C); `num_items_in_batch` the number of
    trained tokens. With images also `pixel_values` (floats of `dtype`), `image_grid_thw` or `image_sizes`,
    `num_images` per row and, under the name `type_ids`, int64 (B, P + C) with 1 on the tokens of images.
    `weight_spans` has (version, start, end) for each span of a row; `routed_experts`, if a sample has them,
    its array or None for each row.

    TRL takes the present policy as the old one unless `old_per_token_logps` is there: to clip against the
    sampler, add `sampling_per_token_logps` under that name. Raises `AdapterError` for a sampled placeholder
    token and for media whose tensors TRL cannot divide among rows.
    """
    tensors = ("pixel_values", "image_grid_thw", "image_sizes")
    check_samples(_GRPO, samples, partial(fits_response_of_images, tensors=tensors))
    prompts = token_arrays(samples, pad_id=pad_id, side="left", part="prompt")
    completions = token_arrays(samples, pad_id=pad_id, part="response")
    inputs = {
        "prompt_ids": prompts.token_ids,
        "prompt_mask": prompts.is_token,
        "completion_ids": completions.token_ids,
        "completion_mask": completions.is_token,
        "tool_mask": completions.loss_mask + (1 - completions.is_token),
        "advantages": completions.advantages,
        "sampling_per_token_logps": completions.logprobs,
        "num_items_in_batch": completions.loss_mask.sum(),
        **other_columns(samples),
    }
    if not any(sample.media for sample in samples):
        return inputs
    arguments = media_arguments(_GRPO, samples, dtype)
    num_images, num_rows = [len(sample.media) for sample in samples], len(arguments["pixel_values"])
    if "image_grid_thw" not in arguments and num_rows != sum(num_images):
        found = f"pixel_values has {num_rows} rows for {sum(num_images)} images and there is no image_grid_thw"
        reason = f"{found}, so TRL cannot divide them. Train these samples with token_logprobs"
        raise AdapterError(_GRPO, f"{len(samples)} samples", "media", reason)
    return {**inputs, **arguments, "num_images": num_images, **_types(type_ids, prompts, completions)}


def trl_sft_row(sample: TrainingSample, *, omit: Collection[str] = ()) -> dict[str, list[int]]:
    """A row of a tokenised dataset for `SFTTrainer`: `input_ids` and `labels`, -100 where a token is not trained.

    For samples of text; `trl_sft_batch` takes media too. Labels say neither advantages nor log-probabilities
    nor weight versions nor routed experts: `omit` names those of "advantages", "logprobs", "weight_spans" and
    "routed_experts" to leave out. Raises `AdapterError`.
    """
    check_samples(_SFT, [sample], without_parts(_SFT_LACKING, omit), _is_text, media_by_id=False)
    rows = token_arrays([sample])
    return {"input_ids": rows.token_ids[0].tolist(), "labels": _labels(rows)[0].tolist()}


def trl_sft_batch(
    samples: Sequence[TrainingSample],
    *,
    pad_id: int,
    dtype: torch.dtype = torch.float32,
    type_ids: TypeIds = "mm_token_type_ids",
    omit: Collection[str] = (),
) -> dict[str, torch.Tensor]:
    """A batch as a data collator of TRL or transformers returns it: the keyword arguments of the model, with labels.

    `input_ids`, `attention_mask`, `labels` int64 (B, T), padded on the right; with media, the model's
    arguments, floats of `dtype`, and under the name `type_ids` int64 (B, T), 1 on tokens of images and 2 on
    those of videos. `functools.partial(trl_sft_batch, pad_id=...)` is a `data_collator` for a list of
    samples. `omit` and errors are those of `trl_sft_row`.
    """
    check_samples(_SFT, samples, without_parts(_SFT_LACKING, omit))
    rows = token_arrays(samples, pad_id=pad_id)
    batch = {"input_ids": rows.token_ids, "attention_mask": rows.is_token, "labels": _labels(rows)}
    if any(sample.media for sample in samples):
        batch |= {**_types(type_ids, rows), **media_arguments(_SFT, samples, dtype)}
    return batch


def _is_text(sample: TrainingSample) -> Violations:
    if sample.media:
        yield "media", "a row of ids and labels has no place for them. Use trl_sft_batch"


def _labels(rows: TokenArrays) -> torch.Tensor:
    return rows.token_ids.where(rows.loss_mask.bool(), _NOT_TRAINED)


def _types(name: TypeIds, *rows: TokenArrays) -> dict[str, torch.Tensor]:
    return {} if name is None else {name: torch.cat([part.media_types for part in rows], dim=1)}
