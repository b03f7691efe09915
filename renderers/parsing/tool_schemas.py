"""The schemas of the offered tools: which names are known, and what a sampled argument without quotes means by them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from renderers.parsing.json_text import InvalidJsonError, parse_json

_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "object": (dict,),
    "array": (list,),
    "null": (type(None),),
}
_ANY = "any type"
_PYTHON_CONSTANTS = {"True": True, "False": False, "None": None}


class ToolSchemas:
    """The schemas of the offered tools. With `tools` None, or without `checks_names`, every name is known."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] | None, *, checks_names: bool = True) -> None:
        self._checks_names = checks_names
        self._parameters: dict[str, Any] | None = None
        if tools is not None:
            functions = [_mapping(tool.get("function", tool)) for tool in tools]
            self._parameters = {str(function.get("name")): function.get("parameters") for function in functions}

    def knows(self, name: str) -> bool:
        return self._parameters is None or not self._checks_names or name in self._parameters

    def offers(self, name: str) -> bool:
        """Whether a list of tools was given that has this one."""
        return self._parameters is not None and name in self._parameters

    def of_arguments(self, name: str) -> Schema:
        """The schema of the arguments of a tool; an empty one if the tool is unknown."""
        parameters = _mapping((self._parameters or {}).get(name))
        return Schema(parameters, parameters)


class Schema:
    """One JSON schema; its references point into `root`."""

    def __init__(self, definition: Any, root: Mapping[str, Any]) -> None:
        self._definition = _mapping(definition)
        self._root = root

    def property(self, name: str) -> Schema:
        """The schema of one property."""
        for branch in self._branches():
            properties = _mapping(branch.get("properties"))
            if name in properties:
                return Schema(properties[name], self._root)
        extra = next((b["additionalProperties"] for b in self._branches() if "additionalProperties" in b), None)
        return Schema(extra, self._root)

    def item(self) -> Schema:
        """The schema of the items of an array."""
        return Schema(next((b["items"] for b in self._branches() if "items" in b), None), self._root)

    def allows(self, kind: str) -> bool:
        """Whether the schema names the JSON type `kind`."""
        return kind in self._types()

    def is_string(self) -> bool:
        """Whether the schema allows nothing but strings."""
        return self._types() == {"string"}

    def _types(self) -> set[str]:
        """The JSON types that the schema allows; empty where it allows any."""
        types = self._types_in(self._definition, set())
        return set() if _ANY in types else types

    def _types_in(self, schema: Mapping[str, Any], seen: set[int]) -> set[str]:
        if not schema or len(seen) == 100:  # a schema of a client may be endless in effect
            return {_ANY}
        if id(schema) in seen:  # a schema may refer to itself, and that adds no type
            return set()
        seen.add(id(schema))
        named = schema.get("type")
        types = {kind for kind in (named if isinstance(named, list) else [named]) if isinstance(kind, str)}
        if named is None:
            values = [schema["const"]] if "const" in schema else schema.get("enum")
            types.update(map(_type_of, values if isinstance(values, list) else ()))
            types.update({"object"} if "properties" in schema else (), {"array"} if "items" in schema else ())
        if not types:
            # An alternative of any type allows any type, but a part of `allOf` without one takes nothing away.
            parts = [self._types_in(part, seen) for part in self._required_parts(schema)]
            choices = [_schemas(schema, "anyOf"), _schemas(schema, "oneOf")]
            parts += [set().union(*(self._types_in(part, seen) for part in choice)) for choice in choices]
            types = set().union(*(part for part in parts if _ANY not in part)) or {_ANY}
        return types | {"null"} if schema.get("nullable") is True else types

    def _branches(self) -> Iterator[Mapping[str, Any]]:
        """The schema and the alternatives within it, references followed; each once."""
        waiting, seen = [self._definition], 0
        while waiting and seen < 100:  # a schema may refer to itself
            branch = waiting.pop(0)
            seen += 1
            yield branch
            waiting += self._required_parts(branch) + _schemas(branch, "anyOf") + _schemas(branch, "oneOf")

    def _required_parts(self, schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        reference = schema.get("$ref")
        return ([self._referenced(reference)] if isinstance(reference, str) else []) + _schemas(schema, "allOf")

    def _referenced(self, reference: str) -> Mapping[str, Any]:
        """The schema at a pointer into `root` (`#/...`); `{}`, which allows all, if there is none."""
        place: Any = self._root
        if not reference.startswith("#/"):
            return {}
        for step in reference[2:].split("/"):
            place = _mapping(place).get(step.replace("~1", "/").replace("~0", "~"))
        return _mapping(place)

    def parse_value(self, text: str, *, python_constants: bool = False) -> Any:
        """The value of an argument that is written without quotes: strings as they are, everything else as JSON.

        The declared types decide. `python_constants` accepts True, False and None, which templates print that use
        Python's `str`. Without a declared type the value is the one whose printed form is exactly this text: JSON with
        the spaces of `json.dumps`, or else the text itself. Raises `InvalidJsonError` if the text has no declared type.
        """
        types = self._types()
        if self.is_string():
            return text
        stripped = text.strip()
        if python_constants and stripped in _PYTHON_CONSTANTS:
            value = _PYTHON_CONSTANTS[stripped]
            if not types or self.allows(_type_of(value)):
                return value
        if not types:
            return _read_undeclared(text)
        try:
            value = parse_json(stripped)
        except InvalidJsonError:
            if "string" in types:
                return text
            raise
        if isinstance(value, str) and "string" not in types:
            raise InvalidJsonError("a string, which is not declared")
        fits = any(isinstance(value, _JSON_TYPES.get(kind, ())) for kind in types - {"string"})
        if isinstance(value, bool) and "boolean" not in types:
            fits = False
        return text if "string" in types and not fits else value


def _read_undeclared(text: str) -> Any:
    try:
        value = parse_json(text)
        printed = json.dumps(value, ensure_ascii=False)
    except (InvalidJsonError, RecursionError):
        return text
    if isinstance(value, str) or value != value or value in (float("inf"), float("-inf")):
        return text  # a string is printed without quotes, and NaN and infinity are not JSON
    return value if printed == text else text


def _type_of(value: Any) -> str:
    if isinstance(value, str):
        return "string"
    return next((kind for kind, types in _JSON_TYPES.items() if isinstance(value, types)), "string")


def _schemas(schema: Mapping[str, Any], keyword: str) -> list[Mapping[str, Any]]:
    parts = schema.get(keyword)
    return [_mapping(part) for part in parts] if isinstance(parts, list) else []


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
