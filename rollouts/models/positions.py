"""Position ids of rows, which for models with M-RoPE depend on their media."""

import itertools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from renderers import MediaItem, PlaceholderRange
from renderers.placement import PlacedItem
from renderers.rendered import TOKEN_TYPE_IDS
from rollouts.errors import SampleError, UnsupportedModelError
from rollouts.models.architecture import Architecture, parameters_of
from rollouts.models.placed_rows import PlacedRows, TokenRow

# What processors of Omni models call `second_per_grids`, and the mask of the frames of a sound.
_SECONDS = "video_second_per_grid"


def row_positions(architecture: Architecture, rows: PlacedRows) -> tuple[np.ndarray, np.ndarray]:
    """Position ids of rows, and int64 (N,) the position of the token that would follow each whole sequence.

    The position ids are int64 (B, T), counted from each sequence's first token, 0 on padding. For a model
    with M-RoPE they are (3, B, T), time, row and column; for packed rows (4, B, T) with the text positions
    first, from which transformers derives where a sequence begins.
    """
    paths = rows.paths
    lengths = np.array([len(path.sequence) for path in paths], dtype=np.int64)
    if not architecture.mrope:
        return rows.position_ids, lengths
    positions: np.ndarray = np.repeat(rows.position_ids[None], 3, axis=0)
    following: np.ndarray = lengths
    of_begins: dict[object, tuple[np.ndarray, float]] = {}
    of_paths = {}
    for index, path in enumerate(paths):
        if media := path.sequence.media:
            # What follows the last item, and the end token of a video with its sound, is text: it counts on.
            begin = path.sequence.part(0, media[-1][1].end + 1)
            key = begin.token_ids.tobytes(), *((_key(architecture, item), placeholder) for item, placeholder in media)
            if key not in of_begins:
                of_begins[key] = media_positions(architecture, begin)
            own, behind = of_begins[key]
            rest = len(path.sequence) - len(begin)
            next_position = behind + rest
            text = np.broadcast_to(behind + np.arange(rest), (3, rest))
            own = np.concatenate([own, text.astype(own.dtype)], axis=1)
            if own.dtype != positions.dtype:  # fractions: a video of Qwen3-Omni
                positions, following = positions.astype(own.dtype), following.astype(own.dtype)
            following[index] = next_position
            positions[:, path.row, path.columns[path.shared :]] = own[:, path.shared :]
            of_paths[index] = own
    for index, own in of_paths.items():
        if paths[index].shared and (positions[:, paths[index].row, paths[index].columns] != own).any():
            reason = "the positions of tokens depend on media behind them, so that no prefix can be shared"
            raise UnsupportedModelError(architecture.model_type, reason)
    return (np.concatenate([rows.position_ids[None], positions]) if rows.packed else positions), following


def _key(architecture: Architecture, item: MediaItem) -> Hashable:
    """What positions depend on: of an item without a sound the tensors that `get_rope_index` takes, equal for
    images of one size.
    """
    if item.has_sound:
        return item.mm_hash
    takes = parameters_of(architecture.base.get_rope_index) | {_SECONDS}
    return item.modality, *((name, item[name].tobytes()) for name in item if name in takes)


def media_positions(architecture: Architecture, sequence: TokenRow) -> tuple[np.ndarray, float]:
    """M-RoPE positions (3, n) of a sequence with media, and the position of the token that would follow it.

    They are int64, or float32 where Qwen3-Omni gives the frames of a video fractions. Raises `SampleError`
    for a video with its sound that does not begin with the tokens that Omni models want there.
    """
    parts: list[tuple[np.ndarray, float]] = []
    begin = 0
    for item, placeholder in sequence.media:
        if item.modality == "video" and item.has_sound:
            parts.append(_positions(architecture, sequence.part(begin, placeholder.offset - 1)))
            parts.append(_positions_with_sound(architecture, sequence, item, placeholder))
            begin = placeholder.end + 1
    if not parts:
        return _positions(architecture, sequence)
    parts.append(_positions(architecture, sequence.part(begin, len(sequence))))
    starts = np.cumsum([0, *(following for _, following in parts)])
    positions = np.concatenate([own + start for (own, _), start in zip(parts, starts[:-1], strict=True)], axis=1)
    return _whole_numbers(positions), starts[-1].item()


def _whole_numbers(positions: np.ndarray) -> np.ndarray:
    """int64 if all positions are whole numbers, else float32."""
    return positions.astype(np.int64 if (positions == np.floor(positions)).all() else np.float32)


