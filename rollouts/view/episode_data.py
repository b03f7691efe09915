"""One episode as the page receives it: a line of the list, and a payload with everything else.

A payload is compressed with gzip. Inside are the length of the header (uint32, little-endian), the header
(JSON in UTF-8), and the arrays that the header lists under `columns`, each at a multiple of 4 bytes after
the header.
"""

import gzip
import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Any, Final, NamedTuple

import numpy as np

from renderers import TemplateRenderer
from renderers.tokens.decoding import TokenDecoder
from renderers.tokens.tokenizer import TemplateTokenizer
from rollouts.trajectory.media_reference import MediaReference
from rollouts.trajectory.token_node import TokenNode
from rollouts.trajectory.tree import Trajectory
from rollouts.trajectory.turn import Turn
from rollouts.values import finite_number
from rollouts.view.display_json import display_json
from rollouts.view.drift import ModelView, model_view
from rollouts.view.token_columns import mismatch, token_columns

_ALIGNMENT: Final = 4


def summary(
    trajectory: Trajectory, number: int, trainer_logprobs: Mapping[int, np.ndarray] | None = None
) -> dict[str, Any]:
    """The line of the list. `tokens` counts each node once; `mismatch` is the largest one, None if none is known.

    `reward`, the environment reward, is None if the sum over the turns is not finite. `cut` counts
    `length_stops`.
    """
    nodes, media = trajectory.nodes, trajectory.media_counts()
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
        "media": media["images"] + media["sounds"],
        "mismatch": float(differences.max()) if differences.size else None,
        "versions": list(versions),
        "status": trajectory.status,
        "error": trajectory.error,
        "seconds": trajectory.seconds,
        "agents": sorted({turn.agent for turn in trajectory.turns if turn.agent}),
    }


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
    return gzip.compress(b"".join([struct.pack("<I", len(text)), text, *parts]), compresslevel=4, mtime=0)


def encoded_json(value: Any) -> bytes:
    """JSON in ASCII, which also holds half a surrogate pair of a text."""
    return json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode("ascii")


class TokenKind(IntEnum):
    """What an id is to the tokenizer."""

    TEXT = 0
    ADDED = 1  # a control token, or another token that was added to the vocabulary
    UNKNOWN = 2  # no token has this id


class TokenTexts(NamedTuple):
    """Of u ids: `kinds` uint8 (u,), and bytes, `data[ends[i - 1] : ends[i]]`, `ends` uint32 (u,)."""

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
