"""Reads sampled values: JSON, and the literals of Python and of Gemma's tool calls.

No text exhausts the stack, and every value is Unicode.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from renderers.errors import RendererError
from renderers.parsing.markers import MarkerEncoding

# Templates and JSON writers recurse, and a policy can sample more brackets than their stack allows.
MAX_DEPTH = 64

_DECODER = json.JSONDecoder()
_JSON_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_SPACE = re.compile(r"\s*")
_NUMBER = re.compile(r"[-+]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_NAME = re.compile(r"[^\W\d][\w.\-]*")
_ESCAPE = re.compile(
    r"\\(?:\r?\n|x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([0-7]{1,3})|([\\'\"abfnrtv])|(N\{|.))",
    re.DOTALL,
)
_ESCAPED = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}

CONSTANTS: Mapping[str, Any] = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}


class InvalidJsonError(RendererError, ValueError):
    """The text is not JSON, or its value cannot be written as JSON again.

    Cure: none here: the parser keeps the text of the tool call, with a status that says what is wrong.
    """


def _object_of_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key comes twice")
    return found


def _reject_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _finite_float(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError("a number that is too large")
    return value


_STRICT_DECODER = json.JSONDecoder(
    object_pairs_hook=_object_of_pairs, parse_float=_finite_float, parse_constant=_reject_constant
)


def parse_json(text: str) -> Any:
    """The value of a JSON text with white space around it.

    Raises `InvalidJsonError`, also for a key that comes twice, of which one value would be lost, and for NaN and
    infinity.
    """
    try:
        value = _STRICT_DECODER.decode(text)
        if "\\u" in text:
            # A lone surrogate cannot be encoded, so no template or message could contain the value.
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise InvalidJsonError(str(error)) from error
    return value


def end_of_json(text: str, start: int) -> int | None:
    """The end of the JSON value that begins at `start`; None if there is none."""
    try:
        return _DECODER.raw_decode(text, start)[1]
    except (ValueError, RecursionError):
        return None


def is_deeper_than(value: Any, levels: int) -> bool:
    """Whether containers are nested more than `levels` deep. It goes level by level and never exhausts the stack."""
    layer = [value]
    for _ in range(levels):
        layer = [
            inner
            for item in layer
            if isinstance(item, (dict, list))
            for inner in (item.values() if isinstance(item, dict) else item)
        ]
        if not layer:
            return False
    return any(isinstance(item, (dict, list)) for item in layer)


@dataclass(frozen=True, slots=True)
class Language:
    """`string` matches one string, its text in group 1 or 2; `keys` matches a key without quotes.

    `json_strings`: strings as JSON writes them are read, too; they are not canonical.
    """

    string: re.Pattern[str]
    escapes: bool
    keys: re.Pattern[str] | None = None
    json_strings: bool = False


PYTHON = Language(re.compile(r"'((?:[^'\\]|\\.)*)'|\"((?:[^\"\\]|\\.)*)\"", re.DOTALL), escapes=True)


class LiteralReader:
    """Reads values of an encoded text; `position` is where the next one begins, `canonical` is False once a string of
    JSON was read in another language.
    """

    def __init__(self, text: str, start: int, end: int, language: Language, encoding: MarkerEncoding) -> None:
        self.text, self.position, self.end = text, start, end
        self.canonical = True
        self._ended_by_comma = False  # whether a comma was the last thing before the closing bracket just read
        self._language, self._encoding = language, encoding

    def accept(self, expected: str) -> bool:
        """Whether `expected` comes next, after optional white space; if so, move behind it."""
        self.skip_space()
        if not self.text.startswith(expected, self.position, self.end):
            return False
        self.position += len(expected)
        return True

    def at_end(self) -> bool:
        """Whether only white space is left."""
        self.skip_space()
        return self.position == self.end

    def skip_space(self) -> None:
        found = _SPACE.match(self.text, self.position, self.end)
        self.position = self.position if found is None else found.end()

    def name(self) -> str | None:
        """The name that comes next, dots and hyphens included, or None."""
        self.skip_space()
        return self._match(_NAME)

    def value(self, depth: int = 0) -> Any:
        """The value that comes next. Raises `ValueError`."""
        if depth > MAX_DEPTH:
            raise ValueError("nested too deeply")
        for opening, closing in ("[]", "()"):
            if self.accept(opening):
                items = [self.value(depth + 1) for _ in self._entries(closing)]
                return items[0] if closing == ")" and len(items) == 1 and not self._ended_by_comma else items
        if self.accept("{"):
            return self.mapping(":", "}", depth)
        text = self._string()
        if text is not None:
            return text
        number = self._match(_NUMBER)
        if number is not None:
            return self._number(number)
        name = self.name()
        if name is not None and name in CONSTANTS:
            return CONSTANTS[name]
        raise ValueError(f"no value at character {self.position}")

    def mapping(self, separator: str, closing: str, depth: int = 0) -> dict[str, Any]:
        """Keys and values up to `closing`; the opening bracket was read before."""
        found: dict[str, Any] = {}
        for _ in self._entries(closing):
            key = self._key()
            if key in found or not self.accept(separator):
                raise ValueError(f"no value for {key!r}")
            found[key] = self.value(depth + 1)
        return found

    def _entries(self, closing: str) -> Iterator[None]:
        """Stops before each entry up to `closing`; there is a comma between two entries."""
        self._ended_by_comma = False
        while not self.accept(closing):
            yield
            self._ended_by_comma = self.accept(",")
            if not self._ended_by_comma:
                if self.accept(closing):
                    return
                raise ValueError(f"neither , nor {closing} at character {self.position}")

    def _key(self) -> str:
        self.skip_space()
        key = self._string()
        if key is None:
            key = self.name() if self._language.keys is None else self._match(self._language.keys)
        if key is None:
            raise ValueError(f"no key at character {self.position}")
        return self._encoding.decode(key)

    def _string(self) -> str | None:
        found = self._language.string.match(self.text, self.position, self.end)
        if found is None:
            quoted = self._match(_JSON_STRING) if self._language.json_strings else None
            return None if quoted is None else self._json_string(quoted)
        self.position = found.end()
        text = self._encoding.decode(next(group for group in found.groups() if group is not None))
        return _ESCAPE.sub(_unescaped, text) if self._language.escapes and "\\" in text else text

    def _json_string(self, text: str) -> str:
        self.canonical = False
        value = parse_json(self._encoding.decode(text))
        assert isinstance(value, str)
        return value

    def _number(self, text: str) -> int | float:
        try:
            return int(text)
        except ValueError:
            if text.lstrip("+-").isdecimal():  # an int with more digits than Python parses
                raise ValueError("a number with too many digits") from None
        return _finite_float(text)

    def _match(self, pattern: re.Pattern[str]) -> str | None:
        found = pattern.match(self.text, self.position, self.end)
        if found is None:
            return None
        self.position = found.end()
        return found.group()


def _unescaped(found: re.Match[str]) -> str:
    code, octal = found[1] or found[2] or found[3], found[4]
    if code is not None or octal is not None:
        number = int(octal, 8) if code is None else int(code, 16)
        if 0xD800 <= number < 0xE000 or number > 0x10FFFF:
            raise ValueError("a lone surrogate, or a number beyond Unicode")
        return chr(number)
    if found[5] is not None:
        return _ESCAPED.get(found[5], found[5])
    if found[6] == "N{":
        raise ValueError("a character by its name")
    return "" if found[6] is None else found.group()  # a continued line, or an escape that Python leaves unchanged


_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "object": (dict,),
    "array": (list,),
    "null": (type(None),),
}
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
        found: set[str] = set()
        for branch in self._branches():
            named = branch.get("type")
            found.update(kind for kind in ([named] if isinstance(named, str) else named or ()) if isinstance(kind, str))
            if branch.get("nullable") is True:
                found.add("null")
            values = [branch["const"]] if "const" in branch else branch.get("enum")
            if named is None and isinstance(values, list):
                found.update(_type_of(value) for value in values)
            if named is None and "properties" in branch:
                found.add("object")
            if named is None and "items" in branch:
                found.add("array")
        return found

    def _branches(self) -> Iterator[Mapping[str, Any]]:
        """The schema and the alternatives within it, references followed; each once."""
        waiting, seen = [self._definition], 0
        while waiting and seen < 100:  # a schema may refer to itself
            branch = waiting.pop(0)
            seen += 1
            yield branch
            reference = branch.get("$ref")
            if isinstance(reference, str):
                waiting.append(self._resolve(reference))
            for keyword in ("anyOf", "oneOf", "allOf"):
                if isinstance(branch.get(keyword), list):
                    waiting += map(_mapping, branch[keyword])

    def _resolve(self, reference: str) -> Mapping[str, Any]:
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


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
