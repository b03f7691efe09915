"""Calls of MiniMax M3: elements named after the arguments, nested like them, each tag behind a token of its own."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from renderers.parsing.errors import InvalidJsonError
from renderers.parsing.json_text import MAX_DEPTH
from renderers.parsing.response import ToolCallParseStatus as Status
from renderers.parsing.schemas import Schema
from renderers.parsing.syntaxes.syntax import Attempt, Block, Item, debris, items, judged

_NAMESPACE = "]<]minimax[>["


class _UnbalancedError(ValueError):
    """Tags that do not close in the order in which they open."""


@dataclass(slots=True)
class _Element:
    name: str
    schema: Schema
    text_from: int
    children: list[tuple[str, Any]]


@dataclass(frozen=True, slots=True)
class MiniMaxM3Calls:
    """`<invoke name="f"><city>Zürich</city><days><item>1</item></days></invoke>`, `]<]minimax[>[` before every tag."""

    opens: tuple[str, ...] = (f"{_NAMESPACE}<tool_call>",)
    closes: tuple[str, ...] = (f"{_NAMESPACE}</tool_call>",)
    inner: tuple[str, ...] = (_NAMESPACE,)
    bare: str = ""

    def decode(self, block: Block) -> list[Attempt]:
        start, end = block.inside(self.opens, self.closes)
        mark = block.alphabet[_NAMESPACE]
        return [
            self._invocation(block, item, mark)
            for item in items(block.text, start, end, f"{mark}<invoke ", f"{mark}</invoke>")
        ]

    def _invocation(self, block: Block, item: Item, mark: str) -> Attempt:
        if item.body is None:
            return debris(item)
        start, end = item.body
        head = re.compile(r'name="([^"]*)">').match(block.text, start, end)
        if head is None:
            return judged(block, item.start, item.end, None, None, closed=item.closed, flaw=Status.MALFORMED)
        name = block.alphabet.plain(head[1])
        flaw, arguments = None, None
        try:
            arguments = _read_tree(block, head.end(), end, mark, block.tools.of_arguments(name))
        except InvalidJsonError:
            flaw = Status.INVALID_JSON
        except _UnbalancedError:
            flaw = Status.MALFORMED
        return judged(block, item.start, item.end, name, arguments, closed=item.closed, flaw=flaw)


def _read_tree(block: Block, start: int, end: int, mark: str, schema: Schema) -> dict[str, Any]:
    tag = re.compile(rf"{re.escape(mark)}<(/?)([^<>]+)>")
    root = _Element("", schema, start, [])
    path = [root]
    for match in tag.finditer(block.text, start, end):
        closes, name = bool(match[1]), block.alphabet.plain(match[2])
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
        path[-1].children.append((name, _value(element, block.plain(element.text_from, match.start()))))
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
    # Nothing is printed for the items of an empty list, nor for the properties of an empty object.
    if not text and not element.schema.allows("string"):
        if element.schema.allows("object"):
            return {}
        if element.schema.allows("array"):
            return []
    return element.schema.read(text)
