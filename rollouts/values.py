"""Values of all parts: numbers of any library, bfloat16, signatures."""

from __future__ import annotations

import inspect
import math
import numbers
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, get_args

import numpy as np

from renderers.vision.patches import bfloat16_to_float32
from rollouts.errors import ArgumentError
from transport import wire_type
from transport.wire.arrays import is_tensor


def has_members(value: object, protocol: Any) -> bool:
    """Whether `value` is an object with each public member of the class `protocol`; one that is None counts as missing.

    `isinstance` with a runtime-checkable protocol does not see members that `value` gets by `__getattr__` from an
    object that it wraps, from Python 3.12 on. A class has the methods of its objects, and is no such object.
    """
    return not isinstance(value, type) and all(getattr(value, name, None) is not None for name in members(protocol))


@cache
def members(protocol: Any) -> frozenset[str]:
    """The names of the public members of a protocol and of the protocols that it extends."""
    protocols = [base for base in protocol.__mro__ if Protocol in base.__bases__]
    return frozenset(name for base in protocols for name in vars(base) if not name.startswith("_"))


def finite_number(value: Any) -> float | None:
    """A finite real number, or an array or tensor without axes that holds one, as a float; None for anything else."""
    if isinstance(value, np.ndarray) or is_tensor(value):
        if tuple(value.shape) != ():
            return None
        value = value.item()
    if not isinstance(value, numbers.Real | np.bool_):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


class MeanAndSpread(NamedTuple):
    """The mean and the standard deviation of `used` finite numbers among `given` ones; NaN where `used` is 0."""

    mean: float
    spread: float
    used: int
    given: int

    @property
    def not_finite(self) -> int:
        return self.given - self.used


def mean_and_spread(values: Iterable[float]) -> MeanAndSpread:
    """The mean and the standard deviation of the finite numbers among `values`: finite too, up to 1.8e308."""
    array = np.fromiter(values, np.float64)
    finite = array[np.isfinite(array)]
    if not len(finite):
        return MeanAndSpread(math.nan, math.nan, 0, len(array))
    scale = 2.0 ** (math.frexp(np.abs(finite).max())[1] - 1)  # sums and squares of smaller numbers do not overflow
    scaled = finite / scale
    return MeanAndSpread(float(scaled.mean()) * scale, float(scaled.std()) * scale, len(finite), len(array))


def whole_number(value: Any) -> int | None:
    """A Python or numpy integer as an int; None for anything else, including True, False and 1.0."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        return None
    return operator.index(value)


def check_integer(name: str, value: Any, *, least: int = 1, rule: str = "") -> int:
    """The argument `name` as an int. Raises `ArgumentError`, by default with the bound as the rule, below `least`."""
    number = whole_number(value)
    if number is None or number < least:
        raise ArgumentError(name, value, rule or f"pass an integer of at least {least}")
    return number


def json_number(value: float) -> float | str:
    """A number for strict JSON: one that is not finite is the text "NaN", "Infinity" or "-Infinity"."""
    number = float(value)
    if math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"


def check_positive(name: str, value: Any, rule: str = "pass a finite number above 0") -> float:
    """The argument `name` as a float. Raises `ArgumentError` unless it is a finite number above 0."""
    number = None if isinstance(value, bool) else finite_number(value)
    if number is None or number <= 0:
        raise ArgumentError(name, value, rule)
    return number


def check_choice(name: str, value: object, choices: Any) -> None:
    """Raise `ArgumentError` unless the argument `name` is one of the texts of the `Literal` `choices`."""
    if value not in get_args(choices):
        raise ArgumentError(name, value, f"pass one of {', '.join(get_args(choices))}")


@wire_type("rollouts.Bfloat16Array")
@dataclass(frozen=True, slots=True, eq=False)
class Bfloat16Array:
    """An array of bfloat16, as numpy has none: `bits`, uint16; `unpack` widens to float32 of the same shape."""

    bits: np.ndarray

    @property
    def nbytes(self) -> int:
        return self.bits.nbytes

    def unpack(self) -> np.ndarray:
        floats = bfloat16_to_float32(self.bits)
        floats.setflags(write=False)
        return floats


def call_error(
    function: Callable[..., Any], positional: Sequence[str], arguments: Mapping[str, Any] = MappingProxyType({})
) -> str | None:
    """What the signature has against `function(*positional, **arguments)`; None where it allows the call or is unknown.

    `positional` are names for the text.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some classes in C have none
        return None
    try:
        signature.bind(*positional, **arguments)
    except TypeError as error:
        name = getattr(function, "__qualname__", type(function).__name__)
        call = ", ".join([*positional, *(f"{one}=" for one in arguments)])
        return f"it is called as {name}({call}), but takes {signature}: {error}"
    return None
