"""`json.dumps(ensure_ascii=False)` that keeps the provenance of the strings inside."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from renderers.template.traced import Span, TracedStr, plain, traced_join


def traced_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The `tojson` filter that transformers gives to chat templates, same text, spans kept.

    Only strings, lists and dicts are walked here; numbers and everything else are written by `json` itself, which also
    raises its own TypeError for what it cannot write.
    """
    expected = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    if not any(True for _ in _traced_strings(value)):
        return expected
    step = " " * indent if isinstance(indent, int) else indent
    item_separator, key_separator = separators or ("," if indent is not None else ", ", ": ")
    writer = _Writer(ensure_ascii, step, item_separator, key_separator, sort_keys)
    return traced_join("", writer.pieces(value, "\n"))


class _Writer:
    def __init__(self, ensure_ascii: bool, step: str | None, item: str, key: str, sort_keys: bool) -> None:
        self.ensure_ascii, self.step, self.item, self.key, self.sort_keys = ensure_ascii, step, item, key, sort_keys

    def pieces(self, value: Any, newline: str) -> Iterator[str]:
        if isinstance(value, TracedStr):
            yield self._string(value)
        elif isinstance(value, Mapping):
            entries = sorted(value.items()) if self.sort_keys else value.items()
            yield from self._sequence("{}", [self._entry(key, item, newline) for key, item in entries], newline)
        elif isinstance(value, (list, tuple)):
            yield from self._sequence("[]", [self.pieces(item, self._inner(newline)) for item in value], newline)
        else:
            yield json.dumps(value, ensure_ascii=self.ensure_ascii)

    def _entry(self, key: Any, value: Any, newline: str) -> Iterator[str]:
        if isinstance(key, TracedStr):
            yield self._string(key)
        else:
            # json writes 1, True and None as "1", "true" and "null" when they are keys
            yield json.dumps({key: 0}, ensure_ascii=self.ensure_ascii)[1:-4]
        yield self.key
        yield from self.pieces(value, self._inner(newline))

    def _sequence(self, brackets: str, entries: list[Iterator[str]], newline: str) -> Iterator[str]:
        yield brackets[0]
        for index, entry in enumerate(entries):
            if index:
                yield self.item
            if self.step is not None:
                yield self._inner(newline)
            yield from entry
        if entries and self.step is not None:
            yield newline
        yield brackets[1]

    def _inner(self, newline: str) -> str:
        return newline + (self.step or "")

    def _string(self, text: TracedStr) -> str:
        """JSON escapes character by character, so each differently traced piece can be escaped by itself."""
        pieces, position = ['"'], 0
        for start, end, origin in text.spans:
            if start == end:
                continue
            pieces.append(self._escape(plain(text)[position:start]))
            escaped = self._escape(plain(text)[start:end])
            pieces.append(TracedStr(escaped, (Span(0, len(escaped), origin),)))
            position = end
        pieces += [self._escape(plain(text)[position:]), '"']
        return traced_join("", pieces)

    def _escape(self, text: str) -> str:
        return json.dumps(text, ensure_ascii=self.ensure_ascii)[1:-1]


def _traced_strings(value: Any) -> Iterator[TracedStr]:
    if isinstance(value, TracedStr):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _traced_strings(key)
            yield from _traced_strings(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _traced_strings(item)
