# ruff: noqa: RUF001, RUF002  (DeepSeek spells its tokens with a fullwidth bar)
"""Calls with their arguments as JSON: JSON objects (Hermes and similar), or a name beside the arguments."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from renderers.parsing.json_text import InvalidJsonError, end_of_json, parse_json
from renderers.parsing.response import ToolCallParseStatus as Status
from renderers.parsing.syntaxes.syntax import Attempt, CallText, JsonStrings
from renderers.parsing.tool_schemas import ToolSchemas
from renderers.parsing.values import DelimiterSearch

_FENCED = re.compile(r"([^\n]*)\n```json\n(.*)\n```\s*", re.DOTALL)
_FUNCTOOLS = re.compile(r"functools(?=\[\s*\{)")
_LIST_OF_OBJECTS = re.compile(r"\s*\[\s*[{\]]")
_KIMI_ID = re.compile(r"functions\.(.*):\d+", re.DOTALL)
_KIMI_PREFIXES = ("functions.", "functions_", "functions", "")


@dataclass(frozen=True, slots=True)
class JsonCalls(JsonStrings):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`; other families use other markers.

    A turn that is `functools[{...}]` is read, too, if `unmarked_starts` has "functools" (Phi-4-mini).
    """

    start_markers: tuple[str, ...] = ("<tool_call>",)
    end_markers: tuple[str, ...] = ("</tool_call>",)

    def attempts(self, block: CallText) -> list[Attempt]:
        if not block.body[0]:
            begun = _FUNCTOOLS.match(block.text)
            # Nothing but the turn's end closes it: it is whole if its JSON is.
            body = (0 if begun is None else begun.end(), block.end)
            return [] if begun is None else list(json_calls(block._replace(body=body, closed=True), canonical=False))
        is_empty_list = bool(block.body_text.strip())
        empty = block.failed(Status.MALFORMED_STRUCTURE if is_empty_list else Status.INVALID_JSON)
        return list(json_calls(block)) or [empty]


@dataclass(frozen=True, slots=True)
class DeepSeekCalls(JsonStrings):
    """DeepSeek V3, R1 and V3.1: a section of calls, each between `<｜tool▁call▁begin｜>` and `<｜tool▁call▁end｜>`.

    `fenced` (V3, R1): `function<｜tool▁sep｜>name`, then a line "```json", the arguments and a line "```";
    otherwise (V3.1): `name<｜tool▁sep｜>arguments`.
    """

    fenced: bool = True
    start_markers: tuple[str, ...] = ("<｜tool▁calls▁begin｜>",)
    end_markers: tuple[str, ...] = ("<｜tool▁calls▁end｜>",)
    inner_markers: tuple[str, ...] = ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")
    bare_calls: tuple[str, ...] = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")

    def attempts(self, block: CallText) -> Iterable[Attempt]:
        opening, separator, closing = map(block.encoding.__getitem__, self.inner_markers)

        def read(call: CallText) -> Attempt:
            name, found, arguments = map(call.encoding.decode, call.body_text.partition(separator))
            if not found or (self.fenced and name.strip() != "function"):
                return call.failed()
            if self.fenced:
                fenced = _FENCED.fullmatch(arguments)
                if fenced is None:
                    return call.failed(name=arguments.strip().partition("\n")[0])
                name, arguments = fenced.groups()
            return call.json_attempt(name.strip(), arguments)

        return block.read_calls(opening, closing, read)


@dataclass(frozen=True, slots=True)
class KimiCalls(JsonStrings):
    """Kimi K2: a section of calls, each named by its id.

    `<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`

    An id of another form (`functions_get_weather_0`) is read if it names one of the offered tools and no
    second one.
    """

    start_markers: tuple[str, ...] = ("<|tool_calls_section_begin|>",)
    end_markers: tuple[str, ...] = ("<|tool_calls_section_end|>",)
    inner_markers: tuple[str, ...] = ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>")
    bare_calls: tuple[str, ...] = ("<|tool_call_begin|>", "<|tool_call_end|>")

    def attempts(self, block: CallText) -> Iterable[Attempt]:
        opening, separator, closing = map(block.encoding.__getitem__, self.inner_markers)

        def read(call: CallText) -> Attempt:
            head, found, arguments = map(call.encoding.decode, call.body_text.partition(separator))
            call_id = head.strip()
            canonical = _KIMI_ID.fullmatch(call_id)
            name = _named_by(call_id, call.tools) if canonical is None else canonical[1]
            if not found or name is None:
                return call.failed()
            return call.json_attempt(name, arguments, id=call_id, canonical=canonical is not None)

        return block.read_calls(opening, closing, read)


def _named_by(call_id: str, tools: ToolSchemas) -> str | None:
    """The name in an id that is not of Kimi's form; None if it may be that of several tools."""
    numbered = call_id.rstrip("0123456789")
    if numbered != call_id and numbered.endswith((":", ".", "_")):
        numbered = numbered[:-1]
    names = {text.removeprefix(prefix) for prefix in _KIMI_PREFIXES for text in (call_id, numbered)}
    offered = [name for name in names if tools.offers(name)]
    if len(offered) > 1:
        return None
    prefix = next(prefix for prefix in _KIMI_PREFIXES if numbered.startswith(prefix))
    return offered[0] if offered else numbered.removeprefix(prefix)


