"""The line of each key of a TOML document, which `tomllib` does not report."""

from __future__ import annotations

import re
import tomllib
from bisect import bisect_right

#: From the top of the document: names of keys, and numbers of array elements from 0.
KeyPath = tuple[str | int, ...]

_SPACES = re.compile(r"[ \t]*")
_BLANK = re.compile(r"(?:[ \t\n]|#[^\n]*)*")
_BARE_KEY = re.compile(r"[^\s.=\]]+")
_BASIC_STRING = re.compile(r'"(?:[^"\\\n]|\\.)*"')
_LITERAL_STRING = re.compile(r"'[^'\n]*'")
_LONG_BASIC_STRING = re.compile(r'"""(?:[^"\\]|\\.|"(?!""))*"{3,5}', re.DOTALL)
_LONG_LITERAL_STRING = re.compile(r"'''(?:[^']|'(?!''))*'{3,5}", re.DOTALL)
_OTHER_VALUE = re.compile(r"[^,\]}#\n]*")  # numbers, booleans, dates


def key_lines(text: str) -> dict[KeyPath, int]:
    """The line (from 1) on which each key, table and array element of a document begins.

    `text` is a document that `tomllib` accepts; other texts have undefined results.
    """
    scanner = _Scanner(text.replace("\r\n", "\n"))
    scanner.scan_document()
    return scanner.lines


class _Scanner:
    def __init__(self, text: str) -> None:
        self._text = text
        self._position = 0
        self._line_starts = [0, *(match.end() for match in re.finditer("\n", text))]
        self._table_counts: dict[KeyPath, int] = {}  # of the arrays that `[[name]]` headers make
        self.lines: dict[KeyPath, int] = {}

    def scan_document(self) -> None:
        table: KeyPath = ()
        self._skip(_BLANK)
        while self._position < len(self._text):
            if self._text.startswith("[", self._position):
                table = self._scan_header()
            else:
                self._scan_pair(table)
            self._skip(_BLANK)

    def _scan_header(self) -> KeyPath:
        """The path of the table that a header opens."""
        line = self._line()
        is_array = self._text.startswith("[[", self._position)
        self._position += 1 + is_array
        names = self._scan_key()
        self._position += 1 + is_array
        path: KeyPath = ()
        for number, name in enumerate(names):
            path = (*path, name)
            self.lines.setdefault(path, line)
            if is_array and number == len(names) - 1:
                self._table_counts[path] = self._table_counts.get(path, 0) + 1
            if path in self._table_counts:
                path = (*path, self._table_counts[path] - 1)
                self.lines.setdefault(path, line)
        return path

    def _scan_pair(self, table: KeyPath) -> None:
        """Scan `key = value`."""
        line = self._line()
        path = table
        for name in self._scan_key():
            path = (*path, name)
            self.lines.setdefault(path, line)
        self._position += 1
        self._skip(_SPACES)
        self._scan_value(path)

    def _scan_key(self) -> list[str]:
        """The names of a dotted key; the position afterwards is that of the `=` or `]` after it."""
        names: list[str] = []
        while True:
            self._skip(_SPACES)
            quote = self._text[self._position]
            if quote in "\"'":
                quoted = self._take(_BASIC_STRING if quote == '"' else _LITERAL_STRING)
                names.extend(tomllib.loads(f"{quoted} = 0"))
            else:
                names.append(self._take(_BARE_KEY))
            self._skip(_SPACES)
            if not self._text.startswith(".", self._position):
                return names
            self._position += 1

    def _scan_value(self, path: KeyPath) -> None:
        begins_with = self._text.startswith
        if begins_with("[", self._position):
            self._scan_array(path)
        elif begins_with("{", self._position):
            self._scan_inline_table(path)
        elif begins_with('"""', self._position):
            self._skip(_LONG_BASIC_STRING)
        elif begins_with("'''", self._position):
            self._skip(_LONG_LITERAL_STRING)
        elif begins_with('"', self._position):
            self._skip(_BASIC_STRING)
        elif begins_with("'", self._position):
            self._skip(_LITERAL_STRING)
        else:
            self._skip(_OTHER_VALUE)

    def _scan_array(self, path: KeyPath) -> None:
        self._position += 1
        self._skip(_BLANK)
        index = 0
        while not self._text.startswith("]", self._position):
            self.lines[*path, index] = self._line()
            self._scan_value((*path, index))
            index += 1
            self._skip_comma()
        self._position += 1

    def _scan_inline_table(self, path: KeyPath) -> None:
        self._position += 1
        self._skip(_BLANK)
        while not self._text.startswith("}", self._position):
            self._scan_pair(path)
            self._skip_comma()
        self._position += 1

    def _skip_comma(self) -> None:
        self._skip(_BLANK)
        if self._text.startswith(",", self._position):
            self._position += 1
            self._skip(_BLANK)

    def _skip(self, pattern: re.Pattern[str]) -> None:
        self._take(pattern)

    def _take(self, pattern: re.Pattern[str]) -> str:
        """The text that matches at the position, which moves behind it."""
        match = pattern.match(self._text, self._position)
        assert match is not None, f"not TOML at character {self._position}"
        self._position = match.end()
        return match.group()

    def _line(self) -> int:
        return bisect_right(self._line_starts, self._position)
