"""Positions of the tokens of rows, as the model's own code counts them, with images placed by range."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from renderers.rendered import TOKEN_TYPE_IDS
from rollouts.models.architecture import Architecture
from rollouts.models.placed_rows import PlacedRows, TokenSequence


def row_positions(architecture: Architecture, rows: PlacedRows) -> tuple[np.ndarray, np.ndarray]:
    """Position ids of rows, and int64 (N,) the position of the token that would follow each sequence.

    The position ids are int64 (B, T) counted from each sequence's first token, 0 on padding. For a model with M-RoPE
    they are (3, B, T), time, row and column; for packed rows (4, B, T) with the text positions first, from which
    transformers derives where a sequence begins.
    """
    lengths = np.array([len(sequence.ids) for sequence in rows.sequences], dtype=np.int64)
    if not architecture.mrope:
        return rows.position_ids, lengths
    positions = np.repeat(rows.position_ids[None], 3, axis=0)
    following = lengths
    for index, (sequence, (row, column)) in enumerate(zip(rows.sequences, rows.starts, strict=True)):
        if sequence.media:
            own, following[index] = media_positions(architecture, sequence)
            positions[:, row, column : column + len(sequence.ids)] = own
    return (np.concatenate([rows.position_ids[None], positions]) if rows.packed else positions), following


def media_positions(architecture: Architecture, sequence: TokenSequence) -> tuple[np.ndarray, int]:
    """M-RoPE positions int64 (3, n) of a sequence with media, and the position of the token that would follow it.

    `get_rope_index` of the model computes them. It reads token types and takes adjacent runs of one type for one image;
    here a text token is inserted between such runs, and its position is taken out of the result again. A text token is
    appended too: its position is the following one.
    """
    runs = [
        (start, end, TOKEN_TYPE_IDS[item.modality])
        for item, placeholder in sequence.media
        for start, end in placeholder.runs
    ]
    types = np.zeros(len(sequence.ids), dtype=np.int64)
    for start, end, kind in runs:
        types[start:end] = kind
    inserts = [begin for (_, end, _), (begin, _, _) in itertools.pairwise(runs) if begin == end]
    inserts.append(len(types))
    ids = np.insert(np.asarray(sequence.ids, dtype=np.int64), inserts, architecture.neutral_id)
    types = np.insert(types, inserts, 0)
    inserted = np.zeros(len(ids), dtype=bool)
    inserted[np.array(inserts) + np.arange(len(inserts))] = True
    # Device: the CPU, because the result is read there.
    positions, _ = architecture.base.get_rope_index(
        torch.from_numpy(ids)[None], mm_token_type_ids=torch.from_numpy(types)[None], **_grids(architecture, sequence)
    )
    own = positions[:, 0].numpy() - (np.cumsum(inserted) - inserted)
    return own[:, ~inserted], int(own[0, -1])


def _grids(architecture: Architecture, sequence: TokenSequence) -> Mapping[str, Any]:
    """The tensors of the media that `get_rope_index` takes: grids, and for some models seconds per frame."""
    takes = inspect.signature(architecture.base.get_rope_index).parameters
    items = [item for item, _ in sequence.media]
    names = dict.fromkeys(name for item in items for name in item if name in takes)
    return {name: torch.from_numpy(np.stack([item[name] for item in items if name in item])) for name in names}
