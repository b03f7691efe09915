"""Where values of arguments begin and end in a block of calls: a delimiter inside a value is text of it."""

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple, TypeAlias

_NEVER = r"(?!)"
#: How often text is read again by one of the `readings` because a value, or what seemed one, has lost its end. Behind
#: the last of them, delimiters count wherever they are, so that the work is proportional to the length of the text.
MAX_REREADS = 16


class Value(NamedTuple):
    """One way in which a syntax writes values: patterns, without groups, of an encoded text.

    `skipped` is text that is not the end although it looks like it (an escaped quote). A value in which
    `broken` comes before `end` has lost its end, so that the delimiters behind `begin` count. `holds_json`:
    the value may be a JSON object or list, in whose strings nothing ends it.
    """

    begin: str
    end: str
    skipped: str = _NEVER
    broken: str = _NEVER
    holds_json: bool = False


#: Ways to read values, of which each is the kinds of values that it knows.
Readings: TypeAlias = tuple[tuple[Value, ...], ...]
JSON_STRING = Value('"', '"', skipped=r"\\.")
PYTHON_STRINGS = (JSON_STRING, Value("'", "'", skipped=r"\\."))


@lru_cache(maxsize=64)
def readings(values: tuple[Value, ...]) -> Readings:
    """The ways to read values: with JSON objects and lists where they may be, and without.

    In the results, `holds_json` says that the value is JSON, whose strings are `skipped`.
    """
    plain = tuple(value._replace(holds_json=False) for value in values)
    string = r'"(?:[^"\\]|\\.?)*+(?:"|\Z)'
    json_values = tuple(
        value._replace(begin=rf"{value.begin}(?=\s*[{{\[])", skipped=string) for value in values if value.holds_json
    )
    return ((*json_values, *plain), plain) if json_values else (plain,)


@lru_cache(maxsize=256)
def _delimited(values: tuple[Value, ...], delimiters: str) -> tuple[re.Pattern[str], list[re.Pattern[str]]]:
    """A pattern that finds the begin of a value or one of `delimiters` (group 1), and one of each whole value.

    That of a value matches up to its end (group 1), up to what tells that it has none, or up to the end of the text.
    """
    begin = "|".join([*(f"(?:{value.begin})" for value in values), f"({delimiters})"])
    whole = [f"(?:{v.begin})(?:{v.skipped}|(?!{v.end}|{v.broken}).)*+({v.end})?" for v in values]
    return re.compile(begin, re.DOTALL), [re.compile(pattern, re.DOTALL) for pattern in whole]


class DelimiterSearch:
    """Finds those of `delimiters` that are not inside a value. Behind a value without its end, all count.

    `rereads` counts such values, and, by the caller, texts up to a delimiter that were read in vain.
    """

    def __init__(self, values: tuple[Value, ...], delimiters: str) -> None:
        self._begin, self._kinds = _delimited(values, delimiters)
        self.rereads = 0

    def finditer(self, text: str, start: int, end: int) -> Iterator[re.Match[str]]:
        """The delimiters in `text[start:end]`, from left to right."""
        while (found := self._begin.search(text, start, end)) is not None:
            start = found.end()
            if found[1] is not None:
                yield found
                continue
            for kind in self._kinds if self.rereads < MAX_REREADS else ():
                whole = kind.match(text, found.start(), end)
                if whole is not None and whole[1] is not None:
                    start = whole.end()
                    break
                self.rereads += whole is not None


class _Scan:
    """Tells of a text that is still growing whether it ends inside a value.

    `stray` is what stands in no well-formed text outside of values. Behind it, and behind a value that has
    lost its end, nothing is inside a value.
    """

    def __init__(self, values: tuple[Value, ...], stray: str) -> None:
        self._begin, self._ends = _compiled(values, stray)
        self._open: list[re.Pattern[str]] = []  # the end of the value that is open, and of the JSON string in it
        self._is_broken = False

    def ends_inside(self, text: str) -> bool:
        """Whether the text ends inside a value once this piece, which cuts no tag in two, has come."""
        position = 0
        while not self._is_broken:
            found = (self._open[-1] if self._open else self._begin).search(text, position)
            if found is None:
                return bool(self._open)
            position = found.end()
            if not self._open:
                self._is_broken = found.lastindex is None
                self._open = [] if self._is_broken else [self._ends[found.lastindex or 0]]
                continue
            match found.lastgroup:
                case "broken":
                    self._is_broken = True
                case "string":
                    self._open.append(_END_OF_STRING)
                case None:
                    self._open.pop()
        return False


_END_OF_STRING = re.compile(r'(?P<skipped>\\.)|"', re.DOTALL)


@lru_cache(maxsize=64)
def _compiled(values: tuple[Value, ...], stray: str) -> tuple[re.Pattern[str], dict[int, re.Pattern[str]]]:
    begin = re.compile("|".join([*(f"({value.begin})" for value in values), f"(?:{stray})"]), re.DOTALL)
    ends: dict[int, re.Pattern[str]] = {}
    for number, value in enumerate(values, start=1):
        other = '(?P<string>")' if value.holds_json else f"(?P<skipped>{value.skipped})"
        ends[number] = re.compile(f"{other}|(?P<broken>{value.broken})|(?:{value.end})", re.DOTALL)
    return begin, ends


class OpenBlock:
    """A block of calls that has not ended: its text, from position `at` on, and the markers that may be its text.

    `passed` is the length of the text if the first marker that stands inside a value ended it,
    `passed_closes` whether that marker closes it; None if there is no such marker. That marker has ended a
    block that is not well-formed.
    """

    def __init__(self, readings: Readings, at: int, start: str = "", stray: str = _NEVER) -> None:
        """`start` is the text at position `at` that began the block; `stray`: see `_Scan`."""
        self.at = at
        self.passed: int | None = None
        self.passed_closes = False
        self._scans = [_Scan(reading, stray) for reading in readings]
        self._parts = [start]
        self._scanned = 1
        self._length = len(start)

    def add(self, text: str) -> None:
        self._parts.append(text)
        self._length += len(text)

    def ends_inside_value(self) -> bool:
        """Whether the text ends inside a value by any reading."""
        unread = "".join(self._parts[self._scanned :])
        self._scanned = len(self._parts)
        inside = [scan.ends_inside(unread) for scan in self._scans]  # each of them reads all of the text
        return any(inside)

    def pass_marker(self, marker: str, *, closes: bool) -> None:
        """Add a marker that stands inside a value; otherwise it would close the block, or begin another."""
        before = self._length
        self.add(marker)
        if self.passed is None:
            self.passed, self.passed_closes = self._length if closes else before, closes

    @property
    def text(self) -> str:
        return "".join(self._parts)
