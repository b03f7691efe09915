"""Whether a function can be called with the arguments that it will receive."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any


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