def _positions_with_sound(
    architecture: Architecture, sequence: TokenRow, item: MediaItem, placeholder: PlaceholderRange
) -> tuple[np.ndarray, float]:
    """`media_positions` of a video with its sound alone, from the start token before its range to the end token behind.

    The two start tokens, of the video and of its sound, have one position in Qwen2.5-Omni, and so have the end tokens.
    """
    begin = placeholder.offset - 1
    config = architecture.base.config
    starts = [config.vision_start_token_id, config.audio_start_token_id]
    if begin < 0 or sequence.token_ids[begin : begin + 2].tolist() != starts:
        raise SampleError(
            sequence.name,
            f"the video with its sound at {placeholder.offset} does not begin with the tokens {starts}, by "
            f"which {architecture.model_type} finds it. Render the row with the chat template of this model",
        )
    ids = np.append(sequence.token_ids[begin : placeholder.end + 1].astype(np.int64), architecture.neutral_id)
    positions, _ = architecture.base.get_rope_index(
        torch.from_numpy(ids)[None],
        attention_mask=torch.ones((1, len(ids)), dtype=torch.int64),
        use_audio_in_video=True,
        audio_seqlens=torch.tensor([int(item["feature_attention_mask"].sum())]),
        **_grids(architecture, [item]),
    )
    own = _whole_numbers(positions[:, 0].numpy())
    return own[:, :-1], own[0, -1].item()


def _positions(architecture: Architecture, sequence: TokenRow) -> tuple[np.ndarray, float]:
    """`media_positions` of a sequence without videos that have their sound.

    `get_rope_index` of the model computes them. It reads token types and takes adjacent runs of one type for
    one image; here a text token is inserted between such runs, and its position is taken out of the result
    again. A text token is appended too: its position is the following one. Qwen's Omni models read token ids
    instead, and want a start token before each image and video: here it is inserted. The tokens of a sound
    have the positions of text.
    """
    by_ids = "mm_token_type_ids" not in parameters_of(architecture.base.get_rope_index)
    runs = [
        (start, end, item.modality)
        for item, placeholder in sequence.media
        for start, end in placeholder.runs
        if not (by_ids and item.modality == "audio")
    ]
    types = np.zeros(len(sequence), dtype=np.int64)
    for start, end, modality in runs:
        types[start:end] = TOKEN_TYPE_IDS[modality]
    if by_ids:
        inserts = [edge for start, end, _ in runs for edge in (start, end)]
    else:
        inserts = [begin for (_, end, _), (begin, _, _) in itertools.pairwise(runs) if begin == end]
    inserts.append(len(types))
    inserted_at = np.array(inserts) + np.arange(len(inserts))
    ids = np.insert(np.asarray(sequence.token_ids, dtype=np.int64), inserts, architecture.neutral_id)
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
    takes = parameters_of(architecture.base.get_rope_index)
    names = {name: name for item in items for name in item if name in takes}
    if "second_per_grids" in takes and any(_SECONDS in item for item in items):
        names["second_per_grids"] = _SECONDS
    return {
        name: torch.from_numpy(np.stack([item[tensor] for item in items if tensor in item]))
        for name, tensor in names.items()
    }


def mrope_positions(length: int, placed: Sequence[PlacedItem], merge_size: int) -> tuple[np.ndarray, int]:
    """Positions int64 (3, length) of a row, and the position of the token that would follow it.

    A text token advances all three by one. An image of grid (t, h, w) starts at the next position: its tokens
    count time, rows and columns from there, and the text after it continues after the longer side. The frames
    of a video are images between their time stamps. Source: `get_rope_index` of transformers' Qwen3-VL; with
    ranges, adjacent images and literal placeholder tokens need no special case.
    """
    positions = np.empty((3, length), dtype=np.int64)
    written, position = 0, 0
    for item, placeholder in placed:
        time, height, width = (int(side) for side in item[f"{item.modality}_grid_thw"])
        height, width = height // merge_size, width // merge_size
        frames = time // len(placeholder.runs)
        for begin, end in placeholder.runs:
            gap = begin - written
            positions[:, written:begin] = np.arange(position, position + gap)
            position += gap
            positions[:, begin:end] = np.indices((frames, height, width)).reshape(3, -1) + position
            position += max(height, width)
            written = end
    rest = length - written
    positions[:, written:] = np.arange(position, position + rest)
    return positions, position + rest
