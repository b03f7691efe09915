"""verl: `DataProto` of `verl.protocol`."""

import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch

from rollouts.models.positions import mrope_positions
from rollouts.training.adapters.arrays import other_columns, token_arrays
from rollouts.training.adapters.checks import Violations, check_samples, has_response, media_arguments, trainer_module
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

    A response begins at the first trained token. `batch` has `prompts` (B, P), `responses` (B, R),
    `input_ids` and `attention_mask` (B, P + R), `response_mask` (B, R), all int64; `rollout_log_probs`,
    `advantages` float32 (B, R); and `position_ids` int64, (B, P + R), or with `mrope` (models of Qwen-VL) (B,
    4, P + R): the position in the row, then M-RoPE's time, row and column. Padding has position 0, and 1 in
    M-RoPE, as in transformers' `get_rope_index`.

    `non_tensor_batch` has `multi_modal_inputs` (a dict of the model's arguments per row, floats of `dtype`,
    empty for text; `images_seqlens` are the patches of each frame), `weight_spans`, `sample_name` and, if a
    sample has them, `routed_experts`. `types` is the module with `DataProto`. Raises `AdapterError` for a
    sampled placeholder token and for media without grids under `mrope`, and `ImportError` where verl is not
    installed.
    """
    check_samples(_TARGET, samples, has_response, *([_unknown_positions] if mrope else []))
    module = trainer_module("verl.protocol", types)
    prompts = token_arrays(samples, pad_id=pad_id, side="left", part="prompt")
    responses = token_arrays(samples, pad_id=pad_id, part="response")
    attention_mask = torch.cat([prompts.is_token, responses.is_token], dim=1)
    tensors = {
        "prompts": prompts.token_ids,
        "responses": responses.token_ids,
        "input_ids": torch.cat([prompts.token_ids, responses.token_ids], dim=1),
        "attention_mask": attention_mask,
        "response_mask": responses.loss_mask,
        "rollout_log_probs": responses.logprobs,
        "advantages": responses.advantages,
        "position_ids": _position_ids(samples, attention_mask.bool(), mrope),
    }
    others: dict[str, list[Any]] = {
        "multi_modal_inputs": [_media(sample, dtype) for sample in samples],
        "sample_name": [sample.name for sample in samples],
        **other_columns(samples),
    }
    columns = {name: _objects(values) for name, values in others.items()}
    return module.DataProto.from_dict(tensors=tensors, non_tensors=columns)


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


def _unknown_positions(sample: TrainingSample) -> Violations:
    """Media whose tensors do not tell their positions of M-RoPE."""
    for item, placeholder in sample.media:
        grid = item.get(f"{item.modality}_grid_thw")
        # The frames of a video are images of their own, as Qwen3-VL has them; other models count its time
        # otherwise.
        if grid is None or grid[0] != len(placeholder.runs):
            yield (
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
