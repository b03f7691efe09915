"""The types that may cross the wire, by name and version.

A decoder constructs registered types and nothing else. The name in a message is looked up here and in the fixed table
of `known_types`; no module is imported because a message names it.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from transport.errors import MalformedError, MissingFieldError, RegistrationError, UnknownTypeError, VersionError
from transport.wire.errors import NotSendableError
from transport.wire.known_types import DECLARED_IN, import_declaration
from transport.wire.pydantic_models import ModelShape, describe_model, is_model
from transport.wire.quoting import quoted
from transport.wire.wire_format import MODEL_REST, RUN_FIELDS

C = TypeVar("C", bound=type)

# What a constructor may raise to refuse the values it is given. A class's own error should derive from one of these.
_REFUSALS = (ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


@dataclass(frozen=True, slots=True)
class WireType:
    """A registered class: a dataclass, a named tuple, a pydantic `model`, or an enum with its `members`.

    `fields` are sent; `required` are those of them without a default. `positional` says that `cls(*values)`, in the
    order of `fields`, means what naming each value means, at half the time. `readers` read a field of a dataclass each.
    """

    name: str
    version: int
    cls: type
    declared_in: str = ""  # the module, named to a receiver that does not know the type; "" for those that all know
    fields: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    positional: bool = False
    readers: tuple[Callable[[Any], Any], ...] = dataclasses.field(default=(), compare=False)
    members: Mapping[str, object] | None = dataclasses.field(default=None, compare=False)
    model: ModelShape | None = dataclasses.field(default=None, compare=False)

    def described(self) -> list[object]:
        """The row of this type in the type table of a message."""
        row: list[object] = [self.name, self.version, list(self.fields)]
        return [*row, self.declared_in] if self.declared_in else row

    def pack(self, obj: Any) -> str | list[object]:
        """What stands for `obj` in a message: its values in the order of `fields`, for an enum the member's name."""
        if self.members is not None:
            return str(obj.name)
        if self.model is not None:
            return self.model.pack(obj)
        try:
            return [getattr(obj, field) for field in self.fields]
        except AttributeError as error:
            raise NotSendableError(f"{self.cls.__qualname__} without a field: {error}", "Set every field.") from error

    def as_sent(self, version: int, names: list[Any]) -> SentType:
        """This type as a peer lays it out that writes `version` of it with the fields `names`."""
        if version > self.version:
            raise VersionError(f"wire type {self.name!r}", version, self.version)
        if tuple(names) == self.fields and self.positional:
            return SentType(self, len(names), None)
        if any(type(name) is not str for name in names) or len(set(names)) < len(names):
            raise MalformedError(f"fields of {self.name} are not distinct names")
        places = {name: place for place, name in enumerate(names)}
        for field in self.required:
            if field not in places:
                raise MissingFieldError(self.name, field)
        # A model decides for itself what to do with a field it does not have.
        taken = names if self.model is not None else [field for field in self.fields if field in places]
        return SentType(self, len(names), [(field, places[field]) for field in taken])


@dataclass(frozen=True, slots=True)
class SentType:
    """A registered type as one message lays it out.

    An instance comes as `width` values. `taken` are the fields that the class is given and where among the values each
    is; None where the values are the arguments of the class as they stand.
    """

    type: WireType
    width: int
    taken: list[tuple[str, int]] | None

    @property
    def comes_in_runs(self) -> bool:
        return self.type.members is None and self.width >= RUN_FIELDS

    def build(self, payload: object) -> object:
        """The object for a payload that the peer's `pack` made."""
        if self.type.members is not None:
            return self._member(self.type.members, payload)
        if not isinstance(payload, list) or len(payload) != self.width:
            raise MalformedError(f"{self.type.name} is not a list of its {self.width} fields")
        try:
            if self.taken is None:
                return self.type.cls(*payload)
            values = {field: payload[place] for field, place in self.taken}
            if self.type.model is not None:
                return self.type.model.build(self.type.cls, values)
            return self.type.cls(**values)
        except _REFUSALS as refusal:
            raise MalformedError(f"{self.type.name} refused the values it came with: {refusal}") from refusal

    def build_run(self, columns: list[list[Any]]) -> list[Any]:
        """The objects whose values stand in columns, a column a field."""
        if self.taken is not None:
            return [self.build(list(values)) for values in zip(*columns, strict=True)]
        built: list[Any] = []
        try:
            built.extend(map(self.type.cls, *columns))
        except _REFUSALS as refusal:
            number = f"{len(built)} of {len(columns[0])}"  # `extend` keeps the objects made before the exception
            raise MalformedError(f"{self.type.name} {number} refused the values it came with: {refusal}") from refusal
        return built

    def _member(self, members: Mapping[str, object], payload: object) -> object:
        if type(payload) is not str or payload not in members:
            raise MalformedError(
                f"{self.type.name} has no member {quoted(payload)}", "Bring both sides to one version of mmrollouts."
            )
        return members[payload]


