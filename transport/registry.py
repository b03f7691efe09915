"""The types that may cross the wire, by name and version.

A decoder constructs registered types and nothing else; what a message calls itself is looked up here, never imported.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from transport.errors import MalformedError, MissingFieldError, RegistrationError, UnknownTypeError, VersionError

C = TypeVar("C", bound=type)

# What a constructor may raise to refuse the values it is given. A class's own error should derive from one of these.
_REFUSALS = (ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


@dataclass(frozen=True, slots=True)
class WireType:
    """A registered class. `fields` are sent; `required` are those of them without a default."""

    name: str
    version: int
    cls: type
    fields: tuple[str, ...]
    required: tuple[str, ...]

    def pack(self, obj: Any) -> object:
        """What stands for `obj` in a message: a dict by field name, for an enum the member's name."""
        if isinstance(obj, enum.Enum):
            return obj.name
        return {field: getattr(obj, field) for field in self.fields}

    def build(self, payload: object, version: int) -> object:
        """The object for a payload that the peer wrote at `version` of this type."""
        if version > self.version:
            raise VersionError(f"wire type {self.name!r}", version, self.version)
        if issubclass(self.cls, enum.Enum):
            return self._member(payload)
        if type(payload) is not dict:
            raise MalformedError(f"{self.name} is not a map of its fields")
        for field in self.required:
            if field not in payload:
                raise MissingFieldError(self.name, field)
        known = {field: payload[field] for field in self.fields if field in payload}
        try:
            return self.cls(**known)
        except _REFUSALS as refusal:
            raise MalformedError(f"{self.name} refused the values it came with: {refusal}") from refusal

    def _member(self, payload: object) -> object:
        members: Mapping[str, object] = self.cls.__members__  # type: ignore[attr-defined]
        if type(payload) is not str or payload not in members:
            raise MalformedError(
                f"{self.name} has no member {payload!r}", "Bring both sides to one version of mmrollouts."
            )
        return members[payload]


_by_name: dict[str, WireType] = {}
_by_class: dict[type, WireType] = {}


def wire_type(name: str, version: int = 1) -> Callable[[C], C]:
    """Register a dataclass or an enum so that its instances can be encoded and decoded.

        @wire_type("acme.Node", version=2)
        @dataclass(frozen=True, slots=True)
        class Node: ...

    A dataclass travels as a map by field name: fields this process does not know are dropped, fields the peer left out
    take their default, fields with `init=False` are not sent. Raise `version` when an older reader would misunderstand
    what is sent; it then refuses with `VersionError`. Field types are not checked: `__post_init__` runs on decoded
    values, and its `ValueError` or `TypeError` becomes a `MalformedError`. An enum travels by member name.

    Raises `RegistrationError` if the name or the class is taken, or the class is neither a dataclass nor an enum.
    """

    def register(cls: C) -> C:
        entry = _describe(cls, name, version)
        taken = _by_name.get(name) or _by_class.get(cls)
        if taken is not None and taken != entry:
            raise RegistrationError(
                name,
                f"{cls.__qualname__} cannot have it, {taken.cls.__qualname__} is registered as {taken.name!r} "
                f"version {taken.version}",
                "Register each class once, under a name of its own.",
            )
        _by_name[name] = _by_class[cls] = entry
        return cls

    return register


def of_class(cls: type) -> WireType | None:
    """The registration of exactly this class; a subclass is another type."""
    return _by_class.get(cls)


def of_name(name: str) -> WireType:
    """The registration under a name read from the wire. Raises `UnknownTypeError`."""
    try:
        return _by_name[name]
    except KeyError:
        raise UnknownTypeError(name) from None


def _describe(cls: type, name: str, version: int) -> WireType:
    if not name or version < 1:
        raise RegistrationError(name, f"version {version}", "Use a name that is not empty and a version from 1 up.")
    # A combination of flags has no member name to travel by.
    if issubclass(cls, enum.Enum) and not issubclass(cls, enum.Flag):
        return WireType(name, version, cls, (), ())
    if not dataclasses.is_dataclass(cls):
        raise RegistrationError(
            name,
            f"{cls.__qualname__} is neither a dataclass nor a plain enum",
            "Put @wire_type above @dataclass, and send flags as an int.",
        )
    sent = [field for field in dataclasses.fields(cls) if field.init]
    required = [f for f in sent if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING]
    return WireType(name, version, cls, tuple(f.name for f in sent), tuple(f.name for f in required))
