"""Whether an object has the members of a protocol, on every version of Python."""

from __future__ import annotations

from functools import cache
from typing import Any, Protocol


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
