"""The per-token arrays of an episode, in the form in which the page receives them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from rollouts.trajectory.token_node import TokenNode

#: Extras with these names have a meaning of their own on the page. Other extras with one number per token are further
#: columns by their names.
ENTROPY: Final = "entropy"
TRAINER_LOGPROBS: Final = "trainer_logprobs"

_SAMPLED, _CONTENT, _CONTENT_KNOWN = 1, 2, 4


class TokenColumns(NamedTuple):
    """`unique_ids` int32 (u,), ascending, and for each of the n tokens of all nodes, in order: `places` uint32 (n,) in
    `unique_ids`; `flags` uint8 (n,), bit 0 sampled, bit 1 content, bit 2 content is known; `logprobs` float32 (sampled
    tokens,); `extras` float32 (n,) by name, NaN on nodes that lack the extra.
    """

    unique_ids: np.ndarray
    places: np.ndarray
    flags: np.ndarray
    logprobs: np.ndarray
    extras: dict[str, np.ndarray]


def token_columns(
    nodes: Sequence[TokenNode],
    more_ids: Sequence[int] = (),
    trainer_logprobs: Mapping[int, np.ndarray] | None = None,
) -> TokenColumns:
    """`more_ids` are put into the table of ids, too. `trainer_logprobs` maps a node to float32 (its tokens,)."""
    ids = np.concatenate([*(node.token_ids for node in nodes), np.empty(0, np.int32)]).astype(np.int32)
    unique = np.unique(np.concatenate([ids, np.asarray(more_ids, np.int32)]))
    flags = np.concatenate([*map(_flags, nodes), np.empty(0, np.uint8)])
    logprobs = np.concatenate([*(node.logprobs for node in nodes), np.empty(0, np.float32)]).astype(np.float32)
    names = sorted({name for node in nodes for name, rows in node.extras.items() if _is_column(rows)})
    extras = {name: _extra(nodes, name) for name in names}
    if trainer_logprobs:
        extras[TRAINER_LOGPROBS] = _joined(
            [trainer_logprobs.get(index, _unknown(node)) for index, node in enumerate(nodes)]
        )
    return TokenColumns(unique, np.searchsorted(unique, ids).astype(np.uint32), flags, logprobs, extras)


def mismatch(node: TokenNode, trainer_logprobs: np.ndarray | None = None) -> np.ndarray:
    """|trainer - sampler| of the sampled tokens of a node whose trainer's log-probabilities are known, float64."""
    trainer = node.extras.get(TRAINER_LOGPROBS) if trainer_logprobs is None else trainer_logprobs
    if trainer is None or not _is_column(trainer):
        return np.empty(0)
    difference: np.ndarray = np.abs(trainer[node.sampled].astype(np.float64) - node.logprobs)
    finite: np.ndarray = difference[np.isfinite(difference)]
    return finite


def _flags(node: TokenNode) -> np.ndarray:
    flags: np.ndarray = node.sampled.astype(np.uint8) * np.uint8(_SAMPLED)
    if node.content is not None:
        flags += node.content.astype(np.uint8) * np.uint8(_CONTENT) + np.uint8(_CONTENT_KNOWN)
    return flags


def _is_column(rows: np.ndarray) -> bool:
    return rows.ndim == 1 and rows.dtype.kind in "biuf"


def _extra(nodes: Sequence[TokenNode], name: str) -> np.ndarray:
    return _joined([node.extras[name] if name in node.extras else _unknown(node) for node in nodes])


def _unknown(node: TokenNode) -> np.ndarray:
    return np.full(len(node), np.nan, np.float32)


def _joined(columns: Sequence[np.ndarray]) -> np.ndarray:
    with np.errstate(over="ignore"):
        return np.concatenate([column.astype(np.float32) for column in columns])
