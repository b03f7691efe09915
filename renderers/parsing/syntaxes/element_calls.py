"""Calls with an element for each argument, typed by the schema of the tool.

A value ends at its end tag. Other delimiters before it are text of the value, except tags that begin an argument or a
call: they tell that the end tag is missing. The value then ends where that tag begins, and the call is malformed,
because a value that contains the tag as text would be printed in the same way.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from renderers.parsing.json_text import MAX_DEPTH, InvalidJsonError, end_of_json, parse_json, require
from renderers.parsing.markers import MarkerEncoding
from renderers.parsing.response import ToolCallParseStatus as Status
from renderers.parsing.syntaxes.syntax import Attempt, CallText, ToolCallSyntax
from renderers.parsing.tool_schemas import Schema
from renderers.parsing.values import Value

_PARAMETER = re.compile(r"<parameter=([^<>\n]+)>")
_CONTAINER = re.compile(r"\s*(?=[{\[])")
_NAME_ATTRIBUTE = re.compile(r'name="([^"]*)">')
_MINIMAX = "]<]minimax[>["


@dataclass(frozen=True, slots=True)
class GlmCalls(ToolCallSyntax):
    """`<tool_call>name<arg_key>city</arg_key><arg_value>Zürich</arg_value></tool_call>`, on lines or not."""

    start_markers: tuple[str, ...] = ("<tool_call>",)
    end_markers: tuple[str, ...] = ("</tool_call>",)
    inner_markers: tuple[str, ...] = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

    def values(self, encoding: MarkerEncoding) -> tuple[Value, ...]:
        return (_value_of_key(*map(encoding.__getitem__, self.inner_markers)),)

    def attempts(self, block: CallText) -> list[Attempt]:
        start, end = block.body
        key_start, key_end, value_start, _ = map(block.encoding.__getitem__, self.inner_markers)
        pairs_at = block.text.find(key_start, start, end)
        name_end = end if pairs_at < 0 else pairs_at
        name = block.plain_text(start, name_end).strip()
        return [_read_elements(block, name, name_end, _key_and_value(key_start, key_end, value_start))]


@dataclass(frozen=True, slots=True)
class Hy3Calls(ToolCallSyntax):
    """`<tool_call>name<tool_sep>`, then keys and values as GLM writes them, several calls in a block.

    Every tag ends in `:opensource`. `inner_markers` begin with the two of a call and the separator.
    """

    start_markers: tuple[str, ...] = ("<tool_calls:opensource>",)
    end_markers: tuple[str, ...] = ("</tool_calls:opensource>",)
    inner_markers: tuple[str, ...] = (
        "<tool_call:opensource>",
        "</tool_call:opensource>",
        "<tool_sep:opensource>",
        "<arg_key:opensource>",
        "</arg_key:opensource>",
        "<arg_value:opensource>",
        "</arg_value:opensource>",
    )
    bare_calls: tuple[str, ...] = ("<tool_call:opensource>", "</tool_call:opensource>")

    def values(self, encoding: MarkerEncoding) -> tuple[Value, ...]:
        return (_value_of_key(*map(encoding.__getitem__, self.inner_markers[3:])),)

    def attempts(self, block: CallText) -> Iterable[Attempt]:
        opening, closing, separator, *key_marks, _ = map(block.encoding.__getitem__, self.inner_markers)
        pair = _key_and_value(*key_marks)

        def call(call: CallText) -> Attempt:
            start, end = call.body
            name_end = call.text.find(separator, start, end)
            if name_end < 0:
                return call.failed()
            name = call.plain_text(start, name_end).strip()
            return _read_elements(call, name, name_end + len(separator), pair)

        return block.read_calls(opening, closing, call)


def _key_and_value(key_start: str, key_end: str, value_start: str) -> re.Pattern[str]:
    """A key between its markers (group 1), and its value's (group "start"), which models leave out."""
    return re.compile(
        f"{re.escape(key_start)}((?:(?!{re.escape(key_end)}|{re.escape(key_start)}).)*)"
        rf"{re.escape(key_end)}\s*(?P<start>{re.escape(value_start)})?",
        re.DOTALL,
    )


def _value_of_key(key_start: str, _key_end: str, value_start: str, value_end: str) -> Value:
    key_start, value_start, value_end = map(re.escape, (key_start, value_start, value_end))
    return Value(value_start, value_end, broken=f"{key_start}|{value_start}", holds_json=True)


