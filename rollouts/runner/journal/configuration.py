"""The configuration with which a journal was begun, compared with that of a run that continues it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollouts.error_texts import short_repr
from rollouts.errors import ArgumentError
from transport import encode
from transport.wire.codec import is_plain


def plain_configuration(name: str, configuration: object) -> dict[str, Any]:
    """A copy of a configuration. Raises `ArgumentError` unless it is a mapping from names to plain values."""
    if not isinstance(configuration, Mapping) or not is_plain(dict(configuration)):
        rule = "pass a mapping from names to text, numbers, None, and lists and dicts of them"
        raise ArgumentError(name, configuration, rule)
    if not all(isinstance(key, str) for key in configuration):
        raise ArgumentError(name, configuration, "pass a mapping whose keys are text")
    return dict(configuration)


def differences(recorded: Mapping[str, Any], given: Mapping[str, Any], prefix: str = "") -> list[str]:
    """A sentence for each value that differs, with its name in dotted form."""
    found: list[str] = []
    for key in [*recorded, *(key for key in given if key not in recorded)]:
        name = f"{prefix}{key}"
        if key not in given:
            found.append(f"{name} is not given, and the journal has {short_repr(recorded[key])}")
        elif key not in recorded:
            found.append(f"{name} is {short_repr(given[key])}, and the journal has none")
        elif isinstance(recorded[key], dict) and isinstance(given[key], dict):
            found += differences(recorded[key], given[key], f"{name}.")
        elif not _same(recorded[key], given[key]):
            found.append(f"{name} is {short_repr(given[key])}, and the journal has {short_repr(recorded[key])}")
    return found


def _same(first: object, second: object) -> bool:
    return first == second or encode(first) == encode(second)  # nan differs from itself
