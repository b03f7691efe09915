"""pydantic models on the wire: fields by name, validated by the receiver under the configuration of the model."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeGuard

from transport.errors import MalformedError, NotEncodableError, TransportError
from transport.wire.wire_format import MODEL_REST

if TYPE_CHECKING:
    import pydantic

_MAX_ERRORS: Final = 5  # validation errors in one error message
_MAX_PATH_STEPS: Final = 10  # of the path to a value that failed


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The fields of a model class that are sent. `input_keys` is the key under which validation expects each field."""

    fields: tuple[str, ...]
    required: tuple[str, ...]
    input_keys: Mapping[str, str]

    def encode(self, model: pydantic.BaseModel) -> list[object]:
        """The values of `fields`, then the extra values and the fields that were not set (see `MODEL_REST`)."""
        try:
            values = [getattr(model, field) for field in self.fields]
        except AttributeError as error:  # model_construct() sets only the fields that it is given
            raise NotEncodableError(
                f"{type(model).__qualname__} without a field: {error}", "Set every field."
            ) from error
        unset = [field for field in self.fields if field not in model.model_fields_set]
        return [*values, [unset, model.model_extra or {}] if unset or model.model_extra else None]

    def build(self, cls: type[pydantic.BaseModel], sent: Mapping[str, object]) -> object:
        """The validated model. The `extra` setting of `cls` says what happens to unknown fields."""
        unset, extra = _read_rest(sent.get(MODEL_REST))
        values = extra | {name: value for name, value in sent.items() if name != MODEL_REST}
        known = {*self.input_keys, *self.input_keys.values()}
        data = {name: value for name, value in values.items() if name not in known}
        data |= {key: values[name] for name, key in self.input_keys.items() if name in values}
        model = _validate(cls, data)
        model.model_fields_set.difference_update(unset)
        return model


def is_model(cls: type) -> TypeGuard[type[pydantic.BaseModel]]:
    """Whether `cls` is a pydantic model. None exists while pydantic is not loaded."""
    pydantic = sys.modules.get("pydantic")
    return pydantic is not None and issubclass(cls, pydantic.BaseModel)


def describe_model(cls: type[pydantic.BaseModel], name: str) -> ModelShape:
    """The shape of a model class. Raises `TransportError` for one whose instances could not be decoded."""
    from pydantic import RootModel

    if issubclass(cls, RootModel):
        raise TransportError(f"wire type {name!r}: {cls.__qualname__} is a RootModel. Send its root.")
    sent = {field: info for field, info in cls.model_fields.items() if not info.exclude}
    unsent = [field for field, info in cls.model_fields.items() if info.exclude and info.is_required()]
    if unsent:
        raise TransportError(
            f"wire type {name!r}: {cls.__qualname__}.{unsent[0]} is excluded and has no default. Give the "
            "field a default."
        )
    required = tuple(field for field, info in sent.items() if info.is_required())
    input_keys = {field: _input_key(cls, field, info, name) for field, info in sent.items()}
    return ModelShape(tuple(sent), required, input_keys)


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
    raise TransportError(
        f"wire type {name!r}: {cls.__qualname__}.{field} is read from a path. Set "
        "populate_by_name=True in its model_config."
    )


def _validate(cls: type[pydantic.BaseModel], data: Mapping[str, object]) -> pydantic.BaseModel:
    from pydantic import ValidationError

    try:
        return cls.model_validate(data)
    except ValidationError as error:
        # str(error) contains the `repr` of the refused values, which may be too long (see `error_texts`).
        failures = error.errors(include_url=False, include_context=False, include_input=False)[:_MAX_ERRORS]
        reasons = "; ".join(
            f"{'.'.join(map(str, one['loc'][:_MAX_PATH_STEPS]))}: {one['msg']:.200}" for one in failures
        )
        raise ValueError(f"{error.error_count()} validation errors: {reasons}") from error


def _read_rest(rest: object) -> tuple[list[Any], dict[Any, Any]]:
    if rest is None:
        return [], {}
    if type(rest) is list and len(rest) == 2 and type(rest[0]) is list and type(rest[1]) is dict:
        unset, extra = rest
        if all(type(name) is str for name in (*unset, *extra)):
            return unset, extra
    raise MalformedError("last value of a model is not [names of fields, values by name]")
