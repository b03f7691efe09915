"""Values of all parts: numbers of any library, bounds of fields, signatures."""

import inspect
import math
import numbers
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field, fields
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, get_args

import numpy as np

from rollouts.errors import ArgumentError
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


def real_number(value: Any) -> float | None:
    """A finite number as a float; None for anything else, True and False included."""
    return None if isinstance(value, bool) else finite_number(value)


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
    number = real_number(value)
    if number is None or number <= 0:
        raise ArgumentError(name, value, rule)
    return number


def check_choice(name: str, value: object, choices: Any) -> None:
    """Raise `ArgumentError` unless the argument `name` is one of the texts of the `Literal` `choices`."""
    if value not in get_args(choices):
        raise ArgumentError(name, value, f"pass one of {', '.join(get_args(choices))}")


def whole_field(default: Any, *, least: int = 1, most: int | None = None) -> Any:
    """A field of a `Bounded` dataclass: an integer; also None where that is its default."""
    return field(default=default, metadata={"bounds": _Bounds(whole_number, "an integer", least, most)})


def number_field(
    default: Any,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
) -> Any:
    """A field of a `Bounded` dataclass: a finite number from `least` or above `above`, to `most` or below `below`."""
    bounds = _Bounds(real_number, "a finite number", least, most, above, below)
    return field(default=default, metadata={"bounds": bounds})


class _Bounds(NamedTuple):
    read: Callable[[Any], float | None]
    kind: str
    least: float | None
    most: float | None
    above: float | None = None
    below: float | None = None

    def allow(self, value: float) -> bool:
        return (
            (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        limits = {"of at least": self.least, "above": self.above, "of at most": self.most, "below": self.below}
        return f"{self.kind} {' and '.join(f'{word} {limit}' for word, limit in limits.items() if limit is not None)}"


class Bounded:
    """A frozen dataclass that checks `whole_field` and `number_field`, without pydantic's import time."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for each in fields(self):  # type: ignore[arg-type]  # a subclass is a dataclass
            bounds, value = each.metadata.get("bounds"), getattr(self, each.name)
            if bounds is None or (value is None and each.default is None):
                continue
            found = bounds.read(value)
            if found is None or not bounds.allow(found):
                or_none = ", or None" if each.default is None else ""
                raise ArgumentError(each.name, value, f"pass {bounds}{or_none}")
            object.__setattr__(self, each.name, found)


def call_error(
    function: Callable[..., Any], positional: Sequence[str], arguments: Mapping[str, Any] = MappingProxyType({})
) -> str | None:
    """What the signature has against a call; None where it allows it. `positional` are names."""
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