@dataclass(frozen=True, slots=True)
class QwenXmlCalls(ToolCallSyntax):
    """Qwen3-Coder, Qwen3.5 and later, Nemotron 3: functions and parameters as XML without types, values on own lines.

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Zürich
    </parameter>
    </function>
    </tool_call>
    """

    start_markers: tuple[str, ...] = ("<tool_call>",)
    end_markers: tuple[str, ...] = ("</tool_call>",)
    bare_calls: tuple[str, ...] = ("<function=", "</function>")

    def values(self, encoding: MarkerEncoding) -> tuple[Value, ...]:
        parameter = r"<parameter=[^<>\n]+>"
        return (Value(parameter, "</parameter>", broken=f"{parameter}|<function=", holds_json=True),)

    def attempts(self, block: CallText) -> Iterable[Attempt]:
        def function(call: CallText) -> Attempt:
            start, end = call.body
            head_end = call.text.find(">", start, end)
            if head_end < 0:
                return call.failed()
            return _read_elements(
                call._replace(closed=call.closed and block.closed),
                call.plain_text(start, head_end).strip(),
                head_end + 1,
                _PARAMETER,
                lambda schema, text, _: schema.parse_value(text, python_constants=True),
                on_lines=True,
            )

        return block.read_calls("<function=", "</function>", function)


@dataclass(frozen=True, slots=True)
class InvokeCalls(ToolCallSyntax):
    """`<invoke name="get_weather"><parameter name="city">Zürich</parameter></invoke>` in a block, one or several.

    MiniMax M2 and, with other markers, DeepSeek's DSML. `inner_markers` are the beginnings of the four
    tags. In DSML the attribute `string` says whether a value is a string or JSON; without it, the tool's
    schema decides.
    """

    start_markers: tuple[str, ...] = ("<minimax:tool_call>",)
    end_markers: tuple[str, ...] = ("</minimax:tool_call>",)
    inner_markers: tuple[str, ...] = ("<invoke", "</invoke", "<parameter", "</parameter")
    bare_calls: tuple[str, ...] = ('<invoke name="', "</invoke>")

    def values(self, encoding: MarkerEncoding) -> tuple[Value, ...]:
        invoke, _, parameter, parameter_end = (re.escape(encoding[marker]) for marker in self.inner_markers)
        begin = f'{parameter} name="[^"]*"(?: string="(?:true|false)")?>'
        return (Value(begin, f"{parameter_end}>", broken=f'{parameter} name="|{invoke} name="', holds_json=True),)

    def attempts(self, block: CallText) -> Iterable[Attempt]:
        invoke, invoke_end, parameter, _ = map(block.encoding.__getitem__, self.inner_markers)
        opening = re.compile(rf'{re.escape(parameter)} name="([^"]*)"(?: string="(?P<string>true|false)")?>')

        def invocation(call: CallText) -> Attempt:
            head = _NAME_ATTRIBUTE.match(call.text, *call.body)
            if head is None:
                return call.failed()
            name = call.encoding.decode(head[1])
            return _read_elements(call, name, head.end(), opening, _attributed_value)

        return block.read_calls(f"{invoke} ", f"{invoke_end}>", invocation)


def _attributed_value(schema: Schema, text: str, tag: re.Match[str]) -> Any:
    is_string = tag["string"]
    if is_string is None:
        return schema.parse_value(text)
    return text if is_string == "true" else parse_json(text)


def _read_elements(
    call: CallText,
    name: str,
    start: int,
    opening: re.Pattern[str],
    read: Callable[[Schema, str, re.Match[str]], Any] = lambda schema, text, _: schema.parse_value(text),
    *,
    on_lines: bool = False,
) -> Attempt:
    """The call `name` with the arguments from `start` on: each a match of `opening` (group 1 is the key), a value, and
    the end of the value, which `call.values` describes.

    `read(schema, text, match)` gives the value or raises `InvalidJsonError`; the text is then the value.
    With `on_lines`, values are on lines of their own. A value without its end, a duplicate key, and other
    text than white space between elements make the call malformed; a value whose start tag is missing makes
    it noncanonical.
    """
    (written,) = call.values
    edge = re.compile(f"({written.broken})|(?:{written.end})", re.DOTALL)
    schema = call.tools.of_arguments(name)
    values: dict[str, Any] = {}
    error: Status | None = None
    malformed, canonical = False, True
    position, end = start, call.body[1]
    while (match := opening.search(call.text, position, end)) is not None:
        key = call.encoding.decode(match[1]).strip()
        attribute = match["string"] if "string" in opening.groupindex else None
        is_text = schema.property(key).allows("string") if attribute is None else attribute == "true"
        found = edge.search(call.text, match.end() if is_text else _end_of_json(call.text, match.end()), end)
        is_ended = found is not None and found[1] is None
        is_begun = "start" not in opening.groupindex or match["start"] is not None
        malformed = malformed or not is_ended or bool(call.text[position : match.start()].strip())
        canonical = canonical and is_begun
        value_end = end if found is None else found.start()
        position = found.end() if found is not None and is_ended else value_end
        if not is_ended and not (is_begun and (call.closed or found is not None)):
            continue  # no value, or one that was cut off
        text = call.plain_text(match.end(), value_end)
        malformed = malformed or key in values
        if on_lines:
            text = text.removeprefix("\n").removesuffix("\n")
        try:
            values[key] = read(schema.property(key), text, match)
        except InvalidJsonError:
            values[key], error = text, Status.INVALID_JSON
    malformed = malformed or bool(call.text[position:end].strip())
    return call.attempt(name, values, error=Status.MALFORMED_STRUCTURE if malformed else error, canonical=canonical)


