"""verl: `DataProto` of `verl.protocol`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch

from rollouts.models.positions import mrope_positions
from rollouts.training.adapters.arguments import (
    AdapterError,
    check_samples,
    first_trained,
    media_arguments,
    optional_columns,
    padded,
    presence,
    trained_values,
    trainer_module,
    weight_spans,
)
from rollouts.training.samples import TrainingSample

_TARGET = "verl DataProto"


def verl_data_proto(
    samples: Sequence[TrainingSample],
    *,
    pad_id: int,
    mrope: bool,
    dtype: torch.dtype = torch.float32,
    types: ModuleType | None = None,
) -> Any:
    """A verl `DataProto` of B rows: P tokens of prompt, padded on the left, then R of response, padded on the right.

    A response begins at the first trained token. `batch` has `prompts` (B, P), `responses` (B, R), `input_ids` and
    `attention_mask` (B, P + R), `response_mask` (B, R), all int64; `rollout_log_probs`, `advantages` float32 (B, R);
    and `position_ids` int64, (B, P + R), or with `mrope` (models of Qwen-VL) (B, 4, P + R): the position in the row,
    then M-RoPE's time, row and column. Padding has position 0, and 1 in M-RoPE, as in transformers' `get_rope_index`.

    `non_tensor_batch` has `multi_modal_inputs` (a dict of the model's arguments per row, floats of `dtype`, empty for
    text; `images_seqlens` are the patches of each frame), `weight_spans`, `sample_name` and, if a sample has
    them, `routed_experts`. `types` is the module with `DataProto`. Raises `AdapterError` for a sampled placeholder
    token and for media without grids under `mrope`, and
    `ImportError` where verl is not installed.
    """
    samples = check_samples(_TARGET, samples, first_trained, *([_refuse_unknown_positions] if mrope else []))
    module = trainer_module("verl.protocol", types)
    starts = [first_trained(_TARGET, sample) for sample in samples]
    prompts = [sample.token_ids[:start] for sample, start in zip(samples, starts, strict=True)]

    def responses(columns: list[np.ndarray], kind: type, fill: int = 0) -> torch.Tensor:
        return padded([column[start:] for column, start in zip(columns, starts, strict=True)], fill, kind, "right")

    tensors = {
        "prompts": padded(prompts, pad_id, np.int64, "left"),
        "responses": responses([sample.token_ids for sample in samples], np.int64, pad_id),
    }
    lengths = [len(sample) - start for sample, start in zip(samples, starts, strict=True)]
    attention_mask = torch.cat([presence(starts, "left"), presence(lengths, "right")], dim=1)
    tensors |= {
        "input_ids": torch.cat([tensors["prompts"], tensors["responses"]], dim=1),
        "attention_mask": attention_mask,
        "response_mask": responses([sample.loss_mask for sample in samples], np.int64),
        "rollout_log_probs": responses([trained_values(sample, "logprobs") for sample in samples], np.float32),
        "advantages": responses([trained_values(sample, "advantages") for sample in samples], np.float32),
        "position_ids": _position_ids(samples, attention_mask.bool(), mrope),
    }
    others = {
        "multi_modal_inputs": _objects([_media(sample, dtype) for sample in samples]),
        "weight_spans": _objects([weight_spans(sample) for sample in samples]),
        "sample_name": _objects([sample.name for sample in samples]),
        **{name: _objects(values) for name, values in optional_columns(samples).items()},
    }
    return module.DataProto.from_dict(tensors=tensors, non_tensors=others)


def _objects(values: Sequence[object]) -> np.ndarray:
    """An array of objects (n,); `np.array` makes two dimensions of lists of equal length."""
    array = np.empty(len(values), dtype=object)
    for index, value in enumerate(values):
        array[index] = value
    return array


def _position_ids(samples: Sequence[TrainingSample], is_token: torch.Tensor, mrope: bool) -> torch.Tensor:
    text = torch.zeros(is_token.shape, dtype=torch.int64)
    text[is_token] = torch.cat([torch.arange(len(sample)) for sample in samples])
    if not mrope:
        return text
    vision = torch.ones((len(samples), 3, is_token.shape[1]), dtype=torch.int64)
    for row, sample, mask in zip(vision, samples, is_token, strict=True):
        row[:, mask] = torch.from_numpy(_mrope(sample))
    return torch.cat([text[:, None], vision], dim=1)


def _refuse_unknown_positions(target: str, sample: TrainingSample) -> None:
    """Raise `AdapterError` for media whose tensors do not tell their positions of M-RoPE."""
    for item, placeholder in sample.media:
        grid = item.get(f"{item.modality}_grid_thw")
        # The frames of a video are images of their own, as Qwen3-VL has them; other models count its time otherwise.
        if grid is None or grid[0] != len(placeholder.runs):
            raise AdapterError(
                target,
                sample,
                "position_ids",
                f"{item.modality} {item.mm_hash[:12]} has the tensors {', '.join(item)} and "
                f"{len(placeholder.runs)} runs of tokens; M-RoPE is computed from a grid with one run for each frame. "
                "Leave the sample out, or pass mrope=False for a model without M-RoPE",
            )


def _mrope(sample: TrainingSample) -> np.ndarray:
    """Int64 (3, n)."""
    merge_size = 1
    for item, _ in sample.media:
        merge_size = math.isqrt(int(item[f"{item.modality}_grid_thw"].prod()) // item.num_tokens)
    return mrope_positions(len(sample), sample.media, merge_size)[0]


def _media(sample: TrainingSample, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    arguments = media_arguments(_TARGET, [sample], dtype)
    if (grids := arguments.get("image_grid_thw")) is not None:
        arguments["images_seqlens"] = torch.repeat_interleave(grids[:, 1] * grids[:, 2], grids[:, 0])
    return arguments
