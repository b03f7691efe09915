"""Episodes as JSON, with all values that they may hold. The `repr` of a value is never used: it omits elements."""

import base64
import dataclasses
import datetime
import enum
import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from renderers import MediaSource
from renderers.vision.patches import bfloat16_to_float32
from rollouts.errors import RolloutsError
from rollouts.trajectory.media_reference import MediaReference
from rollouts.trajectory.token_node import TokenNode
from rollouts.trajectory.tree import Trajectory
from rollouts.trajectory.turn import Turn
from transport.wire.arrays import is_tensor, tensor_parts

# Types whose `str` is complete and can be parsed.
_TEXT: Final = (datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo)
# torch's names of the element types that numpy has too.
_NUMPY_NAMES: Final = frozenset(np.dtype(code).name for code in "?bBhHiIqQefdFD")


def plain(value: Any) -> Any:
    """`value` as lists, dicts, text, numbers, booleans and None.

    A key that is not text becomes text (a dict in which two keys would become equal becomes a list of pairs).
    A float that is not finite becomes null, an array or tensor {"dtype", "shape", "data"} with its elements
    in C order in one list, bytes {"base64"} (also the elements of dtypes that numpy lacks, except bfloat16),
    a complex number {"real", "imag"}, a source {"digest"}, a dataclass a dict. Dates and times become text.
    Raises `RolloutsError` for anything else.
    """
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, (float, np.floating)):
        return short_float(value)
    if isinstance(value, np.generic) and value.dtype.kind in "mM":
        return str(value)
    if isinstance(value, np.generic):
        return plain(value.tobytes() if value.dtype.kind == "V" else value.item())
    if isinstance(value, np.ndarray):
        return _array(str(value.dtype), value)
    if is_tensor(value):
        return _tensor(value)
    if isinstance(value, complex):
        return {"real": plain(value.real), "imag": plain(value.imag)}
    if isinstance(value, Mapping):
        return _mapping(value)
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(one) for one in value]
    if isinstance(value, (bytes, bytearray, memoryview)):
        return {"base64": base64.b64encode(value).decode()}
    if isinstance(value, MediaSource):
        return {"digest": value.digest}
    if isinstance(value, _TEXT):
        return str(value)
    return _object(value)


def short_float(value: float | np.floating[Any]) -> float | None:
    """A float that reads back to the same bits in its own precision: -0.1 for float32 -0.1, not -0.10000000149."""
    return float(str(value)) if math.isfinite(value) else None


def _mapping(value: Mapping[Any, Any]) -> Any:
    named = {key if isinstance(key, str) else str(plain(key)): one for key, one in value.items()}
    if len(named) < len(value):
        return [[plain(key), plain(one)] for key, one in value.items()]
    return {key: plain(one) for key, one in named.items()}


def _array(dtype: str, array: np.ndarray) -> dict[str, Any]:
    json_elements = array.dtype.kind in "biuU"
    flat = array.reshape(-1)
    return {
        "dtype": dtype,
        "shape": list(array.shape),
        "data": flat.tolist() if json_elements else [plain(one) for one in flat],
    }


def _tensor(tensor: Any) -> dict[str, Any]:
    name, shape, data = tensor_parts(tensor)
    if name in _NUMPY_NAMES:
        return _array(name, data.view(np.dtype(name)).reshape(shape))
    if name == "bfloat16":
        return _array(name, bfloat16_to_float32(data.view(np.uint16)).reshape(shape))
    return {"dtype": name, "shape": shape, "data": plain(data.tobytes())}


def _object(value: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    raise RolloutsError(
        f"a value of type {type(value).__module__}.{type(value).__qualname__} cannot be written as JSON; record plain "
        "data, an array or a tensor"
    )


def trajectory_json(trajectory: Trajectory) -> dict[str, Any]:
    """The episode as lists, dicts, text, numbers, booleans and None, with the files of its media in base64.

    Raises `RolloutsError`.
    """
    return {
        "episode_id": trajectory.episode_id,
        "group_id": trajectory.group_id,
        "seed": trajectory.seed,
        "reward": short_float(trajectory.reward),
        "done": trajectory.done,
        "truncated": trajectory.truncated,
        "truncation_reason": trajectory.truncation_reason,
        "error": trajectory.error,
        "metrics": plain(trajectory.metrics),
        "started_at": short_float(trajectory.started_at),
        "seconds": short_float(trajectory.seconds),
        "provenance": plain(trajectory.provenance),
        "nodes": [_node(node) for node in trajectory.nodes],
        "turns": [_turn(turn) for turn in trajectory.turns],
    }


def _node(node: TokenNode) -> dict[str, Any]:
    return {
        "parent": node.parent,
        "token_ids": node.token_ids.tolist(),
        "sampled": node.sampled.astype(int).tolist(),
        "content": None if node.content is None else node.content.astype(int).tolist(),
        "logprobs": [short_float(value) for value in node.logprobs],
        "weight_spans": [[span.version, span.start, span.end] for span in node.weight_spans],
        "media": [_medium(reference) for reference in node.media],
        "messages": plain(node.messages),
        "extras": plain(node.extras),
    }


def _medium(reference: MediaReference) -> dict[str, Any]:
    return {
        "modality": reference.modality,
        "mm_hash": reference.mm_hash,
        "digest": reference.source.digest,
        "offset": reference.placeholder.offset,
        "length": reference.placeholder.length,
        "base64": base64.b64encode(reference.source.data).decode(),
    }


def _turn(turn: Turn) -> dict[str, Any]:
    return {
        "node": turn.node,
        "finish_reason": turn.finish_reason.value,
        "message": plain(turn.message),
        "reward": short_float(turn.reward),
        "info": plain(turn.info),
        "seconds": short_float(turn.seconds),
        "agent": turn.agent,
    }
