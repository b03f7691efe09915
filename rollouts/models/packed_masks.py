"""Attention masks of packed rows: those that the model makes for each sequence, as diagonal blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rollouts.errors import UnsupportedModelError
from rollouts.models.architecture import Architecture, cache_argument
from rollouts.models.placed_rows import PlacedRows


def packed_masks(architecture: Architecture, rows: PlacedRows, token_types: torch.Tensor) -> Any:
    """What the forward takes as `attention_mask`: a mask (B, 1, T, T), or a dict of them by type of layer.

    `token_types` int64 (B, T), on the model's device. The blocks come from `create_masks_for_generate`, with
    which `generate` prepares masks: sliding windows, and images attended in both directions, are as the model
    has them. A padding token attends to itself. Raises `UnsupportedModelError` where the model makes no such
    masks.
    """
    whole: dict[str, torch.Tensor] = {}
    for sequence, (row, column) in zip(rows.sequences, rows.starts.tolist(), strict=True):
        columns = slice(column, column + len(sequence))
        for kind, block in _blocks(architecture, token_types[row : row + 1, columns]).items():
            if kind not in whole:
                whole[kind] = _empty(block, rows.input_ids.shape)
            whole[kind][row, 0, columns, columns] = block
    return whole[""] if whole.keys() == {""} else whole


def _blocks(architecture: Architecture, token_types: torch.Tensor) -> Mapping[str, torch.Tensor]:
    """Masks (L, L) of one sequence with `token_types` (1, L), by type of layer; "" if all layers have one."""
    from transformers.masking_utils import create_masks_for_generate

    model, length = architecture.model, token_types.shape[1]
    create = getattr(model, "create_masks_for_generate", create_masks_for_generate)
    masks = create(
        config=model.config,
        # Only its shape, dtype and device are read.
        inputs_embeds=torch.empty((1, length, 0), dtype=model.dtype, device=model.device),
        attention_mask=torch.ones((1, length), dtype=torch.int64, device=model.device),
        **{cache_argument(create): None},
        position_ids=torch.arange(length, device=model.device)[None],
        token_type_ids=token_types,
        mm_token_type_ids=token_types,
        is_first_iteration=True,
    )
    by_kind = masks if isinstance(masks, dict) else {"": masks}
    return {kind: _block(architecture, mask, length) for kind, mask in by_kind.items()}


def _block(architecture: Architecture, mask: Any, length: int) -> torch.Tensor:
    if mask is None:  # transformers leaves out a mask that is causal and nothing else
        return torch.ones((length, length), dtype=torch.bool, device=architecture.model.device).tril()
    if not isinstance(mask, torch.Tensor) or mask.shape != (1, 1, length, length):
        raise UnsupportedModelError(
            architecture.model_type,
            f"it makes no attention masks of shape (1, 1, {length}, {length}) for one sequence, so that "
            "none can be "
            'made for packed rows. Use layout="padded", or load it with attn_implementation="sdpa" or "eager"',
        )
    return mask[0, 0]


def _empty(block: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A mask (B, 1, T, T) of the type of a block in which each token attends to itself only."""
    rows, columns = shape
    hidden = False if block.dtype == torch.bool else torch.finfo(block.dtype).min
    mask = torch.full((rows, 1, columns, columns), hidden, dtype=block.dtype, device=block.device)
    diagonal = torch.arange(columns, device=block.device)
    # A row of a softmax in which nothing is visible would be NaN.
    mask[:, :, diagonal, diagonal] = True if block.dtype == torch.bool else 0.0
    return mask
