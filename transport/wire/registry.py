"""The types that may cross the wire, by name and version.

A decoder constructs registered types and nothing else. A type is registered by `@wire_type` when its module
is imported, and no module is imported because a message names it: the type name in a message is only a key of
the tables that installed distributions give as their entry point `transport.wire_types` (type name ->
module), so that programs need not import the types of a distribution. `renderers`, which does not import
`transport`, has its table here.
"""

import dataclasses
import enum
import functools
import importlib
import inspect
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from transport.errors import DecodeError, EncodeError, MalformedError, TransportError, quoted, unknown_type

DECLARED_IN: Final[Mapping[str, str]] = {
    **dict.fromkeys(("renderers.MultiModalData", "renderers.PlaceholderRange"), "renderers.rendered"),
    **dict.fromkeys(("renderers.ExpansionPiece", "renderers.MediaItem"), "renderers.media.item"),
    **dict.fromkeys(("renderers.PixelScale", "renderers.TensorField"), "renderers.media.item"),
    "renderers.ProcessorOutput": "renderers.vision.processor",
    "renderers.StillPatches": "renderers.vision.patches",
}

C = TypeVar("C", bound=type)

# What a constructor may raise to refuse the values it is given. A class's own error should derive from one of
# these.
_REFUSALS: Final = ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, TypeError, ValueError


@dataclass(frozen=True, slots=True)
class WireType:
    """A registered class: a dataclass, a named tuple, or an enum with its `members`.

    `fields` are sent; `required` are those of them without a default. `positional` says that `cls(*values)`,
    in the order of `fields`, equals passing each value by name, which takes twice the time.
    """

    name: str
    version: int
    cls: type
    declared_in: str  # the module, for the error of a receiver without the type
    fields: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    positional: bool = False
    members: Mapping[str, object] | None = dataclasses.field(default=None, compare=False)
    read_fields: Callable[[Any], tuple[object, ...]] = dataclasses.field(default=lambda obj: (), compare=False)

    def type_row(self) -> list[object]:
        """The row of this type in the type table of a message."""
        return [self.name, self.version, list(self.fields), self.declared_in]

    def parts(self, obj: Any) -> Sequence[object]:
        """The values of `fields` in their order; for an enum, the member's name."""
        if self.members is not None:
            return [obj.name]
        try:
            return self.read_fields(obj)
        except AttributeError as error:
            reason = f"{self.cls.__qualname__} without a field: {error}"
            raise EncodeError("value", reason, "Set every field.") from error

    def builder(self, version: int, names: list[Any]) -> Callable[[list[Any]], object]:
        """The function that makes an object of its parts, as a peer sends it that has `version` with fields `names`."""
        if version > self.version:
            raise DecodeError(
                f"wire type {self.name!r} has version {version} and this installation reads up to "
                f"{self.version}. Update mmrollouts here."
            )
        if self.members is not None:
            return self._build_member
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
        cls, width = self.cls, len(names)
        in_order = self.positional and tuple(names) == self.fields

        def build(values: list[Any]) -> object:
            if len(values) != width:
                raise MalformedError(f"{self.name} is not sent as a list of the values of its {width} fields")
            try:
                if in_order:
                    return cls(*values)
                return cls(**{field: values[position] for field, position in used})
            except _REFUSALS as error:
                what = f"{self.name}: its constructor raised on the decoded values: {error}"
                raise MalformedError(what) from error

        return build

    def _build_member(self, values: list[Any]) -> object:
        assert self.members is not None
        if len(values) != 1 or type(values[0]) is not str or values[0] not in self.members:
            sent = ", ".join(map(quoted, values[:10]))
            raise MalformedError(f"{self.name} has no member {sent}", "Declare the same members on both sides.")
        return self.members[values[0]]


_by_name: dict[str, WireType] = {}
_by_class: dict[type, WireType] = {}


def wire_type(name: str, version: int = 1) -> Callable[[C], C]:
    """Register a dataclass, a named tuple or an enum; its instances can then be encoded and decoded.

        @wire_type("acme.Node", version=2)
        @dataclass(frozen=True, slots=True)
        class Node: ...

    A dataclass or named tuple is decoded by field name: fields this process does not know are dropped, fields
    the peer left out take their default, fields with `init=False` are not sent. Raise `version` when an older
    reader would misunderstand what is sent; it then refuses with `DecodeError`. Field types are not checked:
    `__post_init__` runs on decoded values, and its `ValueError` or `TypeError` becomes a `MalformedError`. An
    enum is sent as the name of its member.

    Raises `TransportError` if the name or the class is registered already, or the class is not a dataclass,
    named tuple or enum (`enum.Flag` excluded).
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
    """The registration under a name from a message.

    A type of this distribution is imported when it is first needed. `declared_in` is the module that the
    sender names; it is part of the error and never imported. Raises `DecodeError`.
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
    fields: tuple[str, ...]
    if issubclass(cls, tuple) and hasattr(cls, "_field_defaults"):
        fields = cls._fields  # type: ignore[attr-defined]
    elif dataclasses.is_dataclass(cls):
        fields = tuple(field.name for field in dataclasses.fields(cls) if field.init)
    else:
        raise TransportError(
            f"wire type {name!r}: {cls.__qualname__} is neither a dataclass nor a named tuple nor a plain "
            "enum. Put @wire_type above @dataclass, and send flags as an int."
        )
    parameters = inspect.signature(cls).parameters.values()
    required = tuple(one.name for one in parameters if one.default is one.empty and one.name in fields)
    # Not so with keyword-only fields, or an InitVar between the others.
    in_order = fields == tuple(one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD)[: len(fields)]
    return WireType(name, version, cls, cls.__module__, fields, required, in_order, None, _reader(fields))


def _reader(fields: tuple[str, ...]) -> Callable[[Any], tuple[object, ...]]:
    if len(fields) > 1:
        return operator.attrgetter(*fields)  # in a third of the time of a loop
    return lambda obj: tuple(getattr(obj, field) for field in fields)
