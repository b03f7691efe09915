"""Reads sampled values that are literals of Python or of Gemma's tool calls; no text exhausts the stack."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from renderers.parsing.json_text import MAX_DEPTH, finite_float, parse_json, require
from renderers.parsing.markers import MarkerEncoding

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
        require(depth <= MAX_DEPTH)
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
        require(name in CONSTANTS)
        return CONSTANTS[str(name)]

    def mapping(self, separator: str, closing: str, depth: int = 0) -> dict[str, Any]:
        """Keys and values up to `closing`; the opening bracket was read before."""
        found: dict[str, Any] = {}
        for _ in self._entries(closing):
            key = self._key()
            require(key not in found and self.accept(separator))
            found[key] = self.value(depth + 1)
        return found

    def _entries(self, closing: str) -> Iterator[None]:
        """Stops before each entry up to `closing`; there is a comma between two entries."""
        self._ended_by_comma = False
        while not self.accept(closing):
            yield
            self._ended_by_comma = self.accept(",")
            if not self._ended_by_comma:
                require(self.accept(closing))
                return

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
            require(not text.lstrip("+-").isdecimal())  # an int with more digits than Python parses
        return finite_float(text)

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
        require(not 0xD800 <= number < 0xE000 and number <= 0x10FFFF)  # half of a surrogate pair; beyond Unicode
        return chr(number)
    if found[5] is not None:
        return _ESCAPED.get(found[5], found[5])
    require(found[6] != "N{")  # a character by its name
    return "" if found[6] is None else found.group()  # a continued line, or an escape that Python leaves unchanged
