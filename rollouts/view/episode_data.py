"""One episode as the page receives it: a line of the list, and a payload with everything else.

A payload is compressed with gzip. Inside are the length of the header (uint32, little-endian), the header (JSON in
UTF-8), and the arrays that the header lists under `columns`, each at a multiple of 4 bytes after the header.
"""

from __future__ import annotations

import gzip
import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from renderers import TemplateRenderer
from renderers.tokens.decoding import TokenDecoder
from renderers.tokens.tokenizer import TemplateTokenizer
from rollouts.trajectory.media_reference import MediaReference
from rollouts.trajectory.token_node import TEACHER_TOP_IDS, TEACHER_TOP_LOGPROBS, TOP_IDS, TOP_LOGPROBS, TokenNode
from rollouts.trajectory.tree import Trajectory
from rollouts.trajectory.turn import Turn
from rollouts.values import finite_number
from rollouts.view.display_json import display_json
from rollouts.view.drift import ModelView, model_view

if TYPE_CHECKING:
    from rollouts.training.mismatch.compared import ComparedTokens


# Names and digests that a reader does not see as text; the page leaves out the same (frontend/src/message_texts.ts).
_NO_TEXT: Final = frozenset({"role", "type", "$source"})


def has_texts(trajectory: Trajectory, wanted: Sequence[str]) -> bool:
    """Whether each of `wanted` is a part of a text of the messages. Upper and lower case are equal."""
    messages = [message for node in trajectory.nodes for message in node.messages]
    text = "\n".join(_texts(display_json([*messages, *(turn.message for turn in trajectory.turns)]))).lower()
    return all(each.lower() in text for each in wanted)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for member in value:
            yield from _texts(member)
    elif isinstance(value, dict):
        for name, member in value.items():
            if name not in _NO_TEXT:
                yield from _texts(member)


class TokenKind(IntEnum):
    """What an id is to the tokenizer."""

    TEXT = 0
    ADDED = 1  # a control token, or another token that was added to the vocabulary
    UNKNOWN = 2  # no token has this id


class TokenTexts(NamedTuple):
    """For each of u ids: `kinds` uint8 (u,); its bytes, `data[ends[i - 1] : ends[i]]`, `ends` uint32 (u,).

    The bytes of one token of a byte-level tokenizer may be an incomplete character.
    """

    kinds: np.ndarray
    ends: np.ndarray
    data: bytes


def token_texts(tokenizer: TemplateTokenizer, ids: Iterable[int]) -> TokenTexts:
    """The texts of `ids`, in order."""
    decoder = TokenDecoder(tokenizer)
    kinds: list[int] = []
    pieces: list[bytes] = []
    for token_id in map(int, ids):
        kind, piece = _text(tokenizer, decoder, token_id)
        kinds.append(kind)
        pieces.append(piece)
    ends = np.cumsum([len(piece) for piece in pieces], dtype=np.uint32)
    return TokenTexts(np.array(kinds, np.uint8), ends, b"".join(pieces))


def _text(tokenizer: TemplateTokenizer, decoder: TokenDecoder, token_id: int) -> tuple[TokenKind, bytes]:
    added = tokenizer.added_token(token_id)
    if added is not None:
        return TokenKind.ADDED, added.encode()
    if not 0 <= token_id < tokenizer.vocab_size:
        return TokenKind.UNKNOWN, b""
    (piece,) = decoder.pieces([token_id])
    if isinstance(piece, bytes):
        return TokenKind.TEXT, piece
    if isinstance(piece, int):  # a decoder that needs whole runs, of which the first token may lack its space
        return TokenKind.TEXT, decoder.bytes_of([token_id, token_id])[1]
    return TokenKind.TEXT, piece.encode(errors="replace")


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
    names = sorted({name for node in nodes for name, rows in node.extras.items() if _is_column(rows)})
    extras = {name: _extra(nodes, name) for name in names}
    if trainer_logprobs:
        extras[TRAINER_LOGPROBS] = _joined(
            [trainer_logprobs.get(index, _unknown(node)) for index, node in enumerate(nodes)]
        )
    return TokenColumns(unique, np.searchsorted(unique, ids).astype(np.uint32), flags, logprobs, extras, likeliest)


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


def _extra(nodes: Sequence[TokenNode], name: str) -> np.ndarray:
    return _joined([node.extras[name] if name in node.extras else _unknown(node) for node in nodes])


def _unknown(node: TokenNode) -> np.ndarray:
    return np.full(len(node), np.nan, np.float32)


