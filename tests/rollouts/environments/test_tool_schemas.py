"""The JSON schema that a model gets of a typed function, and how its arguments are checked."""

import asyncio
import dataclasses
import datetime
import enum
import functools
import json
import pickle
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from renderers.messages import check_tools
from rollouts.environments import Tool
from rollouts.environments.tools import ToolArgumentsError
from rollouts.errors import RolloutsError


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.StrEnum):
    LOW = "low"


class Point(BaseModel):
    """A point of the image."""

    x: int
    y: Annotated[float, Field(gt=0)] = 1.0


@dataclasses.dataclass
class Box:
    corner: Point
    size: int


def look(
    point: Point,
    copy: Annotated[int, "how many", Field(ge=1)],
    colour: Colour = Colour.RED,
    size: Literal["small", "large"] = "small",
    note: str | None = None,
    boxes: list[Box] | None = None,
) -> str:
    """Look at a point.

    The point must be in the image.
    """
    return repr((point, copy, colour, size, note, boxes))


def test_the_schema_has_types_descriptions_defaults_enums_and_nested_types_in_place():
    point = {
        "description": "A point of the image.",
        "type": "object",
        "properties": {
            "x": {"type": "integer"},
            "y": {"type": "number", "exclusiveMinimum": 0, "default": 1.0},
        },
        "required": ["x"],
    }
    box = {
        "type": "object",
        "properties": {"corner": point, "size": {"type": "integer"}},
        "required": ["corner", "size"],
        "additionalProperties": False,
    }
    tool = Tool.from_function(look)
    assert tool.spec == {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look at a point.\n\nThe point must be in the image.",
            "parameters": {
                "type": "object",
                "properties": {
                    "point": point,
                    "copy": {"type": "integer", "minimum": 1, "description": "how many"},
                    "colour": {"type": "string", "enum": ["red", "blue"], "default": "red"},
                    "size": {"type": "string", "enum": ["small", "large"], "default": "small"},
                    "note": {"type": "string", "nullable": True, "default": None},
                    "boxes": {"type": "array", "items": box, "nullable": True, "default": None},
                },
                "required": ["point", "copy"],
                "additionalProperties": False,
            },
        },
    }
    check_tools([tool.spec])
    assert json.loads(json.dumps(tool.spec)) == tool.spec


def called(function, arguments):
    return asyncio.run(Tool.from_function(function).call(arguments))


class StrictBox(BaseModel):
    model_config = ConfigDict(strict=True)

    made: datetime.date
    colour: Colour
    corners: tuple[int, int] = (0, 0)


def test_arguments_that_fit_the_schema_are_accepted_by_strict_types_and_literals():
    def show(
        box: StrictBox, when: Annotated[datetime.date, Field(strict=True)], level: Literal[Level.LOW, "all"]
    ) -> str:
        return repr((box, when, level))

    arguments = {
        "box": {"made": "2030-01-02", "colour": "red", "corners": [1, 2]},
        "when": "2030-01-03",
        "level": "low",
    }
    box = StrictBox(made=datetime.date(2030, 1, 2), colour=Colour.RED, corners=(1, 2))
    assert called(show, arguments) == repr((box, datetime.date(2030, 1, 3), Level.LOW))


def anything(value: Any, number: int = 0) -> Any:
    return value


@pytest.mark.parametrize("value", ["\ud800", {"\ud800": 1}, float("inf"), 2**70, 10**5000, Colour.RED], ids=type)
def test_an_argument_that_json_may_not_hold_arrives_as_it_is(value):
    assert called(anything, {"value": value}) == value
    with pytest.raises(ToolArgumentsError, match="number: Input should be a valid integer"):
        called(anything, {"value": value, "number": "x"})


@pytest.mark.parametrize("depth", [300, 100_000])
def test_arguments_that_are_nested_too_deeply_are_refused(depth):
    value = []
    for _ in range(depth):
        value = [value]
    with pytest.raises(ToolArgumentsError, match=r"the arguments (cannot be read: .*recursion limit|are nested too)"):
        called(anything, {"value": value})


