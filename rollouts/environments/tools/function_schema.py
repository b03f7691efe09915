"""The JSON schema of a function's parameters, and arguments checked against it."""

from __future__ import annotations

import inspect
import json
import typing
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from rollouts.environments.tools.errors import ToolArgumentsError, ToolDefinitionError
from rollouts.error_texts import describe_exception, short_repr

if TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic.fields import FieldInfo


#: A model is told this many of the problems of its arguments, each with at most this many characters.
_MAX_PROBLEMS = 10
_MAX_PROBLEM_CHARACTERS = 300

#: The parameters of a function or of the function of a method, by (name of the tool, whether it is a method). To build
#: them takes a millisecond, and the tools of an episode are often methods of an object that is made for the episode.
_CACHE: WeakKeyDictionary[Any, dict[tuple[str, bool], FunctionParameters]] = WeakKeyDictionary()


def function_parameters(tool: str, function: Callable[..., Any]) -> FunctionParameters:
    """The parameters of a function or method, which are found once. Raises `ToolDefinitionError`."""
    is_method = inspect.ismethod(function)
    found = _CACHE.setdefault(getattr(function, "__func__", function), {})
    key = (tool, is_method)
    if key not in found:
        found[key] = FunctionParameters(tool, function)
    return found[key]


class FunctionParameters:
    """The parameters of a function: their JSON schema, and the conversion of a model's arguments to their types.

    Every parameter needs an annotation that pydantic knows, and a name (no `*args`, `**kwargs` or positional-only
    ones). Text in `Annotated[int, "the number of days"]` is a parameter's description; a `Field` there has constraints
    and descriptions too. Raises `ToolDefinitionError`.
    """

    def __init__(self, tool: str, function: Callable[..., Any]) -> None:
        self._tool = tool
        self._names = _parameter_names(tool, function)
        self._model = _arguments_model(tool, function, self._names)
        self.schema = _schema(tool, self._model)

    def checked(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments as the types of the annotations, without those that the call left out.

        Raises `ToolArgumentsError` with the name of each wrong argument, what is wrong with it, and its value.
        """
        from pydantic import ValidationError

        try:
            values = self._validated(dict(arguments))
        except ValidationError as error:
            errors = error.errors(include_url=False, include_context=False)
            problems = [_shortened(self._problem(each)) for each in errors[:_MAX_PROBLEMS]]
            if len(errors) > _MAX_PROBLEMS:  # a list of a thousand wrong items has a thousand
                problems.append(f"{len(errors) - _MAX_PROBLEMS} more problems")
            raise ToolArgumentsError(self._tool, problems) from error
        given = values.model_fields_set
        return {name: getattr(values, field) for field, name in self._fields().items() if field in given}

    def _validated(self, arguments: dict[str, Any]) -> BaseModel:
        # As JSON, which the model wrote: there a date is a text for a strict type too.
        try:
            text = json.dumps(arguments, ensure_ascii=False).encode()
        except RecursionError as error:
            raise ToolArgumentsError(self._tool, ["the arguments are nested too deeply"]) from error
        except (TypeError, ValueError):  # JSON cannot hold them: half of a surrogate pair, an object of a caller
            return self._model.model_validate(arguments)
        return self._model.model_validate_json(text)

    def _fields(self) -> dict[str, str]:
        return {_field(index): name for index, name in enumerate(self._names)}

    def _problem(self, error: Any) -> str:
        place = ".".join(map(str, error["loc"]))
        if not place:  # pydantic reads 200 levels
            return f"the arguments cannot be read: {error['msg']}"
        if error["type"] == "extra_forbidden" and len(error["loc"]) == 1:
            return f"there is no argument {place!r}; the arguments are {', '.join(self._names) or 'none'}"
        if error["type"] == "missing":
            return f"{place} is missing"
        return f"{place}: {error['msg']}, not {short_repr(error['input'])}"


def _shortened(problem: str) -> str:
    """A problem within the limit: the name of an argument, or the tag of a union, may be any text of the model."""
    is_long = len(problem) > _MAX_PROBLEM_CHARACTERS
    return f"{problem[: _MAX_PROBLEM_CHARACTERS - 3]}..." if is_long else problem


def _field(index: int) -> str:
    # Not the name of the parameter: a pydantic model does not allow every name (`copy`, `_x`), an alias may be any.
    return f"argument_{index}"


def _parameter_names(tool: str, function: Callable[..., Any]) -> list[str]:
    from pydantic.fields import FieldInfo

    names = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            kind = "positional-only" if parameter.kind is parameter.POSITIONAL_ONLY else "variable"
            raise ToolDefinitionError(
                tool, f"parameter {name!r} is {kind}; a model passes arguments by name, so give each its own parameter"
            )
        if parameter.annotation is parameter.empty:
            raise ToolDefinitionError(
                tool, f"parameter {name!r} has no annotation; write its type, such as {name}: str"
            )
        if isinstance(parameter.default, FieldInfo):
            value = "" if parameter.default.is_required() else f" = {short_repr(parameter.default.get_default())}"
            raise ToolDefinitionError(
                tool,
                f"the default of parameter {name!r} is a pydantic Field, which the function would get where a call "
                f"leaves {name} out; write it into the annotation, {name}: Annotated[the type, Field(...)]{value}",
            )
        names.append(name)
    return names


def _arguments_model(tool: str, function: Callable[..., Any], names: list[str]) -> type[BaseModel]:
    from pydantic import ConfigDict, Field, create_model
    from pydantic.errors import PydanticUserError

    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError) as error:
        raise ToolDefinitionError(tool, f"its annotations cannot be read: {describe_exception(error)}") from error
    parameters = inspect.signature(function).parameters
    fields: dict[str, Any] = {}
    for index, name in enumerate(names):
        default = parameters[name].default
        has_default = default is not inspect.Parameter.empty
        fields[_field(index)] = (_described(hints[name]), Field(default if has_default else ..., alias=name))
    try:
        model: type[BaseModel] = create_model(
            tool, __config__=ConfigDict(extra="forbid", arbitrary_types_allowed=False), **fields
        )
    except (PydanticUserError, TypeError) as error:
        reason = f"pydantic cannot read an annotation: {describe_exception(error).splitlines()[0]}"
        raise ToolDefinitionError(tool, reason) from error
    for index, name in enumerate(names):
        _check_field(tool, parameters[name], model.model_fields.get(_field(index)))
    return model


def _check_field(tool: str, parameter: inspect.Parameter, field: FieldInfo | None) -> None:
    """Refuse a parameter that a call cannot pass, or that it may leave out in the schema alone."""
    name = parameter.name
    if field is None:  # ClassVar; Final with a default
        annotation = inspect.formatannotation(parameter.annotation)
        reason = (
            f"parameter {name!r} is annotated {annotation}, which is not a type of an argument; write the type alone"
        )
        raise ToolDefinitionError(tool, reason)
    if parameter.default is parameter.empty and not field.is_required():
        reason = f"the Field of parameter {name!r} has a default, and the function has none; write it in the function,"
        raise ToolDefinitionError(tool, f"{reason} {name}: Annotated[the type, Field(...)] = the default")


def _described(annotation: Any) -> Any:
    """The annotation with a text in `Annotated` as its description."""
    from pydantic import Field

    if typing.get_origin(annotation) is not typing.Annotated:
        return annotation
    kind, *metadata = typing.get_args(annotation)
    for each in metadata:
        # Annotations are evaluated one by one, so that each keeps its place among the constraints.
        kind = typing.Annotated[kind, Field(description=each) if isinstance(each, str) else each]
    return kind


def _schema(tool: str, model: type[BaseModel]) -> dict[str, Any]:
    from pydantic.errors import PydanticUserError
    from pydantic.json_schema import GenerateJsonSchema

    class Untitled(GenerateJsonSchema):
        """Without the titles that pydantic makes of names, which repeat the names in every prompt."""

        def field_title_should_be_set(self, schema: Any) -> bool:
            return False

        def literal_schema(self, schema: Any) -> dict[str, Any]:
            _refuse_plain_members(tool, schema["expected"])
            return super().literal_schema(schema)

    try:
        schema = model.model_json_schema(by_alias=True, schema_generator=Untitled)
    except PydanticUserError as error:
        reason = f"an annotation has no JSON schema: {describe_exception(error).splitlines()[0]}"
        raise ToolDefinitionError(tool, reason) from error
    definitions = schema.pop("$defs", {})
    for definition in (schema, *definitions.values()):
        definition.pop("title", None)
    return {"type": "object", "properties": {}, **_inlined(tool, schema, definitions)}


def _refuse_plain_members(tool: str, literals: Sequence[Any]) -> None:
    """Refuse what pydantic describes by its value and accepts from Python alone. Raises `ToolDefinitionError`."""
    for each in literals:
        if isinstance(each, Enum) and not isinstance(each, str | int):
            kind = type(each).__name__
            raise ToolDefinitionError(
                tool,
                f"a Literal has the member {each!r}, which JSON cannot hold; write Literal[{each.value!r}], the whole "
                f"enum {kind}, or make {kind} a StrEnum or IntEnum",
            )


def _inlined(tool: str, schema: Any, definitions: Mapping[str, Any], within: tuple[str, ...] = ()) -> Any:
    """The schema with definitions in place of references: the templates of many models do not print definitions.

    `within` are the names of the definitions around `schema`.
    """
    if isinstance(schema, list):
        return [_inlined(tool, each, definitions, within) for each in schema]
    if not isinstance(schema, dict):
        return schema
    rest = {key: _inlined(tool, value, definitions, within) for key, value in schema.items() if key != "$ref"}
    rest = _nullable(rest)
    reference = schema.get("$ref")
    if not isinstance(reference, str):
        return rest
    name = reference.removeprefix("#/$defs/")
    if name in within:
        raise ToolDefinitionError(
            tool, f"the type {name} contains itself; chat templates cannot print such a schema, so pass text"
        )
    return {**_inlined(tool, definitions[name], definitions, (*within, name)), **rest}


def _nullable(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of `X | None` as that of X with `nullable`, the form that `transformers` makes and templates print."""
    alternatives = schema.get("anyOf", ())
    others = [each for each in alternatives if each != {"type": "null"}]
    if len(alternatives) != 2 or len(others) != 1:
        return schema
    rest = {key: value for key, value in schema.items() if key != "anyOf"}
    return {**others[0], **rest, "nullable": True}