_by_name: dict[str, WireType] = {}
_by_class: dict[type, WireType] = {}


def wire_type(name: str, version: int = 1) -> Callable[[C], C]:
    """Register a dataclass, a named tuple, a pydantic model or an enum; its instances can be encoded and decoded then.

        @wire_type("acme.Node", version=2)
        @dataclass(frozen=True, slots=True)
        class Node: ...

    A dataclass is decoded by field name: fields this process does not know are dropped, fields the peer left out take
    their default, fields with `init=False` are not sent. Raise `version` when an older reader would misunderstand
    what is sent; it then refuses with `VersionError`. Field types are not checked: `__post_init__` runs on decoded
    values, and its `ValueError` or `TypeError` becomes a `MalformedError`. An enum travels by member name.

    A pydantic model is decoded by field name, too, and validated: its validators run on decoded values, and what they
    refuse is a `MalformedError`. Fields this process does not know are dropped, kept or refused as `extra` in the
    model's configuration says. What the model has beyond its fields and which fields were set come back as they were;
    private attributes and fields with `exclude=True` are not sent.

    A named tuple is decoded by field name as a dataclass is.

    Raises `RegistrationError` if the name or the class is taken, or the class is none of the four.
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


def of_name(name: str, declared_in: str = "") -> WireType:
    """The registration under a name read from the wire. Types of this distribution are imported when first met.

    `declared_in` is the module that the sender names; it is shown and never imported. Raises `UnknownTypeError`.
    """
    known = _by_name.get(name)
    if known is not None:
        return known
    try:
        ours = import_declaration(name)
    except ImportError as error:
        raise UnknownTypeError(name, DECLARED_IN[name], str(error)) from error
    if name not in _by_name:
        raise UnknownTypeError(name, ours or declared_in)
    return _by_name[name]


def _describe(cls: type, name: str, version: int) -> WireType:
    if not name or version < 1:
        raise RegistrationError(name, f"version {version}", "Use a name that is not empty and a version from 1 up.")
    module = "" if name in DECLARED_IN else cls.__module__
    # A combination of flags has no member name to travel by.
    if issubclass(cls, enum.Enum) and not issubclass(cls, enum.Flag):
        return WireType(name, version, cls, module, members=cls.__members__)
    if is_model(cls):
        model = describe_model(cls, name)
        return WireType(name, version, cls, module, (*model.fields, MODEL_REST), model.required, model=model)
    if issubclass(cls, tuple) and hasattr(cls, "_field_defaults"):
        names: tuple[str, ...] = cls._fields  # type: ignore[attr-defined]
        needed = tuple(field for field in names if field not in cls._field_defaults)
        return WireType(name, version, cls, module, names, needed, _takes_in_order(cls, names), _readers(names))
    if not dataclasses.is_dataclass(cls):
        raise RegistrationError(
            name,
            f"{cls.__qualname__} is neither a dataclass nor a named tuple nor a plain enum nor a pydantic model",
            "Put @wire_type above @dataclass, and send flags as an int.",
        )
    sent = [field for field in dataclasses.fields(cls) if field.init]
    required = [f for f in sent if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING]
    fields = tuple(f.name for f in sent)
    needed = tuple(f.name for f in required)
    return WireType(name, version, cls, module, fields, needed, _takes_in_order(cls, fields), _readers(fields))


def _readers(fields: tuple[str, ...]) -> tuple[Callable[[Any], Any], ...]:
    return tuple(operator.attrgetter(field) for field in fields)


def _takes_in_order(cls: type, fields: tuple[str, ...]) -> bool:
    """Whether `cls` takes `fields` by position; not so with keyword-only fields, or an InitVar between the others."""
    leading = list(inspect.signature(cls).parameters.values())[: len(fields)]
    return tuple(p.name for p in leading) == fields and all(p.kind is p.POSITIONAL_OR_KEYWORD for p in leading)