@dataclass(frozen=True, slots=True)
class MistralCalls(JsonStrings):
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}, "id": ...}]`, or `[TOOL_CALLS]name[ARGS]{...}` for each call.

    In the second form `[CALL_ID]` and an id may precede `[ARGS]`. Only the end of the turn closes the last
    call.
    """

    start_markers: tuple[str, ...] = ("[TOOL_CALLS]",)
    inner_markers: tuple[str, ...] = ("[ARGS]", "[CALL_ID]")

    def attempts(self, block: CallText) -> Iterator[Attempt]:
        opening = block.encoding[self.start_markers[0]]
        search = DelimiterSearch(block.values, re.escape(opening))
        start = 0
        while start < block.end:
            inside = start + len(opening)
            outside = next(search.finditer(block.text, inside, block.end), None)
            nearest = block.text.find(opening, inside)
            ends = [block.end if outside is None else outside.start(), block.end if nearest < 0 else nearest]
            for following in dict.fromkeys(ends):
                is_last = following == block.end
                part = block._replace(start=start, end=following, body=(inside, following), closed=not is_last)
                calls = self._calls(part if not is_last else part._replace(closed=block.closed))
                if all(call.status is not None and call.status.is_well_formed for call in calls):
                    break
                search.rereads += 1
            yield from calls
            start = following

    def _calls(self, part: CallText) -> list[Attempt]:
        arguments_mark, id_mark = map(part.encoding.__getitem__, self.inner_markers)
        if _LIST_OF_OBJECTS.match(part.text, *part.body):
            return list(json_calls(part)) or [part.failed()]
        head, found, arguments = part.body_text.partition(arguments_mark)
        if not found:
            return [part.failed()]
        name, _, call_id = (part.encoding.decode(text).strip() for text in head.partition(id_mark))
        return [part.json_attempt(name, part.encoding.decode(arguments), id=call_id)]


def json_calls(block: CallText, *, canonical: bool = True) -> Iterator[Attempt]:
    """The calls of a JSON object, or of several in a list or separated by commas, that fill the body of the block.

    They are not canonical if the list has no end, or if a comma is last.
    """
    written = block.body_text.strip()
    is_list = written.startswith("[")
    canonical = canonical and is_list == written.endswith("]") and not written.rstrip("] \t\r\n").endswith(",")
    for part in _json_parts(block):
        try:
            value = parse_json(part.plain_text(*part.body))
        except InvalidJsonError:
            yield part.failed(Status.INVALID_JSON)
        else:
            yield object_attempt(part, value, canonical=canonical)


def _json_parts(block: CallText) -> Iterator[CallText]:
    """The JSON values in the block's body or list; the last part may be the rest of the text."""
    text, inside, (start, end) = block.text, block.body_text, block.body
    if inside.lstrip().startswith("["):
        start = text.index("[", start) + 1
        if inside.rstrip().endswith("]"):
            end = text.rindex("]", start - 1, end)
    position = skip(text, start, end)
    while position < end:
        stop = end_of_json(text, position)
        # Something else than a comma behind a value: what follows is not a list of values.
        behind = end if stop is None else skip(text, stop, end)
        if stop is None or stop > end or (behind < end and text[behind] != ","):
            stop = end
        yield block._replace(start=position, end=stop, body=(position, stop))
        position = end if stop == end else skip(text, behind + 1, end)


def skip(text: str, position: int, end: int, separator: str = "") -> int:
    """The first position that holds neither white space nor the separator."""
    skipped = re.compile(rf"[ \t\r\n{separator}]*").match(text, position, end)
    return position if skipped is None else skipped.end()


def object_attempt(call: CallText, value: Any, *, arguments_key: str = "arguments", canonical: bool = True) -> Attempt:
    """A call that is a JSON object; absent arguments count as an empty object.

    Arguments under the other of "arguments" and "parameters" are read, and the call is noncanonical. A key
    that is neither read nor known makes it malformed.
    """
    if not isinstance(value, dict):
        return call.failed()
    other_key = "parameters" if arguments_key == "arguments" else "arguments"
    key = other_key if arguments_key not in value else arguments_key
    call_id = value.get("id", value.get("tool_call_id"))
    known = {"name", key, "id", "tool_call_id", "type"}
    is_known = value.keys() <= known and value.get("type", "function") == "function"
    is_known = is_known and not {"id", "tool_call_id"} <= value.keys()
    return call.attempt(
        value.get("name"),
        value.get(key, {}),
        error=None if is_known else Status.MALFORMED_STRUCTURE,
        id=call_id if isinstance(call_id, str) else None,
        canonical=canonical and key not in value.keys() - {arguments_key} and isinstance(call_id, str | None),
    )
