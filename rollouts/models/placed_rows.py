"""Token sequences with media, laid out in rows: one sequence a row with padding, or several sequences packed in a row.

Every image, video and sound is placed by its range, not by token id: a policy can sample a literal `<|image_pad|>`,
which a search by token id would mistake for an image.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from renderers import MediaItem, PlaceholderRange
from renderers.placement import PlacedItem
from renderers.rendered import TOKEN_TYPE_IDS
from rollouts.errors import SampleError, UnsupportedModelError
from rollouts.models.architecture import Architecture, cache_argument


class TokenSequence(NamedTuple):
    """Token ids, integers (n,), with media in prompt order; ranges count from the first token. `name` is for errors."""

    ids: np.ndarray
    media: Sequence[PlacedItem] = ()
    name: str = "-"


def beginning(sequence: TokenSequence, length: int) -> TokenSequence:
    """The first `length` tokens of a sequence, a number that cuts no range of an item."""
    media = tuple(pair for pair in sequence.media if pair[1].offset < length)
    return TokenSequence(sequence.ids[:length], media, sequence.name)


class RowItem(NamedTuple):
    """An item in rows: its sequence, its row, and its range in columns of the row."""

    item: MediaItem
    sequence: int
    row: int
    placeholder: PlaceholderRange


@dataclass(frozen=True, slots=True, eq=False)
class PlacedRows:
    """N sequences in B rows and T columns.

    `input_ids` int64 (B, T); `position_ids` int64 (B, T), the position of a token within its sequence, 0 on padding;
    `sequence_ids` int32 (B, T), the index in `sequences`, -1 on padding; `starts` int64 (N, 2), row and column of the
    first token of each sequence. `packed`: a row may hold several sequences, which do not attend to each other.
    """

    sequences: tuple[TokenSequence, ...]
    input_ids: np.ndarray
    position_ids: np.ndarray
    sequence_ids: np.ndarray
    starts: np.ndarray
    packed: bool

    @property
    def attention_mask(self) -> np.ndarray:
        """bool (B, T), False on padding."""
        mask: np.ndarray = self.sequence_ids >= 0
        return mask

    def items(self) -> list[RowItem]:
        """The media of all sequences, by row and column."""
        placed = [
            RowItem(item, index, int(row), placeholder.shifted(int(column)))
            for index, (sequence, (row, column)) in enumerate(zip(self.sequences, self.starts, strict=True))
            for item, placeholder in sequence.media
        ]
        return sorted(placed, key=lambda each: (each.row, each.placeholder.offset))

    def token_types(self) -> np.ndarray:
        """int64 (B, T): 1 on feature tokens of images, 2 of videos, 3 of sounds, by range; 0 elsewhere."""
        types = np.zeros(self.input_ids.shape, dtype=np.int64)
        for each in self.items():
            for modality, start, end in each.placeholder.runs_of(each.item):
                types[each.row, start:end] = TOKEN_TYPE_IDS[modality]
        return types


def padded_rows(
    sequences: Sequence[TokenSequence], *, pad_id: int, side: Literal["left", "right"] = "right"
) -> PlacedRows:
    """One sequence a row, padded on one side to the longest of them."""
    width = max(len(sequence.ids) for sequence in sequences)
    starts = np.zeros((len(sequences), 2), dtype=np.int64)
    starts[:, 0] = np.arange(len(sequences))
    if side == "left":
        starts[:, 1] = [width - len(sequence.ids) for sequence in sequences]
    return placed_rows(sequences, starts, (len(sequences), width), pad_id=pad_id, packed=False)


def placed_rows(
    sequences: Sequence[TokenSequence], starts: np.ndarray, shape: tuple[int, int], *, pad_id: int, packed: bool
) -> PlacedRows:
    """Sequences that begin at `starts`, int64 (N, 2) row and column, in rows of `shape` (B, T)."""
    input_ids = np.full(shape, pad_id, dtype=np.int64)
    position_ids = np.zeros(shape, dtype=np.int64)
    sequence_ids = np.full(shape, -1, dtype=np.int32)
    for index, (sequence, (row, column)) in enumerate(zip(sequences, starts, strict=True)):
        columns = slice(column, column + len(sequence.ids))
        input_ids[row, columns] = sequence.ids
        position_ids[row, columns] = np.arange(len(sequence.ids))
        sequence_ids[row, columns] = index
    return PlacedRows(tuple(sequences), input_ids, position_ids, sequence_ids, starts, packed)


def row_positions(architecture: Architecture, rows: PlacedRows) -> tuple[np.ndarray, np.ndarray]:
    """Position ids of rows, and int64 (N,) the position of the token that would follow each sequence.

    The position ids are int64 (B, T), counted from each sequence's first token, 0 on padding. For a model with M-RoPE
    they are (3, B, T), time, row and column; for packed rows (4, B, T) with the text positions first, from which
    transformers derives where a sequence begins.
    """
    lengths = np.array([len(sequence.ids) for sequence in rows.sequences], dtype=np.int64)
    if not architecture.mrope:
        return rows.position_ids, lengths
    positions: np.ndarray = np.repeat(rows.position_ids[None], 3, axis=0)
    following: np.ndarray = lengths
    for index, (sequence, (row, column)) in enumerate(zip(rows.sequences, rows.starts, strict=True)):
        if sequence.media:
            own, next_position = media_positions(architecture, sequence)
            if own.dtype != positions.dtype:  # fractions: a video of Qwen3-Omni
                positions, following = positions.astype(own.dtype), following.astype(own.dtype)
            following[index] = next_position
            positions[:, row, column : column + len(sequence.ids)] = own
    return (np.concatenate([rows.position_ids[None], positions]) if rows.packed else positions), following


def media_positions(architecture: Architecture, sequence: TokenSequence) -> tuple[np.ndarray, float]:
    """M-RoPE positions (3, n) of a sequence with media, and the position of the token that would follow it.

    They are int64, or float32 where Qwen3-Omni gives the frames of a video fractions. Raises `SampleError` for a video
    with its sound that does not begin with the tokens that Omni models want there.
    """
    parts: list[tuple[np.ndarray, float]] = []
    begin = 0
    for item, placeholder in sequence.media:
        if item.modality == "video" and item.has_sound:
            parts.append(_positions(architecture, _part(sequence, begin, placeholder.offset - 1)))
            parts.append(_positions_with_sound(architecture, sequence, item, placeholder))
            begin = placeholder.end + 1
    if not parts:
        return _positions(architecture, sequence)
    parts.append(_positions(architecture, _part(sequence, begin, len(sequence.ids))))
    starts = np.cumsum([0, *(following for _, following in parts)])
    positions = np.concatenate([own + start for (own, _), start in zip(parts, starts[:-1], strict=True)], axis=1)
    return _whole_numbers(positions), starts[-1].item()


def _part(sequence: TokenSequence, begin: int, end: int) -> TokenSequence:
    """The tokens `begin:end` of a sequence, with the media in them; it cuts no range of an item."""
    media = [(item, at.shifted(-begin)) for item, at in sequence.media if begin <= at.offset < end]
    return TokenSequence(sequence.ids[begin:end], media, sequence.name)


def _whole_numbers(positions: np.ndarray) -> np.ndarray:
    """int64 if all positions are whole numbers, else float32."""
    return positions.astype(np.int64 if (positions == np.floor(positions)).all() else np.float32)


def _positions_with_sound(
    architecture: Architecture, sequence: TokenSequence, item: MediaItem, placeholder: PlaceholderRange
) -> tuple[np.ndarray, float]:
    """`media_positions` of a video with its sound alone, from the start token before its range to the end token behind.

    The two start tokens, of the video and of its sound, have one position in Qwen2.5-Omni, and so have the end tokens.
    """
    begin = placeholder.offset - 1
    config = architecture.base.config
    starts = [config.vision_start_token_id, config.audio_start_token_id]
    if begin < 0 or sequence.ids[begin : begin + 2].tolist() != starts:
        raise SampleError(
            sequence.name,
            f"the video with its sound at {placeholder.offset} does not begin with the tokens {starts}, by which "
            f"{architecture.model_type} finds it. Render the row with the chat template of this model",
        )
    ids = np.append(sequence.ids[begin : placeholder.end + 1].astype(np.int64), architecture.neutral_id)
    positions, _ = architecture.base.get_rope_index(
        torch.from_numpy(ids)[None],
        attention_mask=torch.ones((1, len(ids)), dtype=torch.int64),
        use_audio_in_video=True,
        audio_seqlens=torch.tensor([int(item[_FRAMES].sum())]),
        **_grids(architecture, [item]),
    )
    own = _whole_numbers(positions[:, 0].numpy())
    return own[:, :-1], own[0, -1].item()


def _positions(architecture: Architecture, sequence: TokenSequence) -> tuple[np.ndarray, float]:
    """`media_positions` of a sequence without videos that have their sound.

    `get_rope_index` of the model computes them. It reads token types and takes adjacent runs of one type for one image;
    here a text token is inserted between such runs, and its position is taken out of the result again. A text token is
    appended too: its position is the following one. Qwen's Omni models read token ids instead, and want a start token
    before each image and video: here it is inserted. The tokens of a sound have the positions of text.
    """
    by_ids = "mm_token_type_ids" not in inspect.signature(architecture.base.get_rope_index).parameters
    runs = [
        (start, end, item.modality)
        for item, placeholder in sequence.media
        for start, end in placeholder.runs
        if not (by_ids and item.modality == "audio")
    ]
    types = np.zeros(len(sequence.ids), dtype=np.int64)
    for start, end, modality in runs:
        types[start:end] = TOKEN_TYPE_IDS[modality]
    if by_ids:
        inserts = [edge for start, end, _ in runs for edge in (start, end)]
    else:
        inserts = [begin for (_, end, _), (begin, _, _) in itertools.pairwise(runs) if begin == end]
    inserts.append(len(types))
    inserted_at = np.array(inserts) + np.arange(len(inserts))
    ids = np.insert(np.asarray(sequence.ids, dtype=np.int64), inserts, architecture.neutral_id)
    types = np.insert(types, inserts, 0)
    inserted = np.zeros(len(ids), dtype=bool)
    inserted[inserted_at] = True
    if by_ids:
        config = architecture.base.config
        ids[types == 0] = architecture.neutral_id
        ids[inserted_at[:-1:2]] = config.vision_start_token_id
        types = np.ones_like(types)
    given = {"attention_mask" if by_ids else "mm_token_type_ids": torch.from_numpy(types)[None]}
    # Device: the CPU, because the result is read there.
    positions, _ = architecture.base.get_rope_index(
        torch.from_numpy(ids)[None], **given, **_grids(architecture, [item for item, _ in sequence.media])
    )
    own = _whole_numbers(positions[:, 0].numpy() - (np.cumsum(inserted) - inserted))
    return own[:, ~inserted], own[0, -1].item()


def _grids(architecture: Architecture, items: Sequence[MediaItem]) -> Mapping[str, Any]:
    """The tensors of the media that `get_rope_index` takes: grids, and for some models seconds per frame."""
    takes = inspect.signature(architecture.base.get_rope_index).parameters
    names = {name: name for item in items for name in item if name in takes}
    if "second_per_grids" in takes and any(_SECONDS in item for item in items):
        names["second_per_grids"] = _SECONDS
    return {
        name: torch.from_numpy(np.stack([item[tensor] for item in items if tensor in item]))
        for name, tensor in names.items()
    }


# What processors of Omni models call `second_per_grids`, and the mask of the frames of a sound.
_SECONDS = "video_second_per_grid"
_FRAMES = "feature_attention_mask"


# Attention masks of packed rows: the masks that the model makes for each sequence, as blocks on the diagonal.


def packed_masks(architecture: Architecture, rows: PlacedRows, token_types: torch.Tensor) -> Any:
    """What the model's forward takes as `attention_mask`: a mask (B, 1, T, T), or a dict of them by type of layer.

    `token_types` int64 (B, T), on the model's device. The blocks come from `create_masks_for_generate`, with which
    `generate` prepares masks: sliding windows, and images attended in both directions, are as the model has them.
    A padding token attends to itself. Raises `UnsupportedModelError` where the model makes no such masks.
    """
    whole: dict[str, torch.Tensor] = {}
    for sequence, (row, column) in zip(rows.sequences, rows.starts.tolist(), strict=True):
        columns = slice(column, column + len(sequence.ids))
        for kind, block in _blocks(architecture, token_types[row : row + 1, columns]).items():
            if kind not in whole:
                whole[kind] = _empty(block, rows.input_ids.shape)
            whole[kind][row, 0, columns, columns] = block
    return whole[""] if whole.keys() == {""} else whole


def _blocks(architecture: Architecture, token_types: torch.Tensor) -> Mapping[str, torch.Tensor]:
    """The masks (L, L) of one sequence with `token_types` (1, L), by type of layer; "" if all layers have one."""
    from transformers.masking_utils import create_masks_for_generate

    model, length = architecture.model, token_types.shape[1]
    create = getattr(model, "create_masks_for_generate", create_masks_for_generate)
    masks = create(
        config=model.config,
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
            f"it makes no attention masks of shape (1, 1, {length}, {length}) for one sequence, so that none can be "
            'made for packed rows. Use layout="padded", or load it with attn_implementation="sdpa" or "eager"',
        )
    return mask[0, 0]


def _empty(block: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A mask (B, 1, T, T) of the type of a block in which each token attends to itself only."""
    rows, columns = shape
    hidden = False if block.dtype == torch.bool else torch.finfo(block.dtype).min
    mask = torch.full((rows, 1, columns, columns), hidden, dtype=block.dtype, device=block.device)
    diagonal = torch.arange(columns, device=block.device)
    mask[:, :, diagonal, diagonal] = True if block.dtype == torch.bool else 0.0
    return mask
