"""The types that may cross the wire, by name and version.

A decoder constructs registered types and nothing else. It looks up a name from a message among the registered types and
in the tables of installed distributions; it never imports a module because a message names it.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, TypeVar

from transport.errors import DecodeError, MalformedError, NotEncodableError, TransportError, quoted, unknown_type

# The classes of `renderers`, which does not import `transport`: `registry` registers them when it first needs them. All
# other types are registered by `@wire_type` in the module that declares them.
#
# No module is imported because a message names it. A program need not import the types of a distribution that has the
# entry point `transport.wire_types`, a table of type names and the modules of that distribution which declare them: the
# type name in a message is only a key of the table. A name that no table has is known only after the program has
# imported the module that declares it.


DECLARED_IN: Final[Mapping[str, str]] = MappingProxyType(
    {
        "renderers.ExpansionPiece": "renderers.media.item",
        "renderers.MediaItem": "renderers.media.item",
        "renderers.MultiModalData": "renderers.rendered",
        "renderers.PixelScale": "renderers.media.item",
        "renderers.PlaceholderRange": "renderers.rendered",
        "renderers.ProcessorOutput": "renderers.vision.processor",
        "renderers.StillPatches": "renderers.vision.patches",
        "renderers.TensorField": "renderers.media.item",
    }
)

C = TypeVar("C", bound=type)


@dataclass(frozen=True, slots=True)
class WireType:
    """A registered class: a dataclass, a named tuple, or an enum with its `members`.

    `fields` are sent; `required` are those of them without a default. `positional` says that `cls(*values)`, in the
    order of `fields`, equals passing each value by name, which takes twice the time.
    """

    name: str
    version: int
    cls: type
    declared_in: str  # the module, for the error of a receiver without the type
    fields: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    positional: bool = False
    members: Mapping[str, object] | None = dataclasses.field(default=None, compare=False)

    def type_row(self) -> list[object]:
        """The row of this type in the type table of a message."""
        return [self.name, self.version, list(self.fields), self.declared_in]

    def encode(self, obj: Any) -> str | list[object]:
        """The payload of `obj`: its values in the order of `fields`, for an enum the member's name."""
        if self.members is not None:
            return str(obj.name)
        try:
            return [getattr(obj, field) for field in self.fields]
        except AttributeError as error:
            raise NotEncodableError(f"{self.cls.__qualname__} without a field: {error}", "Set every field.") from error

    def as_sent(self, version: int, names: list[Any]) -> SentType:
        """This type as a peer sends it that has `version` of it with the fields `names`."""
        if version > self.version:
            raise DecodeError(
                f"wire type {self.name!r} has version {version} and this installation reads up to "
                f"{self.version}. Update mmrollouts here."
            )
        if tuple(names) == self.fields and self.positional:
            return SentType(self, len(names), None)
        if any(type(name) is not str for name in names) or len(set(names)) < len(names):
            raise MalformedError(f"fields of {self.name} are not distinct names")
        columns = {name: column for column, name in enumerate(names)}
        for field in self.required:
            if field not in columns:
                raise DecodeError(
                    f"{self.name} was sent without its field {field!r}, which has no default. Give the field a "
                    "default, or bring both sides to one version."
                )
        used = [(field, columns[field]) for field in self.fields if field in columns]
        return SentType(self, len(names), used)


