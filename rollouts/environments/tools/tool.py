"""A tool: a function, its schema made of its types, its errors."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import typing
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

from renderers import ToolSpec
from rollouts.calls import call_on_thread
from rollouts.errors import ArgumentError, RolloutsError, describe_exception, short_repr
from rollouts.values import check_positive

if TYPE_CHECKING:
    from pydantic import TypeAdapter


class ToolArgumentsError(RolloutsError):
    """The arguments of a call do not fit the tool. The model gets the text. `problems`: one for each wrong argument.

    Cure: none is needed: the model receives the text, and may call the tool again.
    """

    def __init__(self, tool: str, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        super().__init__(f"invalid arguments for {tool}: {'; '.join(problems)}")


class ToolFailedError(RolloutsError):
    """A tool could not do what it was called for. A tool raises this error; the model gets `reason` alone.

    Cure: none is needed: the model receives the reason, and may do something else.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


class ToolUnavailableError(RolloutsError):
    """A tool cannot be called at all, whatever the arguments: its server has ended, for example. The episode fails.

    Cure: start what the tool needs again (of an MCP server: check its command or URL, and read its log); the episode
    can be repeated.
    """


class ToolResultError(RolloutsError):
    """A tool returned a value that cannot be part of a message. The episode fails: the tool has a defect.

    Cure: let the tool return texts, JSON values, images (uint8 arrays, PIL images), sounds (`{"array": samples,
    "sampling_rate": 16000}`), or lists of them.
    """

    def __init__(self, tool: str, reason: str) -> None:
        super().__init__(f"tool {tool!r} {reason}")


#: A model is told this many of the problems of its arguments, each with at most this many characters.
_MAX_PROBLEMS = 10
_MAX_PROBLEM_CHARACTERS = 300

