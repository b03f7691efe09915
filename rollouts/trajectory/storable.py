"""Checks that a turn can be stored, made when it is added: an episode must not fail to be written at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from renderers import Message
from renderers.media.source import MediaSource
from rollouts.errors import InvalidTurnError
from rollouts.trajectory.plain_copy import copied_mapping
from rollouts.trajectory.token_node import MediaReference, TokenNode
from rollouts.trajectory.turn import Turn
from transport import EncodeError
from transport.wire.codec import check_encodable, is_plain


def stored_copy(mapping: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A copy of a message or an info, called `name` in errors. Raises `InvalidTurnError`."""
    if type(mapping) is not dict and not isinstance(mapping, Mapping):
        raise InvalidTurnError(f"{name} is a {type(mapping).__name__}, not a dict")
    try:
        return copied_mapping(mapping)
    except RecursionError as error:
        raise InvalidTurnError(f"{name} contains itself, or is nested too deep to be stored") from error


def check_turn_stored(nodes: Sequence[TokenNode], turn: Turn, name: str) -> None:
    """Check a turn and the nodes that it adds. Raises `InvalidTurnError` with the place of what cannot be stored."""
    is_plain_turn = (
        is_plain(turn.message)
        and (type(turn.seconds) is float or is_plain(turn.seconds))
        and (not turn.agent or is_plain(turn.agent))
    )
    if not is_plain_turn or not all(map(_is_node_storable, nodes)):
        check_stored({"nodes": nodes, "turn": turn}, name)


def _is_node_storable(node: TokenNode) -> bool:
    """Whether a node can certainly be stored. Its arrays always can, and so can usual references."""
    if node.extras:
        return False
    for span in node.weight_spans:
        if type(span.start) is not int or type(span.end) is not int or not is_plain(span.version):
            return False
    if node.media:
        return all(map(_is_storable, node.media)) and is_plain(_without_sources(node.messages))
    return all(map(is_plain, node.messages))


def _is_storable(reference: MediaReference) -> bool:
    """Whether a reference, whose node has checked it, can be stored. Others may be storable, too."""
    source = reference.source
    return type(source) is MediaSource and source.digest.isascii() and reference.mm_hash.isascii()


def _without_sources(messages: Sequence[Message]) -> list[Any]:
    """The stored messages with None in place of the parts that hold a source."""
    return [
        {**message, "content": [None if _holds_source(part) else part for part in content]}
        if isinstance(content := message.get("content"), list)
        else message
        for message in messages
    ]


def _holds_source(part: Any) -> bool:
    """Whether a part is one that `new_nodes` has made: its type, and a source."""
    return type(part) is dict and len(part) == 2 and type(part.get(part.get("type"))) is MediaSource


def check_stored(value: object, name: str) -> None:
    """Check any value. Raises `InvalidTurnError` with the place of what cannot be stored."""
    try:
        check_encodable(value, name)
    except EncodeError as error:
        raise InvalidTurnError(f"cannot be stored: {error}") from error
