"""What must hold in every episode, whoever wrote it: a file's checksums say nothing about that."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from types import NoneType
from typing import Any

import numpy as np

from renderers import MediaSource, PlaceholderRange
from renderers.placement import placement_error
from rollouts.cli.trajectory_file.value_limits import limit_violation, short_repr
from rollouts.engines.protocol import FinishReason, WeightSpan
from rollouts.trajectory.provenance import Provenance
from rollouts.trajectory.token_node import MediaReference, TokenNode
from rollouts.trajectory.tree import Trajectory, Turn


def violations(trajectory: Trajectory) -> Iterator[str]:
    """What is wrong with an episode, part by part.

    Types are not taken for granted: decoding checks the names of fields and not what is in them.
    """
    wrong = [name for name, kind in _FIELDS.items() if not isinstance(getattr(trajectory, name), kind)]
    if wrong:
        yield f"{', '.join(wrong)}: not of the type that an episode has"
        return
    wrong = [name for name in ("started_at", "seconds") if not _is_finite(getattr(trajectory, name))]
    if wrong:
        yield f"{', '.join(wrong)}: no finite number"
    if isinstance(trajectory.seed, bool) or not -(2**63) <= trajectory.seed < 2**63:
        yield f"its seed {short_repr(trajectory.seed)} is no integer of 64 bits"
    if (words := limit_violation((trajectory.metrics, trajectory.provenance))) is not None:
        yield f"metrics or provenance hold {words}"
    for index, node in enumerate(trajectory.nodes):
        if not isinstance(node, TokenNode):
            yield f"node {index} is a {type(node).__name__}"
            continue
        for words in _node_violations(index, node):
            yield f"node {index}: {words}"
    for number, turn in enumerate(trajectory.turns):
        for words in _turn_violations(turn, trajectory.nodes):
            yield f"turn {number}: {words}"


_NUMBER, _LIST = (int, float), (list, tuple)
_LARGEST = sys.float_info.max
_FIELDS: dict[str, Any] = {
    **dict.fromkeys(("episode_id", "group_id", "error"), str),
    **dict.fromkeys(("done", "truncated"), bool),
    **dict.fromkeys(("nodes", "turns"), _LIST),
    "seed": int,
    "metrics": Mapping,
    "provenance": (Provenance, NoneType),
}


def _is_finite(value: object) -> bool:
    """Of an int, too, that no float can hold."""
    return isinstance(value, _NUMBER) and not isinstance(value, bool) and abs(value) <= _LARGEST


def _node_violations(index: int, node: TokenNode) -> Iterator[str]:
    if type(node.parent) is not int or not -1 <= node.parent < index:
        yield f"its parent {short_repr(node.parent)} is not before it"
    arrays = {"token_ids": "iu", "sampled": "b", "logprobs": "f"}
    wrong = [name for name, kinds in arrays.items() if not _is_vector(getattr(node, name), kinds)]
    if wrong:
        yield f"{', '.join(wrong)}: not a vector of its type"
        return
    count, sampled = len(node.token_ids), int(node.sampled.sum()) if len(node.sampled) else 0
    if len(node.sampled) != count:
        yield f"{len(node.sampled)} sampled flags for {count} tokens"
    if len(node.logprobs) != sampled:
        yield f"{len(node.logprobs)} log-probabilities for {sampled} sampled tokens"
    if not np.all(np.isfinite(node.logprobs)):
        yield "a log-probability is not finite"
    if count and not 0 <= int(node.token_ids.min()) <= int(node.token_ids.max()) < 2**31:
        yield "a token id is negative or beyond int32"
    if node.content is not None and (not _is_vector(node.content, "b") or len(node.content) != count):
        yield f"content is not a mask of its {count} tokens"
    if not isinstance(node.messages, _LIST) or not all(isinstance(message, dict) for message in node.messages):
        yield "messages are not messages"
    elif (words := limit_violation(node.messages)) is not None:
        yield f"messages hold {words}"
    yield from _extra_violations(node.extras, count)
    yield from _span_violations(node.weight_spans, sampled)
    yield from _media_violations(node.media, count)


def _is_vector(array: Any, kinds: str) -> bool:
    return isinstance(array, np.ndarray) and array.ndim == 1 and array.dtype.kind in kinds


def _extra_violations(extras: object, count: int) -> Iterator[str]:
    if not isinstance(extras, Mapping):
        yield "extras are not arrays by name"
        return
    for name, array in extras.items():
        if not isinstance(array, np.ndarray) or array.ndim == 0 or len(array) != count:
            yield f"extra {short_repr(name)} is not an array of {count} rows"
        elif type(name) is not str:
            yield f"extra {short_repr(name)} has no text for a name"
        elif (words := limit_violation(array)) is not None:
            yield f"extra {short_repr(name)} holds {words}"


def _span_violations(spans: Sequence[WeightSpan], sampled: int) -> Iterator[str]:
    if not isinstance(spans, _LIST) or not all(isinstance(span, WeightSpan) for span in spans):
        yield "weight_spans are not weight spans"
        return
    end = 0
    for span in spans:
        if type(span.start) is not int or type(span.end) is not int or not end <= span.start <= span.end <= sampled:
            yield (
                f"weight span {short_repr(span.start)}:{short_repr(span.end)} does not follow {end} within {sampled} "
                "sampled tokens"
            )
            return
        if type(span.version) is not str:
            yield f"weight span {span.start}:{span.end} has the version {short_repr(span.version)}"
        end = span.end


def _media_violations(media: Sequence[MediaReference], count: int) -> Iterator[str]:
    if not isinstance(media, _LIST) or not all(_is_reference(reference) for reference in media):
        yield "media are not references"
        return
    in_order = sorted(media, key=lambda reference: reference.placeholder.offset)
    for number, reference in enumerate(in_order):
        where = reference.placeholder
        name = f"{short_repr(reference.modality)} {number} at {short_repr(where.offset)}+{short_repr(where.length)}"
        if reference.mm_hash.partition("-")[0] != reference.source.digest:
            yield (
                f"{name} is named {short_repr(reference.mm_hash)} and its source {short_repr(reference.source.digest)}"
            )
    if (error := placement_error((reference.placeholder for reference in in_order), count)) is not None:
        yield f"{short_repr(in_order[error.position].modality)} {error.index} {error.reason}"


def well_formed_references(trajectory: Trajectory) -> list[MediaReference] | None:
    """The media of an episode, whatever else is wrong with it; None where a part is not of its type."""
    nodes = trajectory.nodes
    if type(trajectory.episode_id) is not str or not isinstance(nodes, _LIST):
        return None
    if not all(isinstance(node, TokenNode) and isinstance(node.media, _LIST) for node in nodes):
        return None
    references = [reference for node in nodes for reference in node.media]
    return references if all(map(_is_reference, references)) else None


def _is_reference(reference: object) -> bool:
    if not isinstance(reference, MediaReference) or not isinstance(reference.source, MediaSource):
        return False
    where = reference.placeholder
    return (
        type(reference.source.digest) is str
        and isinstance(where, PlaceholderRange)
        and type(where.offset) is int
        and type(where.length) is int
        and type(reference.mm_hash) is str
        and type(reference.modality) is str
        and isinstance(where.embed_runs, (*_LIST, NoneType))
        and all(
            isinstance(run, (tuple, list)) and len(run) == 2 and all(type(end) is int for end in run)
            for run in where.embed_runs or ()
        )
    )


def _turn_violations(turn: Any, nodes: Sequence[TokenNode]) -> Iterator[str]:
    if not isinstance(turn, Turn):
        yield f"it is a {type(turn).__name__}"
        return
    if type(turn.node) is not int or not 0 <= turn.node < len(nodes):
        yield f"its node {short_repr(turn.node)} is not there"
    if not isinstance(turn.finish_reason, FinishReason):
        yield f"its finish reason is {short_repr(turn.finish_reason)}"
    if not _is_finite(turn.reward):
        yield f"its reward is {short_repr(turn.reward)}"
    if not isinstance(turn.message, dict) or not isinstance(turn.info, dict):
        yield "its message or info is not a dict"
    elif (words := limit_violation((turn.message, turn.info))) is not None:
        yield f"its message or info holds {words}"
    if not _is_finite(turn.seconds):
        yield f"its seconds are {short_repr(turn.seconds)}"