def _joined(columns: Sequence[np.ndarray]) -> np.ndarray:
    with np.errstate(over="ignore"):
        return np.concatenate([column.astype(np.float32) for column in columns])


@dataclass(frozen=True, slots=True, eq=False)
class TrainerTokens:
    """The n tokens of a comparison, as far as a page needs them; `ComparedTokens` has these columns, too.

    `names` are those of samples; `sample` int32 (n,) is an index into them, `position` int32 (n,) a position in the
    sample, `trainer` float32 (n,) the trainer's log-probability.
    """

    names: tuple[str, ...]
    sample: np.ndarray
    position: np.ndarray
    trainer: np.ndarray


class TrainerLogprobs:
    """The tokens of a comparison, found by the names that `samples_from_trajectory` gives to samples: EPISODE/LEAF."""

    def __init__(self, compared: ComparedTokens | TrainerTokens) -> None:
        self._compared = compared
        self._sample_of = {name: index for index, name in enumerate(compared.names)}
        #: The names that no episode has asked for.
        self.unused = set(compared.names)

    def of(self, trajectory: Trajectory) -> Mapping[int, np.ndarray]:
        """float32 (tokens of the node,) by node, NaN where the trainer's log-probability is not known."""
        by_node: dict[int, np.ndarray] = {}
        for leaf in trajectory.leaves():
            sample = self._sample_of.get(f"{trajectory.episode_id}/{leaf}")
            if sample is None:
                continue
            self.unused.discard(self._compared.names[sample])
            chosen = self._compared.sample == sample
            self._add(by_node, trajectory, leaf, self._compared.position[chosen], self._compared.trainer[chosen])
        return by_node

    def _add(
        self,
        by_node: dict[int, np.ndarray],
        trajectory: Trajectory,
        leaf: int,
        positions: np.ndarray,
        logprobs: np.ndarray,
    ) -> None:
        start = 0
        for index in trajectory.path(leaf):
            length = len(trajectory.nodes[index])
            inside = (positions >= start) & (positions < start + length)
            if inside.any():
                column = by_node.setdefault(index, np.full(length, np.nan, np.float32))
                column[positions[inside] - start] = logprobs[inside]
            start += length


_ALIGNMENT: Final = 4
_COMPRESSION_LEVEL: Final = 4


def summary(
    trajectory: Trajectory, number: int, trainer_logprobs: Mapping[int, np.ndarray] | None = None
) -> dict[str, Any]:
    """The line of the list. `tokens` counts each node once; `mismatch` is the largest one, None if none is known.

    `reward`, the environment reward, is None if the sum over the turns is not finite. `cut` counts `length_stops`.
    """
    nodes = trajectory.nodes
    given = trainer_logprobs or {}
    differences = np.concatenate([np.empty(0), *(mismatch(node, given.get(i)) for i, node in enumerate(nodes))])
    versions = dict.fromkeys(span.version for node in nodes for span in node.weight_spans)
    return {
        "number": number,
        "id": trajectory.episode_id,
        "group": trajectory.group_id,
        "reward": finite_number(trajectory.reward),
        "turns": len(trajectory.turns),
        "cut": trajectory.length_stops,
        "branches": len(trajectory.leaves()),
        "tokens": sum(map(len, nodes)),
        "sampled": sum(len(node.logprobs) for node in nodes),
        "media": sum(len(node.media) for node in nodes),
        "mismatch": float(differences.max()) if differences.size else None,
        "versions": list(versions),
        "status": status(trajectory),
        "error": trajectory.error,
        "seconds": trajectory.seconds,
        "agents": sorted({turn.agent for turn in trajectory.turns if turn.agent}),
    }


def status(trajectory: Trajectory) -> str:
    """How the episode ended: "error", "truncated" or "done"; "open" if it has not ended."""
    if trajectory.error:
        return "error"
    if trajectory.truncated:
        return "truncated"
    return "done" if trajectory.done else "open"


