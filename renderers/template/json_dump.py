"""`json.dumps(ensure_ascii=False)` that keeps the provenance of what it writes."""

from __future__ import annotations

import itertools
import json
from typing import Any

from renderers.template.traced import Span, TracedStr, plain, tainted_like, traced_join
from renderers.template.work_limit import ITEM, InputDict, InputList, spend, spend_on_text_of

# `json` nests no deeper, and indents a line by its depth.
_DEEPEST = 1000
# In characters, both together; longer ones may be longer than what they separate.
_LONGEST_SEPARATORS = 8
_PIECES_AT_ONCE = 64


def traced_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The `tojson` filter that transformers gives to chat templates, same text, spans kept.

    The quotes around a string are the template's own; a list or a dict counts as content from bracket to bracket, being
    the caller's data as much as the strings inside, and is written by `json` in one go.
    """
    text = _dumped(value, ensure_ascii, indent, separators, sort_keys)
    if not isinstance(value, TracedStr):
        return str(tainted_like(text, (value,)))
    if len(value.spans) == 1 and value.spans[0][:2] == (0, len(value)):
        return TracedStr(text, (Span(1, len(text) - 1, value.spans[0].origin),))
    # JSON escapes character by character, so each differently traced piece can be escaped by itself.
    pieces, position = ['"'], 0
    for start, end, origin in value.spans:
        if start < end:
            pieces.append(json.dumps(plain(value)[position:start], ensure_ascii=ensure_ascii)[1:-1])
            escaped = json.dumps(plain(value)[start:end], ensure_ascii=ensure_ascii)[1:-1]
            pieces.append(TracedStr(escaped, (Span(0, len(escaped), origin),)))
            position = end
    pieces += [json.dumps(plain(value)[position:], ensure_ascii=ensure_ascii)[1:-1], '"']
    return traced_join("", pieces)


def _dumped(
    value: Any, ensure_ascii: bool, indent: int | None, separators: tuple[str, str] | None, sort_keys: bool
) -> str:
    """`json.dumps`, what it makes counted as the work of the template."""
    if type(value) not in (InputDict, InputList):
        spend_on_text_of(value)
    separated = sum(map(len, separators or ())) > _LONGEST_SEPARATORS
    if indent is None and not separated:
        text = json.dumps(value, ensure_ascii=ensure_ascii, separators=separators, sort_keys=sort_keys)
        spend(len(text))
        return text
    spend(_DEEPEST * (indent if isinstance(indent, int) else len(indent or "")))
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    written: list[str] = []
    encoded = iter(encoder.iterencode(value))
    while pieces := list(itertools.islice(encoded, _PIECES_AT_ONCE)):
        spend(sum(map(len, pieces)) + ITEM * len(pieces))
        written += pieces
    return "".join(written)
