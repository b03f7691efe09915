"""Values of messages and infos as JSON for display: complete for plain data, a description for everything else."""

import dataclasses
import enum
import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from renderers import MediaSource

MAX_VALUES: Final = 20_000
MAX_DEPTH: Final = 40
_MAX_DESCRIPTION: Final = 4000
_SHOWN_ELEMENTS: Final = 64


def display_json(value: Any) -> Any:
    """`value` as dicts, lists, text, numbers, booleans and None. It always ends, and never raises.

    Text is kept whole. A media source becomes {"$source": digest}; an array, a number that is not finite, and any other
    object becomes text that describes it. What lies deeper than `MAX_DEPTH` or beyond `MAX_VALUES` values is
    replaced by text that says so.
    """
    return _Converter().convert(value, 0)


class _Converter:
    def __init__(self) -> None:
        self._left = MAX_VALUES

    def convert(self, value: Any, depth: int) -> Any:
        self._left -= 1
        if self._left < 0:
            return f"[not shown: more than {MAX_VALUES:,} values]"
        if isinstance(value, enum.Enum):
            return self.convert(value.value, depth + 1)
        if value is None or isinstance(value, bool | str):
            return value
        if isinstance(value, int):
            return _integer(value)
        if isinstance(value, float | np.floating):
            return float(value) if math.isfinite(value) else str(float(value))
        if isinstance(value, MediaSource):
            return {"$source": value.digest}
        if isinstance(value, Mapping | list | tuple | set | frozenset) and depth >= MAX_DEPTH:
            return f"[not shown: values more than {MAX_DEPTH} deep]"
        if isinstance(value, Mapping):
            return self._mapping(value, depth)
        if isinstance(value, list | tuple | set | frozenset):
            return self._sequence(value, depth)
        return _description(value)

    def _mapping(self, value: Mapping[Any, Any], depth: int) -> dict[str, Any]:
        converted: dict[str, Any] = {}
        for key, member in value.items():
            converted[key if isinstance(key, str) else _description(key)] = self.convert(member, depth + 1)
            if self._left < 0:
                break
        return converted

    def _sequence(self, value: Any, depth: int) -> list[Any]:
        converted: list[Any] = []
        for member in value:
            converted.append(self.convert(member, depth + 1))
            if self._left < 0:
                break
        return converted


def _integer(value: int) -> Any:
    if value.bit_length() > 8192:  # Python refuses to print one of more than about 14,000
        return f"[an integer of {value.bit_length()} bits]"
    return value if value.bit_length() <= 53 else str(int(value))  # JavaScript's numbers have 53 bits


def _description(value: Any) -> str:
    if isinstance(value, np.ndarray):
        shown = ", ".join(map(str, value.reshape(-1)[:_SHOWN_ELEMENTS].tolist())) if value.dtype.kind in "biuf" else ""
        return f"[{value.dtype} array {value.shape}] {shown}{' ...' * (value.size > _SHOWN_ELEMENTS)}".rstrip()
    if isinstance(value, np.generic):
        return str(value)[:_MAX_DESCRIPTION]
    if isinstance(value, bytes | bytearray | memoryview):
        return f"[{memoryview(value).nbytes} bytes]"
    if isinstance(value, int):
        return str(_integer(value))
    if dataclasses.is_dataclass(value) or hasattr(value, "__dict__"):
        return f"[{type(value).__name__}]"  # its repr may not end
    return str(value)[:_MAX_DESCRIPTION]
