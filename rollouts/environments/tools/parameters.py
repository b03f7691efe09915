"""The parameters of a function: their JSON schema, and the arguments of a model as their types."""

from __future__ import annotations

import inspect
import json
import typing
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

from rollouts.errors import RolloutsError, describe_exception, short_repr, validation_errors

if TYPE_CHECKING:
    from pydantic import TypeAdapter
from rollouts.environments.tools.errors import ToolArgumentsError

#: A model is told this many of the problems of its arguments, each with at most this many characters.
_MAX_PROBLEMS = 10
_MAX_PROBLEM_CHARACTERS = 300

#: The parameters of a function or of the function of a method, by (name of the tool, whether it is a method).
#: To build them takes a millisecond, and the tools of an episode are often methods of an object that is made
#: for the episode.
_CACHE: WeakKeyDictionary[Any, dict[tuple[str, bool], FunctionParameters]] = WeakKeyDictionary()


def function_parameters(tool: str, function: Callable[..., Any]) -> FunctionParameters:
    """The parameters of a function or method, which are found once. Raises `RolloutsError`."""
    is_method = inspect.ismethod(function)
    found = _CACHE.setdefault(getattr(function, "__func__", function), {})
    key = (tool, is_method)
    if key not in found:
        found[key] = FunctionParameters(tool, function)
    return found[key]


class FunctionParameters:
    """The parameters of a function: their JSON schema, and the conversion of a model's arguments to their types.

    Every parameter needs an annotation that pydantic knows, and a name (no `*args`, `**kwargs` or
    positional-only ones). Text in `Annotated[int, "the number of days"]` is a parameter's description; a
    `Field` there, or as the default, may have constraints, a description, a default, and an alias, which the
    model gets as the name. Raises `RolloutsError`.
    """

    def __init__(self, tool: str, function: Callable[..., Any]) -> None:
        self._tool = tool
        self._names = _parameter_names(tool, function)
        self._arguments = _arguments(tool, function, self._names)
        self.schema = _schema(tool, self._arguments)

    def checked(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments as annotated, with defaults. Raises `ToolArgumentsError` naming each wrong one."""
        from pydantic import ValidationError

        try:
            return self._validated(dict(arguments))
        except ValidationError as error:
            errors = validation_errors(error)
            problems = [self._problem(each) for each in errors[:_MAX_PROBLEMS]]
            if len(errors) > _MAX_PROBLEMS:  # a list of a thousand wrong items has a thousand
                problems.append(f"{len(errors) - _MAX_PROBLEMS} more problems")
            raise ToolArgumentsError(self._tool, problems) from error

    def _validated(self, arguments: dict[str, Any]) -> dict[str, Any]:
        # As JSON, which the model wrote: there a date is a text for a strict type too.
        try:
            text = json.dumps(arguments, ensure_ascii=False).encode()
        except RecursionError as error:
            raise ToolArgumentsError(self._tool, ["the arguments are nested too deeply"]) from error
        except (TypeError, ValueError):  # JSON cannot hold them: half of a surrogate pair, an object of a caller
            return self._arguments.validate_python(arguments)
        return self._arguments.validate_json(text)

    def _problem(self, error: Any) -> str:
        place = ".".join(map(str, error["loc"]))
        if not place:  # pydantic reads 200 levels
            problem = f"the arguments cannot be read: {error['msg']}"
        elif error["type"] == "unexpected_keyword_argument" and len(error["loc"]) == 1:
            problem = f"there is no argument {place!r}; the arguments are {', '.join(self._names) or 'none'}"
        elif error["type"].startswith("missing"):
            problem = f"{place} is missing"
        else:
            problem = f"{place}: {error['msg']}, not {short_repr(error['input'])}"
        # The name of an argument, or the tag of a union, may be any text of the model.
        is_long = len(problem) > _MAX_PROBLEM_CHARACTERS
        return f"{problem[: _MAX_PROBLEM_CHARACTERS - 3]}..." if is_long else problem


def _parameter_names(tool: str, function: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(function).parameters
    for name, parameter in parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            kind = "positional-only" if parameter.kind is parameter.POSITIONAL_ONLY else "variable"
            problem = f"is {kind}; a model passes arguments by name, so give each its own parameter"
        elif parameter.annotation is parameter.empty:
            problem = f"has no annotation; write its type, such as {name}: str"
        else:
            continue
        raise RolloutsError(f"tool {tool!r}: parameter {name!r} {problem}")
    return list(parameters)


def _arguments(tool: str, function: Callable[..., Any], names: list[str]) -> TypeAdapter[dict[str, Any]]:
    """Reads the arguments of the function: a dict of values of the annotated types, defaults included."""
    from pydantic import ConfigDict, TypeAdapter
    from pydantic.errors import PydanticUserError

    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError) as error:
        raise RolloutsError(f"tool {tool!r}: its annotations cannot be read: {describe_exception(error)}") from error
    signature = inspect.signature(function)

    def arguments(**values: Any) -> dict[str, Any]:
        return values

    arguments.__signature__ = signature  # type: ignore[attr-defined]
    arguments.__annotations__ = {name: _described(hints[name]) for name in names}
    try:
        # The configuration is that of dataclasses among the annotations, too. The schema has no
        # `AliasChoices`: the model gets the name of such a parameter.
        return TypeAdapter(cast(Any, arguments), config=ConfigDict(extra="forbid", validate_by_name=True))
    except (PydanticUserError, TypeError) as error:
        reason = f"pydantic cannot read an annotation: {describe_exception(error).splitlines()[0]}"
        raise RolloutsError(f"tool {tool!r}: {reason}") from error


def _described(annotation: Any) -> Any:
    """The annotation of a parameter with a text in `Annotated` as its description."""
    from pydantic import Field

    kind, *metadata = typing.get_args(annotation) if typing.get_origin(annotation) is typing.Annotated else [annotation]
    for each in metadata:
        # Annotations are evaluated one by one, so that each keeps its place among the constraints.
        kind = typing.Annotated[kind, Field(description=each) if isinstance(each, str) else each]
    return kind


def _schema(tool: str, arguments: TypeAdapter[dict[str, Any]]) -> dict[str, Any]:
    from pydantic.errors import PydanticUserError
    from pydantic.json_schema import GenerateJsonSchema

    class Untitled(GenerateJsonSchema):
        """Without the titles that pydantic makes of names, which repeat the names in every prompt."""

        def field_title_should_be_set(self, schema: Any) -> bool:
            return False

    try:
        schema = arguments.json_schema(schema_generator=Untitled)
    except PydanticUserError as error:
        reason = f"an annotation has no JSON schema: {describe_exception(error).splitlines()[0]}"
        raise RolloutsError(f"tool {tool!r}: {reason}") from error
    definitions = schema.pop("$defs", {})
    for definition in (schema, *definitions.values()):
        definition.pop("title", None)
    return {"type": "object", "properties": {}, **_inlined(tool, schema, definitions)}


def _inlined(tool: str, schema: Any, definitions: Mapping[str, Any], within: tuple[str, ...] = ()) -> Any:
    """The schema with definitions in place of references; `within` are the names around `schema`."""
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
        raise RolloutsError(
            f"tool {tool!r}: the type {name} contains itself; chat templates cannot print such a schema, so pass text"
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
