"""A tool: what the model is told of it, and the function that is called."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from renderers import ToolSpec
from rollouts.calls import call_on_thread
from rollouts.environments.tools.parameters import function_parameters
from rollouts.errors import RolloutsError, short_repr
from rollouts.values import check_positive


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool of a `ToolEnvironment`. `from_function` makes one of a typed function.

    `parameters` is the JSON schema of an object. `call(arguments)`, `async` or not, runs on the event loop.
    It gets what the model wrote, checks it and returns the result: text, an image, a sound, a list of these,
    or anything that JSON can hold (`tool_content`). It raises `ToolArgumentsError` for arguments that do not
    fit, and `ToolFailedError`, or anything else, where it fails; the model gets the text of the error. A call
    that has not ended after `timeout_seconds` is cancelled and the model is told; None: the limit of the
    environment.

    Tools of other origins (MCP servers) are made with the constructor. Raises `ArgumentError` for wrong
    fields.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    call: Callable[[dict[str, Any]], Awaitable[Any] | Any]
    timeout_seconds: float | None = None

    def __post_init__(self) -> None:
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

        Every parameter is annotated; defaults, enums, `Literal`, `None`, nested pydantic models and
        dataclasses become parts of the schema. A text or a pydantic `Field` in `Annotated` describes a
        parameter. The name of the tool is that of the function, the description its docstring, unless they
        are given. An `async` function runs on the event loop, any other on one of 256 threads. The time of a
        call begins when the function does: waiting for a thread does not count. A call on a thread that timed
        out runs to its end.

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

    async def __call__(self, arguments: dict[str, Any], on_begin: Callable[[float], object] | None = None) -> Any:
        """Call the function. `on_begin` gets the event loop's time at which it begins: it may wait for a thread."""
        function = self.function
        checked = function_parameters(self.tool, function).checked(arguments)
        if inspect.iscoroutinefunction(function):
            if on_begin is not None:
                on_begin(asyncio.get_running_loop().time())
            return await function(**checked)
        result = await call_on_thread(functools.partial(function, **checked), on_begin=on_begin)
        return await result if inspect.isawaitable(result) else result
