"""Kimi K2.5's tool declarations in TypeScript, compared with texts written by hand."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from printed_text import copied

from renderers.formats.kimi_prompts import (
    TypeScriptToolTemplate,
    reads_typescript,
    tool_variables,
    typescript_declarations,
)
from renderers.template.chat_template import ChatTemplate
from renderers.template.traced import Origin
from tests.renderers.corpus import TOOLS, user

Tools = list[dict[str, Any]] | None


def function(name: str = "f", parameters: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters or {}, **more}}


def declared(parameters: dict[str, Any]) -> str:
    """What stands between the parentheses and whatever precedes the type."""
    text = str(typescript_declarations([function("f", parameters)]))
    head, tail = "# Tools\n\n## functions\nnamespace functions {\n", ") => any;\n}\n"
    assert text.startswith(head)
    assert text.endswith(tail)
    return text.removeprefix(head).removesuffix(tail).replace("type f = (_: ", "", 1)


def property_of(schema: Any) -> str:
    return declared({"type": "object", "properties": {"x": schema}, "required": ["x"]})


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "integer"}, "  x: number"),
        (False, "  x: null"),
        ({"type": ["string", "null", "array", "object"]}, "  x: string | null | Array<any> | {}"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "  x: string | null"),
        ({"enum": ["a", 1, 1.5, True, None]}, '  x: "a" | 1 | 1.5 | True | None'),
        ({"type": ["string", "null"], "enum": ["a", None]}, '  x: "a" | None'),
        ({"type": "array", "items": {"type": "integer"}}, "  x: Array<number>"),
        (
            {"type": "array", "maxItems": 2, "minItems": 1, "items": {"type": "string", "description": "d"}},
            "  // maxItems: 2, minItems: 1\n  x: Array<\n    // d\n    string\n  >",
        ),
        (
            {"type": "string", "pattern": "^a$", "minLength": 1, "maxLength": 3},
            "  // maxLength: 3, minLength: 1, pattern: ^a$\n  x: string",
        ),
        ({"type": "string", "description": "one\n\ntwo"}, "  // one\n\n  // two\n  x: string"),
        ({"type": "string", "default": "ü"}, '  // Default: "ü"\n  x: string'),
        ({"type": "object", "default": {"b": None, "a": 1}}, '  // Default: {"a": 1, "b": null}\n  x: {}'),
        ({"type": "object", "additionalProperties": False}, "  x: {\n    [k: string]: never\n  }"),
    ],
)
def test_kimi_writes_a_schema_as_a_type(schema: Any, expected: str) -> None:
    assert property_of(schema) == f"{{\n{expected}\n}}"


def test_kimi_names_definitions_as_interfaces_in_front() -> None:
    parameters = {
        "properties": {"x": {"$ref": "#/$defs/Node"}},
        "$defs": {"Node": {"type": "object", "description": "A node", "properties": {"n": {"$ref": "#/$defs/Node"}}}},
    }
    assert declared(parameters) == "// A node\ninterface Node {\n  n?: Node\n}\n{\n  x?: Node\n}"


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": []},
        {"description": "no type"},
        {"$ref": "#/$defs/Missing"},
        {"type": ["string", "date"]},
        {"type": "string", "enum": [1]},
        {"type": "string", "description": 5},
        {"anyOf": None},
        None,
    ],
)
def test_kimi_refuses_a_schema_it_cannot_express_and_the_template_then_prints_json(schema: Any) -> None:
    tools = [function(), function("g", {"type": "object", "properties": {"x": schema}})]
    with pytest.raises(NotImplementedError):
        typescript_declarations(tools)
    assert tool_variables(tools) == {"tools": tools}


_KIMI_LIKE = """{%- if tools -%}<|im_system|>tool_declare<|im_middle|>
{%- if tools_ts_str -%}{{ tools_ts_str }}{%- else -%}{{ tools | tojson }}{%- endif -%}<|im_end|>{%- endif -%}
{%- for m in messages -%}{{ m.content }}{%- endfor -%}"""


def test_a_template_prints_the_declaration_with_its_provenance() -> None:
    template = TypeScriptToolTemplate(ChatTemplate(_KIMI_LIKE, model="kimi"))
    assert reads_typescript(template.source)
    printed = template.print([user("q")], tools=TOOLS)
    assert printed.text == f"<|im_system|>tool_declare<|im_middle|>{typescript_declarations(TOOLS)}<|im_end|>q"
    assert copied(printed)[Origin(-1, "tools[1].function.description")] == "Run a command"
    assert template.print([user("q")]).text == "q"


@settings(max_examples=100, deadline=None)
@given(description=st.text(max_size=30), name=st.text(min_size=1, max_size=8))
def test_kimi_content_of_tools_is_never_the_formats_own_text(description: str, name: str) -> None:
    tools = [
        function(name, {"properties": {name: {"type": "string", "description": description}}}, description=description)
    ]
    text = typescript_declarations(tools)
    is_content = [False] * len(text)
    for start, end, _ in text.spans:
        is_content[start:end] = [True] * (end - start)
    own = [character for character, content in zip(text, is_content, strict=True) if not content]
    assert set(own) <= set("# Tools\n\n## functions\nnamespace functions {\n// type = (_: {\n?: string}) => any;\n}\n")


def test_kimi_names_a_schema_that_refers_to_itself() -> None:
    assert declared({"properties": {"x": {"$ref": "#"}}}) == "interface parameters {\n  x?: parameters\n}\nparameters"
