"""Calls of MiniMax M3: elements named after the arguments and nested like them, a token before each tag."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from renderers.parsing.json_text import MAX_DEPTH, InvalidJsonError
from renderers.parsing.response import ToolCallParseStatus as Status
from renderers.parsing.schemas import Schema
from renderers.parsing.syntaxes.syntax import (
    Attempt,
    Block,
    CallRegion,
    ToolCallSyntax,
    make_attempt,
    make_malformed_attempt,
)

_NAMESPACE = "]<]minimax[>["


class _UnbalancedError(ValueError):
    """Tags that do not close in the reverse order of their opening, or are nested too deeply."""


@dataclass(slots=True)
class _Element:
    name: str
    schema: Schema
    text_from: int
    children: list[tuple[str, Any]]


@dataclass(frozen=True, slots=True)
class MiniMaxM3Calls(ToolCallSyntax):
    """`<invoke name="f"><city>Zürich</city><days><item>1</item></days></invoke>`, `]<]minimax[>[` before every tag."""

    start_markers: tuple[str, ...] = (f"{_NAMESPACE}<tool_call>",)
    end_markers: tuple[str, ...] = (f"{_NAMESPACE}</tool_call>",)
    inner_markers: tuple[str, ...] = (_NAMESPACE,)

    def decode(self, block: Block) -> list[Attempt]:
        mark = block.encoding[_NAMESPACE]
        return block.read_calls(
            self, f"{mark}<invoke ", f"{mark}</invoke>", lambda region: self._invocation(block, region, mark)
        )

    def _invocation(self, block: Block, region: CallRegion, mark: str) -> Attempt:
        start, end = region.body
        head = re.compile(r'name="([^"]*)">').match(block.text, start, end)
        if head is None:
            return make_malformed_attempt(block, region)
        name = block.encoding.decode(head[1])
        error, arguments = None, None
        try:
            arguments = _read_tree(block, head.end(), end, mark, block.tools.of_arguments(name))
        except InvalidJsonError:
            error = Status.INVALID_JSON
        except _UnbalancedError:
            error = Status.MALFORMED
        return make_attempt(block, region, name, arguments, error=error)


def _read_tree(block: Block, start: int, end: int, mark: str, schema: Schema) -> dict[str, Any]:
    tag = re.compile(rf"{re.escape(mark)}<(/?)([^<>]+)>")
    root = _Element("", schema, start, [])
    path = [root]
    for match in tag.finditer(block.text, start, end):
        closes, name = bool(match[1]), block.encoding.decode(match[2])
        if not closes:
            parent = path[-1]
            child = parent.schema.item() if name == "item" and _is_list(parent) else parent.schema.property(name)
            path.append(_Element(name, child, match.end(), []))
            if len(path) > MAX_DEPTH:
                raise _UnbalancedError
            continue
        element = path.pop()
        if element is root or element.name != name:
            raise _UnbalancedError
        path[-1].children.append((name, _value(element, block.plain_text(element.text_from, match.start()))))
    if path != [root]:
        raise _UnbalancedError
    return dict(root.children)


def _is_list(element: _Element) -> bool:
    """Whether `item` elements are the items of a list: unless the schema says that they are properties."""
    return element.schema.allows("array") or not element.schema.allows("object")


def _value(element: _Element, text: str) -> Any:
    if element.children:
        if _is_list(element) and all(name == "item" for name, _ in element.children):
            return [value for _, value in element.children]
        return dict(element.children)
    # An empty list and an empty object are both printed as an empty text.
    if not text and not element.schema.allows("string"):
        if element.schema.allows("object"):
            return {}
        if element.schema.allows("array"):
            return []
    return element.schema.parse_value(text)
