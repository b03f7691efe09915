"""Checks that a turn can be stored when it is added: an episode must not fail to be written at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from renderers import Message
from renderers.media.item import MediaSource
from rollouts.errors import InvalidTurnError
from rollouts.trajectory.token_node import MediaReference, TokenNode, Turn
from transport import EncodeError, TransportError, decode, encode
from transport.wire.arrays import RawTensor, is_tensor
from transport.wire.codec import check_encodable, is_plain
from transport.wire.registry import registration_of_class

_IMMUTABLE: Final = frozenset({str, int, float, bool, bytes, type(None)})


def plain_copy(value: Any) -> Any:
    """Dicts, lists, tuples, sets, numpy arrays, tensors, buffers and wire types, nested in each other, are copied.

    Anything else is shared. Raises `RecursionError` for a value that contains itself.
    """
    kind = type(value)
    if kind in _IMMUTABLE:
        return value
    if kind is dict:
        return {key: plain_copy(part) for key, part in value.items()}
    if kind is list:
        return [plain_copy(part) for part in value]
    if kind is tuple:
        return tuple(plain_copy(part) for part in value)
    if kind is np.ndarray:
        return value.copy()
    if kind is set or kind is bytearray:
        return kind(value)
    if kind is memoryview:
        return value.tobytes()
    if is_tensor(value) and not isinstance(value, RawTensor):  # a RawTensor is immutable
        return value.detach().clone()
    return value if registration_of_class(kind) is None else _decoded_copy(value)


def _decoded_copy(value: Any) -> Any:
    """A copy of a wire type; the value itself where it cannot be encoded, which is found when it is stored."""
    try:
        return decode(encode(value))
    except TransportError:
        return value


def copied_mapping(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """A mapping as a new dict with copied values."""
    return {key: part if type(part) in _IMMUTABLE else plain_copy(part) for key, part in mapping.items()}


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
