"""Types of arguments that a syntax prints without quotes: from the tool's schema, else from the text."""

from typing import Any

import pytest
from tool_call_texts import INVALID_JSON, OK, parse_single

from renderers import ToolCallParseStatus


def typed(value: str, schema: Any, name: str = "glm-4.5") -> tuple[Any, ToolCallParseStatus]:
    tools = [
        {
            "name": "f",
            "parameters": {"type": "object", "properties": {"a": schema}, "$defs": {"T": {"type": "integer"}}},
        }
    ]
    text = {
        "glm-4.5": f"<tool_call>f<arg_key>a</arg_key><arg_value>{value}</arg_value></tool_call>",
        "qwen3.5": f"<tool_call>\n<function=f>\n<parameter=a>\n{value}\n</parameter>\n</function>\n</tool_call>",
    }[name]
    call = parse_single(name, text, tools=None if schema is None else tools)
    assert call.arguments is not None
    return call.arguments["a"], call.status


@pytest.mark.parametrize(
    ("value", "schema", "expected"),
    [
        ("12", {"type": "string"}, "12"),
        ('"x"', {"type": "string"}, '"x"'),
        ("  x\n", {"type": "string"}, "  x\n"),
        ("12", {"type": "integer"}, 12),
        ("1e3", {"type": "number"}, 1000.0),
        ('{"b":1}', {"type": "object"}, {"b": 1}),
        ("null", {"type": "null"}, None),
        ("null", {"type": ["string", "null"]}, None),
        ("null", {"type": "string", "nullable": True}, None),
        ("12", {"anyOf": [{"type": "integer"}, {"type": "string"}]}, 12),
        ("true", {"anyOf": [{"type": "boolean"}, {"type": "string"}]}, True),
        ("1", {"enum": ["1", "2"]}, "1"),
        ("1", {"enum": [1, 2]}, 1),
        ("x", {"const": "x"}, "x"),
        ("7", {"$ref": "#/$defs/T"}, 7),
        ("7", {"$ref": "#/nowhere"}, 7),
        ("[1]", {"items": {"type": "integer"}}, [1]),
        ('{"a": 1}', {"properties": {}}, {"a": 1}),
        ("x", {"anyOf": [{}, {"type": "null"}]}, "x"),
        ("null", {"anyOf": [{}, {"type": "null"}]}, None),
        ("x", {"anyOf": [{"$ref": "#/nowhere"}, {"type": "null"}]}, "x"),
        ("x", {"nullable": True}, "x"),
        ("7", {"allOf": [{"$ref": "#/$defs/T"}, {"minimum": 1}]}, 7),
        ("null", {"oneOf": [{"$ref": "#/properties/a"}, {"type": "null"}]}, None),
    ],
)
def test_the_declared_type_determines_the_value(value: str, schema: Any, expected: Any) -> None:
    found, status = typed(value, schema)
    assert (found, type(found), status) == (expected, type(expected), OK)


@pytest.mark.parametrize(
    ("value", "schema"),
    [("x", {"type": "integer"}), ('"5"', {"type": "integer"}), ("{", {"type": "object"}), ("", {"type": "null"})],
)
def test_a_value_of_another_type_than_declared_is_invalid_and_kept_as_text(value: str, schema: Any) -> None:
    assert typed(value, schema) == (value, INVALID_JSON)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("12", 12),
        ("null", None),
        ('{"a": [1, null]}', {"a": [1, None]}),
        # No template prints these for anything but the text itself.
        ('{"a":1}', '{"a":1}'),
        ("012", "012"),
        ("1e3", "1e3"),
        ('"x"', '"x"'),
        ("NaN", "NaN"),
        ("x", "x"),
        ("", ""),
    ],
)
@pytest.mark.parametrize("schema", [None, {}])
def test_without_a_declared_type_a_value_is_the_one_whose_printed_form_is_the_text(
    value: str, expected: Any, schema: Any
) -> None:
    assert typed(value, schema) == (expected, OK)


def test_a_schema_that_refers_to_itself_is_read() -> None:
    loop = {"$ref": "#/properties/a"}
    assert typed("1", loop) == (1, OK)


def test_a_schema_with_a_long_chain_of_references_is_read() -> None:
    definitions = {str(number): {"$ref": f"#/properties/a/$defs/{number + 1}"} for number in range(5_000)}
    assert typed("1", {"$ref": "#/properties/a/$defs/0", "$defs": definitions}) == (1, OK)
