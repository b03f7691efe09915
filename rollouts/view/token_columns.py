"""The tokens of an episode as arrays, with their log-probabilities and extras."""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from rollouts.trajectory.token_node import (
    TEACHER_TOP_IDS,
    TEACHER_TOP_LOGPROBS,
    TOP_IDS,
    TOP_LOGPROBS,
    TokenNode,
)

#: Extras with these names have a meaning of their own on the page. Other extras with one number per token are further
#: columns by their names.
ENTROPY: Final = "entropy"
TRAINER_LOGPROBS: Final = "trainer_logprobs"

#: The extras with the likeliest tokens in the place of each, by whose they are on the page.
LIKELIEST: Final = {"sampler": (TOP_IDS, TOP_LOGPROBS), "teacher": (TEACHER_TOP_IDS, TEACHER_TOP_LOGPROBS)}
_MAX_LIKELIEST: Final = 20
_NO_ROWS: Final = (np.empty((0, 0), np.int32), np.empty((0, 0), np.float32))

_SAMPLED, _CONTENT, _CONTENT_KNOWN = 1, 2, 4


class Likeliest(NamedTuple):
    """The k likeliest tokens in the place of each, at most 20, with a k of its own for each node.

    `widths`: k of each node, 0 where none are known. `ids` int32 and `logprobs` float32 (sum of n k over the nodes,).
    """

    widths: list[int]
    ids: np.ndarray
    logprobs: np.ndarray


class TokenColumns(NamedTuple):
    """`unique_ids` int32 (u,), ascending, and for each of the n tokens of all nodes, in order: `places` uint32 (n,) in
    `unique_ids`; `flags` uint8 (n,), bit 0 sampled, bit 1 content, bit 2 content is known; `logprobs` float32 (sampled
    tokens,); `extras` float32 (n,) by name, NaN on nodes that lack the extra. `likeliest` by whose they are.
    """

    unique_ids: np.ndarray
    places: np.ndarray
    flags: np.ndarray
    logprobs: np.ndarray
    extras: dict[str, np.ndarray]
    likeliest: dict[str, Likeliest]


def token_columns(
    nodes: Sequence[TokenNode],
    more_ids: Sequence[int] = (),
    trainer_logprobs: Mapping[int, np.ndarray] | None = None,
) -> TokenColumns:
    """`more_ids` are put into the table of ids, too. `trainer_logprobs` maps a node to float32 (its tokens,)."""
    ids = np.concatenate([*(node.token_ids for node in nodes), np.empty(0, np.int32)]).astype(np.int32)
    likeliest = {of: found for of, names in LIKELIEST.items() if (found := _likeliest(nodes, *names)) is not None}
    of_likeliest = (each.ids for each in likeliest.values())
    unique = np.unique(np.concatenate([ids, np.asarray(more_ids, np.int32), *of_likeliest]))
    flags = np.concatenate([*map(_flags, nodes), np.empty(0, np.uint8)])
    logprobs = np.concatenate([*(node.logprobs for node in nodes), np.empty(0, np.float32)]).astype(np.float32)
    names = sorted({name for node in nodes for name, rows in node.extras.items() if is_column(rows)})
    extras = {name: _joined([node.extras.get(name, _unknown(node)) for node in nodes]) for name in names}
    if trainer_logprobs:
        extras[TRAINER_LOGPROBS] = _joined(
            [trainer_logprobs.get(index, _unknown(node)) for index, node in enumerate(nodes)]
        )
    return TokenColumns(unique, np.searchsorted(unique, ids).astype(np.uint32), flags, logprobs, extras, likeliest)


def mismatch(node: TokenNode, trainer_logprobs: np.ndarray | None = None) -> np.ndarray:
    """|trainer - sampler| of the sampled tokens of a node whose trainer's log-probabilities are known, float64."""
    trainer = node.extras.get(TRAINER_LOGPROBS) if trainer_logprobs is None else trainer_logprobs
    if trainer is None or not is_column(trainer):
        return np.empty(0)
    difference: np.ndarray = np.abs(trainer[node.sampled].astype(np.float64) - node.logprobs)
    finite: np.ndarray = difference[np.isfinite(difference)]
    return finite


def _flags(node: TokenNode) -> np.ndarray:
    flags: np.ndarray = node.sampled.astype(np.uint8) * np.uint8(_SAMPLED)
    if node.content is not None:
        flags += node.content.astype(np.uint8) * np.uint8(_CONTENT) + np.uint8(_CONTENT_KNOWN)
    return flags


def is_column(rows: np.ndarray) -> bool:
    """Whether an extra has one number for each token."""
    return rows.ndim == 1 and rows.dtype.kind in "biuf"


def _likeliest(nodes: Sequence[TokenNode], ids_name: str, logprobs_name: str) -> Likeliest | None:
    """None where no node has them."""
    rows = [likeliest_rows(node.extras.get(ids_name), node.extras.get(logprobs_name)) for node in nodes]
    widths = [ids.shape[1] for ids, _ in rows]
    if not any(widths):
        return None
    ids = np.concatenate([ids.ravel() for ids, _ in rows])
    return Likeliest(widths, ids, _joined([logprobs.ravel() for _, logprobs in rows]))


def likeliest_rows(ids: np.ndarray | None, logprobs: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """The first 20 columns; none where the arrays are something else, as extras of any name may be."""
    if ids is None or logprobs is None or ids.dtype != np.int32 or logprobs.dtype.kind != "f":
        return _NO_ROWS
    if ids.ndim != 2 or ids.shape != logprobs.shape:
        return _NO_ROWS
    return ids[:, :_MAX_LIKELIEST], logprobs[:, :_MAX_LIKELIEST]


def _unknown(node: TokenNode) -> np.ndarray:
    return np.full(len(node), np.nan, np.float32)


def _joined(columns: Sequence[np.ndarray]) -> np.ndarray:
    with np.errstate(over="ignore"):
        return np.concatenate([column.astype(np.float32) for column in columns])
