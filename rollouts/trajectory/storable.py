"""Checks that a turn can be stored when it is added: an episode must not fail to be written at its end."""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from rollouts.errors import TrajectoryError
from transport import EncodeError, TransportError, decode, encode
from transport.wire.arrays import RawTensor, is_tensor
from transport.wire.codec import check_encodable
from transport.wire.registry import registration_of_class

_IMMUTABLE: Final = frozenset({str, int, float, bool, bytes, type(None)})


def plain_copy(value: Any) -> Any:
    """Dicts, lists, tuples, sets, arrays, tensors, buffers and wire types, nested in each other, are copied.

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
    """A copy of a message or an info, called `name` in errors. Raises `TrajectoryError`."""
    if type(mapping) is not dict and not isinstance(mapping, Mapping):
        raise TrajectoryError(f"{name} is a {type(mapping).__name__}, not a dict")
    try:
        return copied_mapping(mapping)
    except RecursionError as error:
        raise TrajectoryError(f"{name} contains itself, or is nested too deep to be stored") from error


def check_stored(value: object, name: str) -> None:
    """Check any value. Raises `TrajectoryError` with the place of what cannot be stored."""
    try:
        check_encodable(value, name)
    except EncodeError as error:
        raise TrajectoryError(f"cannot be stored: {error}") from error