#: The parameters of a function or of the function of a method, by (name of the tool, whether it is a method). To build
#: them takes a millisecond, and the tools of an episode are often methods of an object that is made for the episode.
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

    Every parameter needs an annotation that pydantic knows, and a name (no `*args`, `**kwargs` or positional-only
    ones). Text in `Annotated[int, "the number of days"]` is a parameter's description; a `Field` there has constraints
    and descriptions too. Raises `RolloutsError`.
    """

    def __init__(self, tool: str, function: Callable[..., Any]) -> None:
        self._tool = tool
        self._names = _parameter_names(tool, function)
        self._arguments = _arguments(tool, function, self._names)
        self.schema = _schema(tool, self._arguments)

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
        return {name: value for name, value in values.items() if name in arguments}

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
            return f"the arguments cannot be read: {error['msg']}"
        if error["type"] == "unexpected_keyword_argument" and len(error["loc"]) == 1:
            return f"there is no argument {place!r}; the arguments are {', '.join(self._names) or 'none'}"
        if error["type"].startswith("missing"):
            return f"{place} is missing"
        return f"{place}: {error['msg']}, not {short_repr(error['input'])}"


def _shortened(problem: str) -> str:
    """A problem within the limit: the name of an argument, or the tag of a union, may be any text of the model."""
    is_long = len(problem) > _MAX_PROBLEM_CHARACTERS
    return f"{problem[: _MAX_PROBLEM_CHARACTERS - 3]}..." if is_long else problem


def _parameter_names(tool: str, function: Callable[..., Any]) -> list[str]:
    from pydantic.fields import FieldInfo

    names = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            kind = "positional-only" if parameter.kind is parameter.POSITIONAL_ONLY else "variable"
            raise RolloutsError(
                f"tool {tool!r}: parameter {name!r} is {kind}; a model passes arguments by name, so give each "
                "its own parameter"
            )
        if parameter.annotation is parameter.empty:
            raise RolloutsError(
                f"tool {tool!r}: parameter {name!r} has no annotation; write its type, such as {name}: str"
            )
        if isinstance(parameter.default, FieldInfo):
            value = "" if parameter.default.is_required() else f" = {short_repr(parameter.default.get_default())}"
            raise RolloutsError(
                f"tool {tool!r}: the default of parameter {name!r} is a pydantic Field, which the function "
                f"would get where a call leaves {name} out; write it into the annotation, {name}: "
                f"Annotated[the type, Field(...)]{value}"
            )
        names.append(name)
    return names


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
    arguments.__annotations__ = {name: _described(tool, signature.parameters[name], hints[name]) for name in names}
    try:
        # The configuration is that of dataclasses among the annotations.
        return TypeAdapter(cast(Any, arguments), config=ConfigDict(extra="forbid"))
    except (PydanticUserError, TypeError) as error:
        reason = f"pydantic cannot read an annotation: {describe_exception(error).splitlines()[0]}"
        raise RolloutsError(f"tool {tool!r}: {reason}") from error


def _described(tool: str, parameter: inspect.Parameter, annotation: Any) -> Any:
    """The annotation of a parameter with a text in `Annotated` as its description.

    Raises `RolloutsError` for what is no type, and for a name or a default that the function does not have.
    """
    from pydantic import Field
    from pydantic.fields import FieldInfo

    name = parameter.name
    kind, *metadata = typing.get_args(annotation) if typing.get_origin(annotation) is typing.Annotated else [annotation]
    if (typing.get_origin(kind) or kind) in (typing.ClassVar, typing.Final):
        raise RolloutsError(
            f"tool {tool!r}: parameter {name!r} is annotated {inspect.formatannotation(parameter.annotation)}, which "
            "is not a type of an argument; write the type alone"
        )
    for each in metadata:
        aliases = [each.alias, each.validation_alias] if isinstance(each, FieldInfo) else []
        if found := [alias for alias in aliases if alias not in (None, name)]:
            reason = f"the Field of parameter {name!r} has the alias {found[0]!r}; give the parameter this name"
            raise RolloutsError(f"tool {tool!r}: {reason}")
        if isinstance(each, FieldInfo) and not each.is_required() and parameter.default is parameter.empty:
            reason = f"the Field of parameter {name!r} has a default, and the function has none; write it in the"
            raise RolloutsError(
                f"tool {tool!r}: {reason} function, {name}: Annotated[the type, Field(...)] = the default"
            )
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


# A tool: what the model is told of it, and the function that is called.


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool of a `ToolEnvironment`. `from_function` makes one of a typed function.

    `parameters` is the JSON schema of an object. `call(arguments)`, `async` or not, runs on the event loop. It gets
    what the model wrote, checks it and returns the result: text, an image, a sound, a list of these, or anything that
    JSON can hold (`tool_content`). It raises `ToolArgumentsError` for arguments that do not fit, and `ToolFailedError`,
    or anything else, where it fails; the model gets the text of the error. A call that has not ended after
    `timeout_seconds` is cancelled and the model is told; None: the limit of the environment.

    Tools of other origins (MCP servers) are made with the constructor. Raises `ArgumentError` for wrong fields.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    call: Callable[[dict[str, Any]], Awaitable[Any] | Any]
    timeout_seconds: float | None = None

    def __post_init__(self) -> None:
        for field, is_valid, rule in (
            ("name", isinstance(self.name, str) and self.name, "the name of the tool, text that is not empty"),
            ("description", isinstance(self.description, str), "text"),
            ("parameters", isinstance(self.parameters, Mapping), "a JSON schema, a dict"),
            ("call", callable(self.call), "a function of the arguments"),
        ):
            if not is_valid:
                raise ArgumentError(field, getattr(self, field), f"pass {rule}, for tool {self.name!r:.80}")
        if self.timeout_seconds is not None:
            rule = f"pass a number above 0 or None for tool {self.name!r}"
            check_positive("timeout_seconds", self.timeout_seconds, rule)

    @property
    def spec(self) -> ToolSpec:
        """The tool as OpenAI's function calling describes it."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}

    @classmethod
    def from_function(
        cls,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        description: str | None = None,
        timeout_seconds: float | None = None,
    ) -> Tool:
        """A tool that calls `function` with the model's arguments, checked and converted to the annotated types.

            def crop(left: Annotated[int, "in pixels"], size: Literal["small", "large"] = "small") -> Image.Image:
                "Crop the image."

        Every parameter is annotated; defaults, enums, `Literal`, `None`, nested pydantic models and dataclasses become
        parts of the schema. A text or a pydantic `Field` in `Annotated` describes a parameter. The name of the tool
        is that of the function, the description its docstring, unless they are given. An `async` function runs on the
        event loop, any other on one of 256 threads. The time of a call begins when the function does: waiting for a
        thread does not count. A call on a thread that timed out runs to its end.

        Raises `RolloutsError` for a function that cannot be called with named, typed arguments.
        """
        if not (inspect.isfunction(function) or inspect.ismethod(function)):
            rule = "is not a function or method; write `def`, or make a Tool of its name, schema and call"
            raise RolloutsError(f"tool {name or short_repr(function)!r}: {rule}")
        name = name or function.__name__
        if inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
            raise RolloutsError(f"tool {name!r}: is a generator; return a list of the results instead of yielding them")
        schema = function_parameters(name, function).schema
        text = description if description is not None else inspect.getdoc(function) or ""
        return cls(name, text, schema, FunctionCall(name, function), timeout_seconds)


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """Calls a function with the arguments of a model. It can be pickled if the function can."""

    tool: str
    function: Callable[..., Any]

    async def __call__(self, arguments: dict[str, Any]) -> Any:
        return await self.call(arguments)

    async def call(self, arguments: dict[str, Any], on_begin: Callable[[float], object] | None = None) -> Any:
        """Call the function. `on_begin` gets the event loop's time at which it begins: it may wait for a thread."""
        function = self.function
        checked = function_parameters(self.tool, function).checked(arguments)
        if inspect.iscoroutinefunction(function):
            if on_begin is not None:
                on_begin(asyncio.get_running_loop().time())
            return await function(**checked)
        result = await call_on_thread(functools.partial(function, **checked), on_begin=on_begin)
        return await result if inspect.isawaitable(result) else result