@dataclass(frozen=True, slots=True)
class SentType:
    """A registered type in the layout of one message.

    An instance is sent as `width` values. `arguments` are the fields that are passed to the class, each with the
    position of its value; None if all values are passed in their order.
    """

    type: WireType
    width: int
    arguments: list[tuple[str, int]] | None

    def build(self, payload: object) -> object:
        """The object for a payload that the peer's `encode` made."""
        members = self.type.members
        if members is not None:
            if type(payload) is not str or payload not in members:
                raise MalformedError(
                    f"{self.type.name} has no member {quoted(payload)}", "Declare the same members on both sides."
                )
            return members[payload]
        if not isinstance(payload, list) or len(payload) != self.width:
            raise MalformedError(f"{self.type.name} is not sent as a list of the values of its {self.width} fields")
        try:
            if self.arguments is None:
                return self.type.cls(*payload)
            return self.type.cls(**{field: payload[position] for field, position in self.arguments})
        # What a constructor may raise to refuse the values it is given. A class's own error should derive from one of
        # these.
        except (
            ArithmeticError,
            AssertionError,
            AttributeError,
            LookupError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            raise MalformedError(f"{self.type.name}: its constructor raised on the decoded values: {error}") from error


_by_name: dict[str, WireType] = {}
_by_class: dict[type, WireType] = {}


def wire_type(name: str, version: int = 1) -> Callable[[C], C]:
    """Register a dataclass, a named tuple or an enum; its instances can then be encoded and decoded.

        @wire_type("acme.Node", version=2)
        @dataclass(frozen=True, slots=True)
        class Node: ...

    A dataclass or named tuple is decoded by field name: fields this process does not know are dropped, fields the peer
    left out take their default, fields with `init=False` are not sent. Raise `version` when an older reader would
    misunderstand what is sent; it then refuses with `DecodeError`. Field types are not checked: `__post_init__` runs
    on decoded values, and its `ValueError` or `TypeError` becomes a `MalformedError`. An enum is sent as the name of
    its member.

    Raises `TransportError` if the name or the class is registered already, or the class is not a dataclass, named tuple
    or enum (`enum.Flag` excluded).
    """

    def register(cls: C) -> C:
        entry = _describe(cls, name, version)
        existing = _by_name.get(name) or _by_class.get(cls)
        if existing is not None and existing != entry:
            owner = f"{existing.cls.__module__}.{existing.cls.__qualname__}"
            raise TransportError(
                f"wire type {name!r}: {owner} is registered as {existing.name!r} version {existing.version}. Choose "
                "another name, and register each class once."
            )
        _by_name[name] = _by_class[cls] = entry
        return cls

    return register


def registration_of_class(cls: type) -> WireType | None:
    """The registration of exactly this class; a subclass is another type."""
    known = _by_class.get(cls)
    if known is None and DECLARED_IN.get(f"renderers.{cls.__name__}") == cls.__module__:
        return _register_class_of_renderers(f"renderers.{cls.__name__}")
    return known


def registration_of_name(name: str, declared_in: str = "") -> WireType:
    """The registration under a name from a message. A type of this distribution is imported when it is first needed.

    `declared_in` is the module that the sender names; it is part of the error and never imported. Raises
    `DecodeError`.
    """
    known = _by_name.get(name)
    if known is not None:
        return known
    module = DECLARED_IN.get(name) or _declaring_modules().get(name, "")
    try:
        if module:
            importlib.import_module(module)
    except ImportError as error:  # the module needs a package that is not installed
        raise unknown_type(name, module, str(error)) from error
    if module.startswith("renderers."):
        return _register_class_of_renderers(name)
    if name not in _by_name:
        raise unknown_type(name, module or declared_in)
    return _by_name[name]


@functools.cache
def _declaring_modules() -> Mapping[str, str]:
    """The tables of the entry points: the module that declares each wire type."""
    from importlib.metadata import entry_points  # takes as long to import as this module

    tables = [entry_point.load() for entry_point in entry_points(group="transport.wire_types")]
    return {name: module for table in tables for name, module in table.items()}


def _register_class_of_renderers(name: str) -> WireType:
    """Register a class of `renderers`, whose modules cannot use `wire_type`: they do not import `transport`."""
    cls: type = getattr(sys.modules[DECLARED_IN[name]], name.removeprefix("renderers."))
    return _by_class[wire_type(name)(cls)]


def _describe(cls: type, name: str, version: int) -> WireType:
    # A combination of flags has no member name.
    if issubclass(cls, enum.Enum) and not issubclass(cls, enum.Flag):
        return WireType(name, version, cls, cls.__module__, members=cls.__members__)
    if issubclass(cls, tuple) and hasattr(cls, "_field_defaults"):
        fields: tuple[str, ...] = cls._fields  # type: ignore[attr-defined]
        required = tuple(field for field in fields if field not in cls._field_defaults)
    elif dataclasses.is_dataclass(cls):
        sent = [field for field in dataclasses.fields(cls) if field.init]
        fields = tuple(field.name for field in sent)
        missing = dataclasses.MISSING
        required = tuple(f.name for f in sent if f.default is missing and f.default_factory is missing)
    else:
        raise TransportError(
            f"wire type {name!r}: {cls.__qualname__} is neither a dataclass nor a named tuple nor a plain "
            "enum. Put @wire_type above @dataclass, and send flags as an int."
        )
    return WireType(name, version, cls, cls.__module__, fields, required, _is_positional(cls, fields))


def _is_positional(cls: type, fields: tuple[str, ...]) -> bool:
    """Whether `cls` takes `fields` by position; not so with keyword-only fields, or an InitVar between the others."""
    leading = list(inspect.signature(cls).parameters.values())[: len(fields)]
    return tuple(p.name for p in leading) == fields and all(p.kind is p.POSITIONAL_OR_KEYWORD for p in leading)
