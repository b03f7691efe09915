"""The `tojson` filter of chat templates: the text of transformers' filter, with spans, and counted as work."""

import itertools
import json
from typing import Any

from renderers.template.traced import (
    Span,
    TracedStr,
    plain,
    tainted_like,
    traced_join,
)
from renderers.template.work_limit import ITEM, InputDict, InputList, spend, spend_on_text_of

# Characters of both separators together; longer ones are counted piece by piece.
_MAX_UNCOUNTED_SEPARATORS = 8
_PIECES_PER_COUNT = 64


def traced_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The `tojson` filter of transformers: the same text, with spans.

    The quotes around a string count as template text; a list or a dict counts as content from bracket to
    bracket, because it is the caller's data, and is written by `json` in one call.
    """
    text = _counted_dump(value, ensure_ascii, indent, separators, sort_keys)
    if not isinstance(value, TracedStr):
        return str(tainted_like(text, (value,)))
    if len(value.spans) == 1 and value.spans[0][:2] == (0, len(value)):
        return TracedStr(text, (Span(1, len(text) - 1, value.spans[0].origin),))
    # JSON escapes character by character, so each piece with its own origin can be escaped by itself.
    pieces, position = ['"'], 0
    for start, end, origin in value.spans:
        if start < end:
            pieces.append(json.dumps(plain(value)[position:start], ensure_ascii=ensure_ascii)[1:-1])
            escaped = json.dumps(plain(value)[start:end], ensure_ascii=ensure_ascii)[1:-1]
            pieces.append(TracedStr(escaped, (Span(0, len(escaped), origin),)))
            position = end
    pieces += [json.dumps(plain(value)[position:], ensure_ascii=ensure_ascii)[1:-1], '"']
    return traced_join("", pieces)


def _counted_dump(
    value: Any, ensure_ascii: bool, indent: int | None, separators: tuple[str, str] | None, sort_keys: bool
) -> str:
    """`json.dumps`; the text that it makes counts as work of the template."""
    if type(value) not in (InputDict, InputList):
        spend_on_text_of(value)
    separated = sum(map(len, separators or ())) > _MAX_UNCOUNTED_SEPARATORS
    if indent is None and not separated:
        text = json.dumps(value, ensure_ascii=ensure_ascii, separators=separators, sort_keys=sort_keys)
        spend(len(text))
        return text
    # The greatest depth that `json` writes; a line is indented by its depth.
    spend(1000 * (indent if isinstance(indent, int) else len(indent or "")))
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    written: list[str] = []
    encoded = iter(encoder.iterencode(value))
    while pieces := list(itertools.islice(encoded, _PIECES_PER_COUNT)):
        spend(sum(map(len, pieces)) + ITEM * len(pieces))
        written += pieces
    return "".join(written)
