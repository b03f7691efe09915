"""Attention masks of packed rows: what a token sees in its sequence by the model's own masks, at its columns."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from rollouts.errors import UnsupportedModelError
from rollouts.models.architecture import Architecture, attends_by_types, cache_argument
from rollouts.models.placed_rows import PlacedRows

FLEX_ATTENTION = "flex_attention"
_MASK_FUNCTION = "mmrollouts_mask_function"  # an implementation of attention, whose mask is the function of places


def packed_masks(architecture: Architecture, rows: PlacedRows, token_types: torch.Tensor) -> Any:
    """What the forward takes as `attention_mask`: a mask (B, 1, T, T), or a dict of them by type of layer.

    `token_types` int64 (B, T), on the model's device. The masks come from `create_masks_for_generate`, with
    which `generate` prepares them: sliding windows, and images attended in both directions, are as the model
    has them; for FlexAttention they are `BlockMask`s. A padding token attends to itself. Raises
    `UnsupportedModelError` where the model makes no such masks, and for a `BlockMask` of such images.
    """
    if architecture.attention == FLEX_ATTENTION:
        if token_types.any() and attends_by_types(architecture):
            reason = "its images are attended in both directions, for which no BlockMask is made"
            raise UnsupportedModelError(architecture.model_type, f'{reason}. Load it with attn_implementation="sdpa"')
        return _block_masks(architecture, rows)
    types = token_types.cpu().numpy()
    whole: dict[str, torch.Tensor] = {}
    made: list[tuple[np.ndarray, Mapping[str, torch.Tensor]]] = []
    # The longest sequences first: what a token sees depends on the types up to it, so that a sequence whose
    # types begin a longer one takes its block from that of the longer one.
    for path in sorted(rows.paths, key=lambda path: -len(path.columns)):
        own, length = types[path.row, path.columns], len(path.columns)
        blocks = next((blocks for known, blocks in made if np.array_equal(known[:length], own)), None)
        if blocks is None:
            blocks = _blocks(architecture, torch.from_numpy(own)[None].to(token_types.device))
            made.append((own, blocks))
        columns = torch.from_numpy(path.columns).to(token_types.device)
        for kind, block in blocks.items():
            if kind not in whole:
                whole[kind] = _empty(block, rows.input_ids.shape)
            of_row, new = whole[kind][path.row, 0], columns[path.shared :]
            of_row[new[:, None], columns] = block[path.shared : length, :length]
    return _by_kind_or_one(whole)


def _by_kind_or_one(masks: dict[str, Any]) -> Any:
    return masks[""] if masks.keys() == {""} else masks


def _block_masks(architecture: Architecture, rows: PlacedRows) -> Any:
    """`BlockMask`s (B, 1, T, T), which keep blocks of 128 columns and a function."""
    from torch.nn.attention.flex_attention import create_block_mask
    from transformers.masking_utils import AttentionMaskInterface

    device, (batch, width) = architecture.model.device, rows.input_ids.shape
    places, ends = (torch.from_numpy(each).to(device) for each in (rows.position_ids, _ends(rows)))
    # Compiled, it makes no bools (T, T).
    create = torch.compile(create_block_mask) if device.type == "cuda" else create_block_mask

    def block_mask(function: Callable[..., torch.Tensor]) -> Any:
        def sees(row: torch.Tensor, head: torch.Tensor, token: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
            in_sequence = (other <= token) & (token < ends[row, other])
            seen = function(row * 0, head, places[row, token], places[row, other])  # made for one sequence
            return (in_sequence & seen) | (token == other)

        return create(sees, batch, None, width, width, device=device)

    AttentionMaskInterface.register(_MASK_FUNCTION, _mask_function)
    config = copy.deepcopy(architecture.model.config)
    config._attn_implementation = _MASK_FUNCTION
    functions = _made_masks(architecture, config, torch.zeros((1, 1), dtype=torch.int64, device=device))
    if not all(map(callable, functions.values())):
        raise UnsupportedModelError(architecture.model_type, "its masks are not made of mask functions of transformers")
    return _by_kind_or_one({kind: block_mask(function) for kind, function in functions.items()})


def _mask_function(*, mask_function: Callable[..., torch.Tensor], **_: Any) -> Callable[..., torch.Tensor]:
    return mask_function


def _ends(rows: PlacedRows) -> np.ndarray:
    """int64 (B, T): the column behind the last token whose sequence has this token; 0 on padding.

    What `tree_rows` places between the two has it too: sequences are in an order in which those that begin
    alike are neighbours.
    """
    ends = np.zeros(rows.input_ids.shape, dtype=np.int64)
    for path in rows.paths:
        end = path.columns[-1:].max(initial=-1) + 1
        ends[path.row, path.columns] = np.maximum(ends[path.row, path.columns], end)
    return ends


def _made_masks(architecture: Architecture, config: Any, token_types: torch.Tensor) -> dict[str, Any]:
    """What the model makes for one sequence with `token_types` (1, L), by type of layer; "" if all layers have one."""
    from transformers.masking_utils import create_masks_for_generate

    model, length = architecture.model, token_types.shape[1]
    create = getattr(model, "create_masks_for_generate", create_masks_for_generate)
    masks = create(
        config=config,
        # Only its shape, dtype and device are read.
        inputs_embeds=torch.empty((1, length, 0), dtype=model.dtype, device=model.device),
        attention_mask=torch.ones((1, length), dtype=torch.int64, device=model.device),
        **{cache_argument(create): None},
        position_ids=torch.arange(length, device=model.device)[None],
        token_type_ids=token_types,
        mm_token_type_ids=token_types,
        is_first_iteration=True,
    )
    return masks if isinstance(masks, dict) else {"": masks}


def _blocks(architecture: Architecture, token_types: torch.Tensor) -> Mapping[str, torch.Tensor]:
    """Masks (L, L) of one sequence with `token_types` (1, L), by type of layer."""
    masks = _made_masks(architecture, architecture.model.config, token_types)
    return {kind: _block(architecture, mask, token_types.shape[1]) for kind, mask in masks.items()}


def _block(architecture: Architecture, mask: Any, length: int) -> torch.Tensor:
    """What is added to the scores of one sequence (L, L): 0 where a token sees another, else the smallest.

    Of a mask of bools, each layer would make such numbers of its own, and keep them for the backward pass.
    """
    model = architecture.model
    if mask is None:  # transformers leaves out a mask that is causal and nothing else
        mask = torch.ones((1, 1, length, length), dtype=torch.bool, device=model.device).tril()
    if not isinstance(mask, torch.Tensor) or mask.shape != (1, 1, length, length):
        raise UnsupportedModelError(
            architecture.model_type,
            f"it makes no attention masks of shape (1, 1, {length}, {length}) for one sequence, so that "
            "none can be "
            'made for packed rows. Use layout="padded", or load it with attn_implementation="sdpa" or "eager"',
        )
    if mask.dtype == torch.bool:
        numbers = torch.zeros(mask.shape, dtype=model.dtype, device=mask.device)
        mask = numbers.masked_fill_(~mask, torch.finfo(model.dtype).min)
    block: torch.Tensor = mask[0, 0]
    return block


def _empty(block: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A mask (B, 1, T, T) of the type of a block in which each token attends to itself only."""
    rows, columns = shape
    hidden = torch.finfo(block.dtype).min
    mask = torch.full((rows, 1, columns, columns), hidden, dtype=block.dtype, device=block.device)
    diagonal = torch.arange(columns, device=block.device)
    # A row of a softmax in which nothing is visible would be NaN.
    mask[:, :, diagonal, diagonal] = 0.0
    return mask