def _end_of_json(text: str, start: int) -> int:
    """The end of a JSON object or list, in whose strings nothing ends a value; `start` if there is none."""
    found = _CONTAINER.match(text, start)
    end = None if found is None else end_of_json(text, found.end())
    return start if end is None else end


@dataclass(frozen=True, slots=True)
class MiniMaxM3Calls(ToolCallSyntax):
    """`<invoke name="f"><city>Zürich</city><days><item>1</item></days></invoke>`, `]<]minimax[>[` before every tag.

    Elements are named after the arguments and nested like them.
    """

    start_markers: tuple[str, ...] = (f"{_MINIMAX}<tool_call>",)
    end_markers: tuple[str, ...] = (f"{_MINIMAX}</tool_call>",)
    inner_markers: tuple[str, ...] = (_MINIMAX,)
    bare_calls: tuple[str, ...] = (f"{_MINIMAX}<invoke ", f"{_MINIMAX}</invoke>")

    def values(self, encoding: MarkerEncoding) -> tuple[Value, ...]:
        mark = re.escape(encoding[_MINIMAX])
        begin = f"{mark}<(?!/|invoke |tool_call>)[^<>]+>"
        return (Value(begin, f"{mark}</(?!invoke>|tool_call>)[^<>]+>", broken=f"{mark}<invoke "),)

    def attempts(self, block: CallText) -> Iterable[Attempt]:
        mark = block.encoding[_MINIMAX]
        return block.read_calls(f"{mark}<invoke ", f"{mark}</invoke>", lambda call: self._invocation(call, mark))

    def _invocation(self, call: CallText, mark: str) -> Attempt:
        head = _NAME_ATTRIBUTE.match(call.text, *call.body)
        if head is None:
            return call.failed()
        name = call.encoding.decode(head[1])
        try:
            return call.attempt(name, _read_tree(call, head.end(), mark, call.tools.of_arguments(name)))
        except InvalidJsonError:
            return call.failed(Status.INVALID_JSON, name)
        except ValueError:  # the tags are no tree
            return call.failed(name=name)


@dataclass(slots=True)
class _Element:
    name: str
    schema: Schema
    text_from: int
    children: list[tuple[str, Any]]

    def is_list(self) -> bool:
        """Whether `item` elements are items of a list, and not properties of that name in the schema."""
        return self.schema.allows("array") or not self.schema.allows("object")

    def value(self, text: str) -> Any:
        """The value of the element, whose content is `text`."""
        if self.children:
            require(not self.schema.is_string())
            if self.is_list() and all(name == "item" for name, _ in self.children):
                return [value for _, value in self.children]
            return self.object()
        # An empty list and an empty object are both printed as an empty text.
        if not text and not self.schema.allows("string"):
            if self.schema.allows("object"):
                return {}
            if self.schema.allows("array"):
                return []
        return self.schema.parse_value(text)

    def object(self) -> dict[str, Any]:
        found = dict(self.children)
        require(len(found) == len(self.children))
        return found


def _read_tree(call: CallText, start: int, mark: str, schema: Schema) -> dict[str, Any]:
    tag = re.compile(rf"{re.escape(mark)}<(/?)([^<>]+)>")
    root = _Element("", schema, start, [])
    path = [root]
    position, end = start, call.body[1]  # position: behind the last tag
    for match in tag.finditer(call.text, start, end):
        closes, name = bool(match[1]), call.encoding.decode(match[2])
        between = call.text[position : match.start()]
        require(not between.strip() or (closes and position == path[-1].text_from))  # no text beside elements
        position = match.end()
        if not closes:
            parent = path[-1]
            child = parent.schema.item() if name == "item" and parent.is_list() else parent.schema.property(name)
            path.append(_Element(name, child, match.end(), []))
            require(len(path) <= MAX_DEPTH)
            continue
        element = path.pop()
        require(element is not root and element.name == name)
        path[-1].children.append((name, element.value(call.encoding.decode(between))))
    require(path == [root] and not call.text[position:end].strip())
    return root.object()