def episode_payload(
    trajectory: Trajectory,
    number: int,
    *,
    renderer: TemplateRenderer | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    trainer_logprobs: Mapping[int, np.ndarray] | None = None,
) -> bytes:
    """The compressed payload. With a `renderer` it has token texts, owners, parsed tool calls, grids and drift."""
    view = None if renderer is None else model_view(trajectory, renderer, tools)
    rendered_ids = (
        [] if view is None else [i for each in view.drift for one in each.differences for i in one.rendered_ids]
    )
    columns = token_columns(trajectory.nodes, rendered_ids, trainer_logprobs)
    arrays = {
        "uniqueIds": columns.unique_ids,
        "index": columns.places,
        "flags": columns.flags,
        "logprobs": columns.logprobs,
        **{f"extra:{name}": rows for name, rows in columns.extras.items()},
    }
    for of, likeliest in columns.likeliest.items():
        arrays[f"likeliest:{of}"] = np.searchsorted(columns.unique_ids, likeliest.ids).astype(np.uint32)
        arrays[f"likeliestLogprobs:{of}"] = likeliest.logprobs
    if renderer is not None and view is not None:
        texts = token_texts(renderer.tokenizer, columns.unique_ids)
        arrays |= {
            "textKinds": texts.kinds,
            "textEnds": texts.ends,
            "textBytes": np.frombuffer(texts.data, np.uint8),
            "owners": _owners(trajectory.nodes, view.owners),
        }
    header = _header(trajectory, number, view)
    if columns.likeliest:
        header["likeliest"] = {of: likeliest.widths for of, likeliest in columns.likeliest.items()}
    return _packed(header, arrays)


def _owners(nodes: Sequence[TokenNode], owners: Mapping[int, np.ndarray]) -> np.ndarray:
    """int32 (n,): the index of the owning message, -1 for scaffold of no message, -2 where it is not known."""
    unknown = (owners.get(index, np.full(len(node), -2, np.int32)) for index, node in enumerate(nodes))
    return np.concatenate([np.empty(0, np.int32), *unknown])


def _header(trajectory: Trajectory, number: int, view: ModelView | None) -> dict[str, Any]:
    provenance = trajectory.provenance
    return {
        "number": number,
        "id": trajectory.episode_id,
        "group": trajectory.group_id,
        "seed": str(trajectory.seed),
        "reward": finite_number(trajectory.reward),
        "done": trajectory.done,
        "truncated": trajectory.truncated,
        "truncationReason": trajectory.truncation_reason,
        "error": trajectory.error,
        "startedAt": trajectory.started_at,
        "seconds": trajectory.seconds,
        "forks": trajectory.forks,
        "metrics": display_json(trajectory.metrics),
        "provenance": None
        if provenance is None
        else {
            "model": provenance.model,
            "engine": provenance.engine,
            "template": provenance.template,
            "processors": display_json(provenance.processors),
            "packages": display_json(provenance.packages),
        },
        "nodes": [_node(node, view) for node in trajectory.nodes],
        "turns": [_turn(turn, index, view) for index, turn in enumerate(trajectory.turns)],
        "drift": None if view is None else [each.as_json() for each in view.drift],
    }


def _node(node: TokenNode, view: ModelView | None) -> dict[str, Any]:
    return {
        "parent": node.parent,
        "tokens": len(node),
        "messages": [display_json(message) for message in node.messages],
        "media": [_media(reference, view) for reference in node.media],
        "spans": [[span.version, span.start, span.end] for span in node.weight_spans],
        "extras": [f"{name}: {rows.dtype} {rows.shape}" for name, rows in node.extras.items()],
    }


def _media(reference: MediaReference, view: ModelView | None) -> dict[str, Any]:
    return {
        "modality": reference.modality,
        "hash": reference.mm_hash,
        "digest": reference.source.digest,
        "offset": reference.placeholder.offset,
        "length": reference.placeholder.length,
        "features": reference.placeholder.num_embeds,
        "processed": None if view is None else view.processed.get(reference.mm_hash),
    }


def _turn(turn: Turn, index: int, view: ModelView | None) -> dict[str, Any]:
    return {
        "node": turn.node,
        "finish": str(turn.finish_reason),
        "message": display_json(turn.message),
        "reward": turn.reward,
        "info": display_json(turn.info),
        "seconds": turn.seconds,
        "agent": turn.agent,
        "calls": None if view is None else view.calls.get(index, []),
    }


def _packed(header: dict[str, Any], arrays: Mapping[str, np.ndarray]) -> bytes:
    columns: dict[str, dict[str, Any]] = {}
    parts: list[bytes] = []
    offset = 0
    for name, array in arrays.items():
        data = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()
        padding = -len(data) % _ALIGNMENT
        columns[name] = {"type": array.dtype.name, "offset": offset, "length": len(array)}
        parts += [data, bytes(padding)]
        offset += len(data) + padding
    text = encoded_json({**header, "columns": columns})
    text += b" " * (-(len(text) + 4) % _ALIGNMENT)
    return gzip.compress(b"".join([struct.pack("<I", len(text)), text, *parts]), _COMPRESSION_LEVEL, mtime=0)


def encoded_json(value: Any) -> bytes:
    """JSON in ASCII, which also holds half a surrogate pair of a text."""
    return json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode("ascii")
