"""Strings that record the origin of their characters.

A chat template is a program that concatenates strings. If its inputs are `TracedStr`, its output is one
too: every slice, join or strip keeps the spans. Characters without a span were written by the template
itself.

Where the result of an operation cannot be mapped back character by character (`%`-formatting with width,
`title()` where the length changes...), the *whole* result is marked as content of the first origin involved.
This is the safe side: template text may count as content, but content never counts as template text and so
never becomes a control token.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, SupportsIndex, cast

from renderers.template.work_limit import ITEM, STEP, spend, spend_on_text_of


class Origin(NamedTuple):
    """The field that text is from: `message_index` (-1: no message) and a path like `content[0].text`."""

    message_index: int
    path: str


class LoopMark(NamedTuple):
    """A zero-width mark: the body of loop `loop` starts for `message_index`, or (None) the loop has ended."""

    loop: int
    message_index: int | None


class Span(NamedTuple):
    """Characters `start:end` were copied from `origin`; a `LoopMark` has `start == end`."""

    start: int
    end: int
    origin: Origin | LoopMark


_new_str = str.__new__  # looked up once: a template makes thousands of strings


class TracedStr(str):
    """A `str` with the origins of its characters. Equal to the plain string, with the same hash and output."""

    __slots__ = ("spans",)

    spans: tuple[Span, ...]

    def __new__(cls, text: str = "", spans: Iterable[Span] = ()) -> TracedStr:
        # str.__new__ would call __str__ of a TracedStr and return it unchanged, hence the plain copy.
        self = _new_str(cls, text if type(text) is str else plain(text))
        self.spans = tuple(spans)
        return self

    @classmethod
    def of(cls, text: str, origin: Origin) -> TracedStr:
        """`text`, all of it from `origin`."""
        self = _new_str(cls, text if type(text) is str else plain(text))
        self.spans = (Span(0, len(text), origin),) if text else ()
        return self

    # Conversions that must not drop the spans.

    def __str__(self) -> str:
        return self

    def __format__(self, spec: str) -> str:
        return _tainted(format(plain(self), spec), (self,)) if spec else self

    def __reduce__(self) -> tuple[Any, ...]:
        return TracedStr, (plain(self), self.spans)

    # Concatenation.

    def __add__(self, other: str) -> str:
        # With any other type `str` itself raises, with its usual message.
        return traced_join("", (self, other)) if isinstance(other, str) else plain(self) + other

    def __radd__(self, other: str) -> str:
        return traced_join("", (other, self)) if isinstance(other, str) else other + plain(self)

    def __mul__(self, count: SupportsIndex) -> str:
        times = operator.index(count)
        spend(times * (ITEM + len(self)))
        return traced_join("", [self] * times)

    __rmul__ = __mul__

    def join(self, parts: Iterable[str], /) -> str:
        pieces = list(parts)
        if not all(isinstance(piece, str) for piece in pieces):
            return plain(self).join(pieces)  # raises TypeError, as str does
        return traced_join(self, pieces)

    def __mod__(self, values: Any) -> str:
        return traced_percent(self, values)

    def __rmod__(self, template: Any) -> str:
        return traced_percent(template, self) if isinstance(template, str) else NotImplemented

    # Slices and pieces.

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        if isinstance(key, slice):
            start, stop, step = key.indices(len(self))
            if step != 1:
                return traced_join("", [self._cut(index, index + 1) for index in range(start, stop, step)])
            return self._cut(start, max(start, stop), all_marks=True)
        index = operator.index(key)
        text = str.__getitem__(self, index)  # raises IndexError as str does
        start = index if index >= 0 else index + len(self)
        return self._cut(start, start + len(text))

    def __iter__(self) -> Iterator[str]:
        text = plain(self)
        spend(STEP * len(text))
        if len(self.spans) == 1 and self.spans[0][:2] == (0, len(text)):
            one = (Span(0, 1, self.spans[0].origin),)
            return (TracedStr(character, one) for character in text)
        return (self._cut(index, index + 1) for index in range(len(text)))

    def _cut(self, start: int, stop: int, *, all_marks: bool = False) -> TracedStr:
        """The characters `start:stop` with their spans, and the marks before any of these characters.

        With `all_marks`, marks outside the range move to its nearer edge: removing white space around text
        must not change which loop is running at a character, or that the loop has ended behind the last
        one.
        """
        # `plain(self)[start:stop]` would copy the whole text for every piece.
        text = str.__getitem__(self, slice(start, stop))
        at_end = stop == len(self)
        kept = []
        for begin, end, origin in self.spans:
            if begin == end:
                if all_marks or start <= begin < stop or (at_end and begin == stop):
                    at = min(max(begin, start), stop) - start
                    kept.append(Span(at, at, origin))
            elif max(begin, start) < min(end, stop):
                kept.append(Span(max(begin, start) - start, min(end, stop) - start, origin))
        return TracedStr(text, kept)

    def strip(self, chars: str | None = None, /) -> str:
        start = len(self) - len(plain(self).lstrip(chars))
        return self._trimmed(start, max(start, len(plain(self).rstrip(chars))))

    def lstrip(self, chars: str | None = None, /) -> str:
        return self._trimmed(len(self) - len(plain(self).lstrip(chars)), len(self))

    def rstrip(self, chars: str | None = None, /) -> str:
        return self._trimmed(0, len(plain(self).rstrip(chars)))

    def _trimmed(self, start: int, stop: int) -> str:
        if start == 0 and stop == len(self):
            return self  # the usual case
        return self._cut(start, stop, all_marks=True)

    def removeprefix(self, prefix: str, /) -> str:
        return self._cut(len(self) - len(plain(self).removeprefix(prefix)), len(self), all_marks=True)

    def removesuffix(self, suffix: str, /) -> str:
        return self._cut(0, len(plain(self).removesuffix(suffix)), all_marks=True)

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._align(plain(self).split(sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._align(plain(self).rsplit(sep, maxsplit), sep)

    def splitlines(self, keepends: bool = False) -> list[str]:
        pieces, position = [], 0
        lines = zip(plain(self).splitlines(keepends), plain(self).splitlines(True), strict=True)
        for line, whole in lines:
            pieces.append(self._cut(position, position + len(line)))
            position += len(whole)
        return cast(list[str], pieces)

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        return self._partition_at(plain(self).find(sep), sep, missing_first=False)

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        return self._partition_at(plain(self).rfind(sep), sep, missing_first=True)

    def _partition_at(self, at: int, sep: str, *, missing_first: bool) -> tuple[str, str, str]:
        if not sep:
            raise ValueError("empty separator")
        if at < 0:
            return ("", "", self) if missing_first else (self, "", "")
        return self._cut(0, at), self._cut(at, at + len(sep)), self._cut(at + len(sep), len(self))

    def _align(self, pieces: list[str], sep: str | None) -> list[str]:
        """The pieces that `str.split` found in this text, from left to right, with their spans."""
        text, position, found = plain(self), 0, []
        self._spend_on_pieces(len(pieces))
        for piece in pieces:
            if sep is None:
                position = text.index(piece, position)
            found.append(self._cut(position, position + len(piece)))
            position += len(piece) + len(sep or "")
        return cast(list[str], found)

    def _spend_on_pieces(self, count: int) -> None:
        spend(count * (STEP + len(self.spans)))  # each piece is compared with every span

    # Changed characters.

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:
        text, limit = plain(self), operator.index(count)
        if not old:
            # An empty text is found before, between and behind all characters.
            spend((len(text) + 1) * (1 + len(new)))
            return _tainted(text.replace(old, new, limit), (self, new))
        self._spend_on_pieces(text.count(old))
        pieces: list[str] = []
        position = 0
        while limit != 0 and (at := text.find(old, position)) >= 0:
            pieces.append(self._cut(position, at))
            position, limit = at + len(old), limit - 1
        if not pieces:
            return self
        pieces.append(self._cut(position, len(self)))
        return traced_join(new, pieces)


def _changing(name: str) -> Callable[..., str]:
    """The method `name` of `str`: with the spans of its text if the length stays, else tainted."""
    method = getattr(str, name)

    def changed(self: TracedStr, *arguments: Any) -> str:
        spend(sum(width for width in arguments if isinstance(width, int)))
        text: str = method(plain(self), *arguments)
        return TracedStr(text, self.spans) if len(text) == len(self) else _tainted(text, (self,))

    return changed


#: Methods that change characters or append them; `TracingEnvironment` forbids the others that would drop spans.
for _name in ("upper", "lower", "casefold", "swapcase", "title", "capitalize", "center", "ljust", "rjust", "zfill"):
    setattr(TracedStr, _name, _changing(_name))


@functools.lru_cache(4096)
def loop_mark(loop: int, message_index: int | None) -> TracedStr:
    """An empty string with one `LoopMark`."""
    return TracedStr("", (Span(0, 0, LoopMark(loop, message_index)),))


def plain(text: str) -> str:
    """The same characters as an exact `str`, without spans."""
    return str.__str__(text)


def traced_text(value: Any) -> str:
    """`str(value)`; the text of a list, dict or other object counts as content, as it may hold some."""
    if isinstance(value, str):
        return value
    spend_on_text_of(value)
    text = str(value)
    # A number cannot hold the text of a control token.
    if not text or value is None or isinstance(value, (int, float)):
        return text
    return TracedStr.of(text, _first_origin(value) or Origin(-1, type(value).__name__))


def traced_join(separator: str, parts: Iterable[Any]) -> str:
    """`separator.join(map(str, parts))` with the spans of all of them; plain when nothing carries one."""
    pieces = [part if isinstance(part, str) else traced_text(part) for part in parts]
    spans: list[Span] = []
    separator_spans = separator.spans if isinstance(separator, TracedStr) else ()
    gap = len(separator)
    offset = 0
    for piece in pieces:
        if type(piece) is TracedStr and piece.spans:
            if offset:
                spans += [Span(start + offset, end + offset, origin) for start, end, origin in piece.spans]
            else:
                spans += piece.spans
        offset += len(piece)
        if separator_spans:
            spans += [Span(start + offset, end + offset, origin) for start, end, origin in separator_spans]
        offset += gap
    if separator_spans and pieces:
        del spans[-len(separator_spans) :]  # there is no separator behind the last piece
    # Before the text is made, which may be larger than the memory.
    spend(offset + ITEM * len(pieces) + STEP * len(spans))
    text = str.join(separator, pieces)
    return TracedStr(text, spans) if spans else text


#: A conversion, or a key without its end, which `%` refuses: no other key behind it has one.
_PERCENT = re.compile(r"%\([^)]*+\Z|%(?:\(([^)]*+)\))?(%|s|[^%s]*?[a-zA-Z])")


def traced_percent(template: str, values: Any) -> str:
    """`template % values`; `%s` keeps the spans of its value, another conversion taints the result."""
    arguments = values if isinstance(values, tuple) else (values,)
    for value in arguments:
        spend_on_text_of(value)
    for match in _PERCENT.finditer(plain(template)):
        if len(match[2] or "") > 1:
            spend_on_width(match[2])
            if "*" in match[2]:
                spend(sum(abs(value) for value in arguments if isinstance(value, int)))
    expected = str.__mod__(plain(template), values)  # `%` would call `__rmod__` of a traced value: this function
    pieces: list[str] = []
    position, used = 0, 0
    for match in _PERCENT.finditer(plain(template)):
        pieces.append(template[position : match.start()])
        position = match.end()
        key, conversion = match.groups()
        if conversion == "%":
            pieces.append(template[position - 1 : position])
            continue
        if conversion != "s" or (key is not None and key not in values):
            return _tainted(expected, (template, *arguments))
        if key is None:
            value, used = arguments[used], used + 1
        else:
            value = values[key]
        pieces.append(value)
    result = traced_join("", [*pieces, template[position:]])
    # Where this reading of the format differs from Python's own, the whole text is content.
    return result if result == expected else _tainted(expected, (template, *arguments))


def spend_on_width(specification: str) -> None:
    """Count the characters of the width and the precision in a format specification."""
    for number in _NUMBER.findall(specification):
        # 18 digits exceed every limit, and reading longer numbers takes long.
        spend(int(number[:18]))


_NUMBER = re.compile(r"\d+")


def tainted_like(result: Any, inputs: Iterable[Any]) -> Any:
    """`result`; a plain string made from traced inputs becomes content as a whole."""
    if isinstance(result, str) and not isinstance(result, TracedStr):
        return _tainted(result, inputs)
    return result


def _tainted(text: str, inputs: Iterable[Any]) -> str:
    for value in inputs:
        origin = _first_origin(value)
        if origin is not None:
            return TracedStr.of(text, origin)
    return text


def _first_origin(value: Any) -> Origin | None:
    if isinstance(value, TracedStr):
        return next((span.origin for span in value.spans if isinstance(span.origin, Origin)), None)
    if isinstance(value, Mapping):
        return next((found for item in value.items() for part in item if (found := _first_origin(part))), None)
    if isinstance(value, Collection) and not isinstance(value, (str, bytes, bytearray, range)):
        return next((found for part in value if (found := _first_origin(part))), None)
    return None
