"""pydantic models on the wire: fields by name, validated again by the receiver, as their own configuration says."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeGuard

from transport.errors import MalformedError, RegistrationError
from transport.wire.errors import NotSendableError
from transport.wire.wire_format import MODEL_REST

if TYPE_CHECKING:
    import pydantic

_MOST_ERRORS: Final = 5  # named in an error
_MOST_STEPS: Final = 10  # of the way to one of them


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What is sent of a model class. `inputs` says under which key validation expects each field."""

    fields: tuple[str, ...]
    required: tuple[str, ...]
    inputs: Mapping[str, str]

    def pack(self, model: pydantic.BaseModel) -> list[object]:
        """The values of `fields`, then what else the model knows (see `MODEL_REST`)."""
        try:
            values = [getattr(model, field) for field in self.fields]
        except AttributeError as error:  # model_construct() leaves out what it is not given
            raise NotSendableError(
                f"{type(model).__qualname__} without a field: {error}", "Set every field."
            ) from error
        unset = [field for field in self.fields if field not in model.model_fields_set]
        return [*values, [unset, model.model_extra or {}] if unset or model.model_extra else None]

    def build(self, cls: type[pydantic.BaseModel], sent: Mapping[str, object]) -> object:
        """The validated model. What `cls` has no field for is left to its `extra`: ignored, kept or refused."""
        unset, extra = _read_rest(sent.get(MODEL_REST))
        named = {name: value for name, value in sent.items() if name != MODEL_REST}
        taken = set(self.inputs.values())
        given = {
            name: value for name, value in (extra | named).items() if name not in self.inputs and name not in taken
        }
        for name, key in self.inputs.items():
            if name in named or name in extra:
                given[key] = named[name] if name in named else extra[name]
        model = _validated(cls, given)
        model.model_fields_set.difference_update(unset)
        return model


def is_model(cls: type) -> TypeGuard[type[pydantic.BaseModel]]:
    """Whether `cls` is a pydantic model. Without pydantic loaded there is none to meet."""
    pydantic = sys.modules.get("pydantic")
    return pydantic is not None and issubclass(cls, pydantic.BaseModel)


def describe_model(cls: type[pydantic.BaseModel], name: str) -> ModelShape:
    """The shape of a model class. Raises `RegistrationError` for one whose instances could not be made again."""
    from pydantic import RootModel

    if issubclass(cls, RootModel):
        raise RegistrationError(name, f"{cls.__qualname__} is a RootModel", "Send its root.")
    sent = {field: info for field, info in cls.model_fields.items() if not info.exclude}
    hidden = [field for field, info in cls.model_fields.items() if info.exclude and info.is_required()]
    if hidden:
        raise RegistrationError(
            name, f"{cls.__qualname__}.{hidden[0]} is excluded and has no default", "Give the field a default."
        )
    required = tuple(field for field, info in sent.items() if info.is_required())
    inputs = {field: _input_key(cls, field, info, name) for field, info in sent.items()}
    return ModelShape(tuple(sent), required, inputs)


def _input_key(cls: type[pydantic.BaseModel], field: str, info: pydantic.fields.FieldInfo, name: str) -> str:
    from pydantic import AliasChoices

    config: Mapping[str, Any] = cls.model_config
    alias = info.validation_alias
    if alias is None or config.get("populate_by_name") or config.get("validate_by_name"):
        return field
    choices = alias.choices if isinstance(alias, AliasChoices) else [alias]
    for choice in choices:
        if isinstance(choice, str):
            return choice
    raise RegistrationError(
        name, f"{cls.__qualname__}.{field} is read from a path", "Set populate_by_name=True in its model_config."
    )


def _validated(cls: type[pydantic.BaseModel], given: Mapping[str, object]) -> pydantic.BaseModel:
    from pydantic import ValidationError

    try:
        return cls.model_validate(given)
    except ValidationError as error:
        # Its own words contain the `repr` of what was refused, which may have no end (see `transport.wire.quoting`).
        wrong = error.errors(include_url=False, include_context=False, include_input=False)[:_MOST_ERRORS]
        words = "; ".join(f"{'.'.join(map(str, one['loc'][:_MOST_STEPS]))}: {one['msg']:.200}" for one in wrong)
        raise ValueError(f"{error.error_count()} validation errors: {words}") from error


def _read_rest(rest: object) -> tuple[list[Any], dict[Any, Any]]:
    if rest is None:
        return [], {}
    if type(rest) is list and len(rest) == 2 and type(rest[0]) is list and type(rest[1]) is dict:
        unset, extra = rest
        if all(type(name) is str for name in (*unset, *extra)):
            return unset, extra
    raise MalformedError("rest of a model is not [names of fields, values by name]")
