"""Declares tools in TypeScript, as the tokenizer code of Kimi K2.5 and K2.6 does for the chat template.

    # Tools

    ## functions
    namespace functions {
    // Weather of a place
    type get_weather = (_: {
      // Name of the city
      city: string,
      days?: number
    }) => any;
    }

The Jinja chat template of these models reads the text from the variable `tools_ts_str`; without it, the tools are
printed as JSON, on which the models were not trained. `tokenization_kimi.py` sorts the keys of the tools, makes the
text (`tool_declaration_ts.py`, which this module follows) and passes both to the template. `tool_variables` does the
same, and `TypeScriptToolTemplate` wraps such a chat template.

Sources: the two files as copied in other libraries (tinker-cookbook has the second, unchanged). Where that code fails
on a schema, the tokenizer falls back to JSON, and so does `tool_variables`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from renderers.errors import TemplateLimitError
from renderers.template.chat_template import NESTED_TOO_DEEPLY, ChatTemplate, Messages, Printed, Tools
from renderers.template.traced import TracedStr, traced_join, traced_text
from renderers.template.traced_input import traced_value
from renderers.template.traced_json import traced_json

_VARIABLE = "tools_ts_str"
_INDENT = "  "
# Schema keys that are printed in a comment, by the type of the schema.
_COMMENTED_LIMITS: Mapping[str, tuple[str, ...]] = {
    "string": ("maxLength", "minLength", "pattern"),
    "number": ("maximum", "minimum"),
    "integer": ("maximum", "minimum"),
    "array": ("maxItems", "minItems"),
}
# Types inside a list of types. A single type is printed as it is, except "integer".
_UNION_NAMES: Mapping[str, str] = {
    "string": "string",
    "number": "number",
    "integer": "number",
    "boolean": "boolean",
    "null": "null",
    "object": "{}",
    "array": "Array<any>",
}
_ENUM_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
}


def reads_typescript(template_source: str) -> bool:
    """Whether a chat template prints tools from the variable that `tool_variables` provides."""
    return _VARIABLE in template_source


def tool_variables(tools: Tools | None) -> dict[str, Any]:
    """Variables for such a template: `tools`, keys sorted, and `tools_ts_str` where it can be made."""
    if not tools:
        return {"tools": tools}
    variables: dict[str, Any] = {"tools": [_sorted_keys(tool) for tool in tools]}
    try:
        variables[_VARIABLE] = typescript_declarations(tools)
    except NotImplementedError:
        return variables  # as in the tokenizer: the template then prints the tools as JSON
    return variables


def typescript_declarations(tools: Tools) -> TracedStr:
    """The namespace that declares `tools`; empty if none is a function.

    Names, descriptions and values are content of `Origin(-1, "tools[i]...")`, everything else is the format's own text.
    Raises `NotImplementedError` for a schema that the format cannot express (`oneOf`, no `type`...).
    """
    declared = [
        _Declaration().function(traced_value(_sorted_keys(tool["function"]), -1, f"tools[{index}].function"))
        for index, tool in enumerate(tools)
        if tool.get("type") == "function" and tool.get("function")
    ]
    if not declared:
        return TracedStr()
    pieces = ("# Tools\n\n## functions\nnamespace functions {\n", traced_join("\n", declared), "\n}\n")
    text = traced_join("", pieces)
    return text if isinstance(text, TracedStr) else TracedStr(text)


def _sorted_keys(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _sorted_keys(item) for key, item in sorted(value.items())}
    if isinstance(value, list):
        return [_sorted_keys(item) for item in value]
    return value


class TypeScriptToolTemplate:
    """A chat template whose tools are declared in TypeScript; prints like the template that it wraps."""

    def __init__(self, template: ChatTemplate) -> None:
        self.source = template.source
        self._template = template

    def print(
        self, messages: Messages, *, tools: Tools | None = None, add_generation_prompt: bool = False, **variables: Any
    ) -> Printed:
        """Print a conversation, whose tools are declared in TypeScript. Raises as `ChatTemplate.print`."""
        try:
            declared = {**variables, **tool_variables(tools)}
        except RecursionError as error:
            raise TemplateLimitError(NESTED_TOO_DEEPLY, model=self._template.model) from error
        return self._template.print(messages, add_generation_prompt=add_generation_prompt, **declared)


#: A property of an object: whether it is optional, its name, and its line or lines, comment included.
_Member = tuple[bool, str, str]


class _Declaration:
    """Declares one function and collects the interfaces that its schema defines and refers to.

    A schema is read in the order of its keys; a reference can only point to a definition that was read before.
    """

    def __init__(self) -> None:
        self._definitions: dict[str, Any] = {}
        self._refers_to_root = False

    def function(self, function: Any) -> str:
        """Interfaces, description and type of one function, each on lines of its own."""
        function = _object(function)
        members, rest = self._members(_object(function.get("parameters") or {}), "")
        is_root_named = self._refers_to_root
        lines: list[str] = []
        if is_root_named:
            fields = traced_join(",\n", [text for _, _, text in members])
            lines.append(traced_join("", ("interface parameters {", *(("\n", fields, "\n") if fields else ()), "}")))
        # Definitions inside definitions may be referenced, but get no interface.
        lines += [self._interface(name, schema) for name, schema in list(self._definitions.items())]
        if function.get("description"):
            lines.append(self._comment_lines(function["description"], ""))
        parameters = "parameters" if is_root_named else _braced(members, rest, "")
        lines.append(traced_join("", ("type ", function.get("name", "function"), " = (_: ", parameters, ") => any;")))
        return traced_join("\n", lines)

    def _interface(self, name: str, schema: Any) -> str:
        text = traced_join("", ("interface ", name, " ", self._type(schema, "")))
        description = _object(schema).get("description")
        return traced_join("\n", (self._comment_lines(description, ""), text)) if description else text

    def _type(self, schema: Any, indent: str) -> str:
        """The type of a schema; `indent` is that of the line on which it begins."""
        if isinstance(schema, bool):
            return "any" if schema else "null"
        schema = _object(schema)
        if "$ref" in schema:
            return self._reference(schema["$ref"])
        if "anyOf" in schema:
            return traced_join(" | ", [self._type(one, indent) for one in _list(schema["anyOf"])])
        if "enum" in schema:
            return self._enum(schema)
        if "type" not in schema:
            _require(not schema)
            return "any"
        kind = schema["type"]
        if isinstance(kind, list):
            return self._union(kind)
        if kind == "object":
            return _braced(*self._members(schema, indent), indent)
        if kind == "array":
            return self._array(schema, indent)
        return "number" if kind == "integer" else traced_text(kind)

    def _members(self, schema: Mapping[str, Any], indent: str) -> tuple[list[_Member], str | None]:
        """The properties of an object schema in order, and the type of any other property, if any."""
        inner = indent + _INDENT
        if schema.get("$defs"):
            self._definitions.update(_object(schema["$defs"]))
        rest: Any = schema.get("additionalProperties")
        if isinstance(rest, bool):
            rest = "any" if rest else "never"
        elif rest is not None:
            rest = self._type(rest, inner)
        required = _list(schema.get("required", []))
        properties = _object(schema.get("properties", {}))
        return [self._member(name, prop, name not in required, inner) for name, prop in properties.items()], rest

    def _member(self, name: str, schema: Any, optional: bool, indent: str) -> _Member:
        pieces = [*self._comment(schema, indent)]
        default = schema.get("default") if isinstance(schema, Mapping) else None
        if default is not None:
            # Python's form of numbers and booleans (`True`), JSON for other values.
            text = repr(default) if isinstance(default, (int, float)) else traced_json(default)
            pieces += [indent, "// Default: ", text, "\n"]
        pieces += [indent, name, "?: " if optional else ": ", self._type(schema, indent)]
        return optional, name, traced_join("", pieces)

    def _array(self, schema: Mapping[str, Any], indent: str) -> str:
        items = schema.get("items")
        if not items:
            return "Array<any>"
        inner = indent + _INDENT
        comment = self._comment(items, inner)
        if not comment:
            return traced_join("", ("Array<", self._type(items, indent), ">"))
        return traced_join("", ("Array<\n", *comment, inner, self._type(items, inner), "\n", indent, ">"))

    def _enum(self, schema: Mapping[str, Any]) -> str:
        values = _list(schema["enum"])
        if "type" in schema:
            self._check_enum(values, schema["type"])
        pieces = [traced_join("", ('"', one, '"')) if isinstance(one, str) else traced_text(one) for one in values]
        return traced_join(" | ", pieces)

    def _check_enum(self, values: Sequence[Any], kind: Any) -> None:
        if isinstance(kind, list):
            named = [one for one in kind if one != "null"]
            _require(len(kind) <= 2 and len(named) <= 1)
            kind = named[0] if named else "null"
        allowed = _ENUM_TYPES.get(kind) if isinstance(kind, str) else None
        _require(allowed is None or all(value is None or isinstance(value, allowed) for value in values))

    def _union(self, kinds: Sequence[Any]) -> str:
        _require(all(isinstance(kind, str) and kind in _UNION_NAMES for kind in kinds))
        return " | ".join(_UNION_NAMES[kind] for kind in kinds)

    def _reference(self, target: Any) -> str:
        if target == "#":
            self._refers_to_root = True
            return "parameters"
        _require(isinstance(target, str) and target.startswith("#/$defs/"))
        name = target.split("/")[-1]
        _object(self._definitions.get(name))
        return str(name)

    # Comments.

    def _comment(self, schema: Any, indent: str) -> list[str]:
        """The description of a schema and its limits, as complete lines; empty without both."""
        if not isinstance(schema, Mapping):
            return []
        pieces: list[str] = []
        if schema.get("description"):
            pieces += [self._comment_lines(schema["description"], indent), "\n"]
        kind = None if schema.keys() & {"$ref", "anyOf", "enum"} else schema.get("type")
        keys = _COMMENTED_LIMITS.get(kind, ()) if isinstance(kind, str) else ()
        limits = [traced_join("", (key, ": ", traced_text(schema[key]))) for key in keys if key in schema]
        if limits:
            pieces += [indent, "// ", traced_join(", ", limits), "\n"]
        return pieces

    def _comment_lines(self, description: Any, indent: str) -> str:
        _require(isinstance(description, str))
        return traced_join(
            "\n", [traced_join("", (indent, "// ", line)) if line else "" for line in description.split("\n")]
        )


def _require(is_expressible: bool) -> None:
    if not is_expressible:
        raise NotImplementedError


def _object(value: Any) -> Mapping[str, Any]:
    _require(isinstance(value, Mapping))
    found: Mapping[str, Any] = value
    return found


def _list(value: Any) -> list[Any]:
    _require(isinstance(value, list))
    found: list[Any] = value
    return found


def _braced(members: Sequence[_Member], rest: str | None, indent: str) -> str:
    """An object type, required properties first, each group by name."""
    lines = [text for _, _, text in sorted(members)]
    if rest is not None:
        lines.append(traced_join("", (indent, _INDENT, "[k: string]: ", rest)))
    return traced_join("", ("{\n", traced_join(",\n", lines), "\n", indent, "}")) if lines else "{}"