# Names that a pydantic model or Python has for itself.
@pytest.mark.parametrize("name", ["schema", "json", "copy", "model_config", "model_fields", "self_", "_private", "cls"])
def test_a_parameter_may_have_any_name(name):
    namespace = {}
    exec(f"def echo({name}: int) -> int:\n    return {name}", namespace)
    assert called(namespace["echo"], {name: 5}) == 5
    with pytest.raises(ToolArgumentsError, match=f"{name} is missing"):
        called(namespace["echo"], {})


def numbers(values: list[int]) -> None: ...


def test_a_thousand_wrong_arguments_are_a_short_text():
    with pytest.raises(ToolArgumentsError) as caught:
        called(numbers, {"values": ["x"] * 1000})
    assert len(caught.value.problems) == 11
    assert caught.value.problems[0].startswith("values.0: Input should be a valid integer")
    assert caught.value.problems[-1] == "990 more problems"
    with pytest.raises(ToolArgumentsError) as caught:
        called(numbers, {"values": [], "x" * 100_000: 1})
    (problem,) = caught.value.problems
    assert problem.startswith("there is no argument 'xxx")
    assert len(problem) == 300


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
LOOK = Tool.from_function(look)


@pytest.mark.slow
@settings(max_examples=50)
@given(st.dictionaries(st.sampled_from(["point", "copy", "size", "note", "boxes", "q"]) | st.text(), json_values))
def test_any_arguments_are_taken_or_refused_with_problems(arguments):
    async def call():
        try:
            return await LOOK.call(arguments)
        except ToolArgumentsError as error:
            return error.problems

    assert asyncio.run(call())


def untyped(a) -> None: ...


def variable(*values: int) -> None: ...


def unknown(a: "Missing") -> None: ...  # noqa: F821


def in_field(
    first: int = Field(gt=1),
    second: Annotated[int, Field(5, gt=1)] = 6,
    third: int = Field(7, gt=1),
    fourth: Annotated[int, Field(alias="number")] = 8,
    fifth: Annotated[int, Field(validation_alias=AliasChoices("count", "amount"))] = 9,
) -> Any:
    return first, second, third, fourth, fifth


def test_defaults_and_aliases_in_a_field_are_those_of_the_parameter():
    schema = Tool.from_function(in_field).parameters
    assert schema["required"] == ["first"]
    assert list(schema["properties"]) == ["first", "second", "third", "number", "fifth"]
    assert called(in_field, {"first": 2}) == (2, 6, 7, 8, 9)
    assert called(in_field, {"first": 2, "third": 3, "number": 4, "fifth": 5}) == (2, 6, 3, 4, 5)
    with pytest.raises(ToolArgumentsError, match="first is missing"):
        called(in_field, {"number": 4})


class Opaque: ...


def opaque(a: Opaque) -> None: ...


def generator(n: int):
    yield n


class Tree(BaseModel):
    children: list["Tree"] = []


def recursive(tree: Tree) -> None: ...


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (untyped, "'untyped': parameter 'a' has no annotation"),
        (variable, "parameter 'values' is variable"),
        (unknown, "its annotations cannot be read: NameError: name 'Missing' is not defined"),
        (opaque, "pydantic cannot read an annotation"),
        (recursive, "the type Tree contains itself"),
        (generator, "'generator': is a generator; return a list"),
        (functools.partial(look, copy=1), "is not a function or method"),
    ],
    ids=lambda value: getattr(value, "__name__", None) or type(value).__name__,
)
def test_a_function_that_cannot_be_a_tool_is_refused_with_the_reason(function, message):
    with pytest.raises(RolloutsError, match=message):
        Tool.from_function(function)


def test_a_tool_made_of_a_function_of_a_module_can_be_pickled():
    tool = Tool.from_function(doubled, timeout_seconds=3)
    again = pickle.loads(pickle.dumps(tool))
    assert again == tool
    assert asyncio.run(again.call({"number": "4"})) == 8


def doubled(number: int) -> int:
    """Double a number."""
    return 2 * number
