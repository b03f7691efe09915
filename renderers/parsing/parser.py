"""The channel machine: reasoning, content and tool calls out of a stream of lexemes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from renderers.formats.format import Format
from renderers.parsing.lexer import Lexeme, lex
from renderers.parsing.response import ParsedResponse, ParsedToolCall, ToolCallParseStatus
from renderers.tokens.tokenizer import TemplateTokenizer

# Templates and JSON writers recurse; a policy can sample brackets until they run out of stack.
_MAX_DEPTH = 64


def parse_response(
    token_ids: Sequence[int],
    format: Format,
    tokenizer: TemplateTokenizer,
    *,
    reasoning_open: bool,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> ParsedResponse:
    """Read a completion. `reasoning_open`: the prompt ended inside reasoning. Any ids parse."""
    stop_ids = {tokenizer.control_id(token) for token in format.stop_tokens}
    stopped = bool(token_ids) and token_ids[-1] in stop_ids
    body = token_ids[:-1] if stopped else token_ids

    machine = _ChannelMachine(format, reasoning_open, _tool_names(tools))
    for lexeme in lex(body, tokenizer, machine.markers):
        machine.feed(lexeme)
    return machine.finish(stopped)


class _ChannelMachine:
    def __init__(self, format: Format, reasoning_open: bool, tool_names: frozenset[str] | None) -> None:
        self._reasoning, self._calls = format.reasoning, format.tool_calls
        self._tool_names = tool_names
        self._in_reasoning = reasoning_open
        self._reasoning_text: list[str] | None = [] if reasoning_open else None
        self._content: list[str] = []
        self._open_call: list[Lexeme] = []
        self._tool_calls: list[ParsedToolCall] = []

    @property
    def markers(self) -> set[str]:
        return {marker for pair in (self._reasoning, self._calls) if pair for marker in (pair.start, pair.end)}

    def feed(self, lexeme: Lexeme) -> None:
        if self._open_call:
            self._open_call.append(lexeme)
            if self._calls and lexeme.marker == self._calls.end:
                self._close_call(closed=True)
        elif self._reasoning and lexeme.marker == self._reasoning.start and not self._in_reasoning:
            self._in_reasoning = True
            self._reasoning_text = self._reasoning_text or []
        elif self._reasoning and lexeme.marker == self._reasoning.end and self._in_reasoning:
            self._in_reasoning = False
        elif self._in_reasoning:
            self._reasoning_text = [*(self._reasoning_text or []), lexeme.text]
        elif self._calls and lexeme.marker == self._calls.start:
            self._open_call.append(lexeme)
        else:
            self._content.append(lexeme.text)

    def finish(self, stopped: bool) -> ParsedResponse:
        if self._open_call:
            self._close_call(closed=False)
        content = "".join(self._content)
        reasoning = None if self._reasoning_text is None else "".join(self._reasoning_text)
        # Templates print line breaks around reasoning and before tool calls; they are layout, not words.
        if reasoning is not None:
            reasoning, content = reasoning.strip("\n"), content.lstrip("\n")
        if self._tool_calls:
            content = content.rstrip("\n")
        return ParsedResponse(content, reasoning, self._tool_calls, not self._in_reasoning, stopped)

    def _close_call(self, *, closed: bool) -> None:
        lexemes, self._open_call = self._open_call, []
        raw = "".join(lexeme.text for lexeme in lexemes)
        inside = "".join(lexeme.text for lexeme in lexemes[1 : -1 if closed else None])
        name, arguments, status = _decode_hermes(inside, self._tool_names)
        if not closed:
            status = ToolCallParseStatus.UNCLOSED
        self._tool_calls.append(ParsedToolCall(raw, name, arguments, (lexemes[0].start, lexemes[-1].end), status))


def _decode_hermes(
    block: str, tool_names: frozenset[str] | None
) -> tuple[str | None, dict[str, Any] | None, ToolCallParseStatus]:
    try:
        call = json.loads(block)
        if "\\u" in block:
            json.dumps(
                call, ensure_ascii=False
            ).encode()  # half a surrogate pair is no text: nothing could show it again
    except (ValueError, RecursionError):
        return None, None, ToolCallParseStatus.INVALID_JSON
    if not isinstance(call, dict):
        return None, None, ToolCallParseStatus.MALFORMED
    name, arguments = call.get("name"), call.get("arguments", {})
    if not isinstance(name, str) or not name:
        return None, None, ToolCallParseStatus.MISSING_NAME
    if not isinstance(arguments, dict) or _deeper_than(arguments, _MAX_DEPTH):
        return name, None, ToolCallParseStatus.MALFORMED
    if tool_names is not None and name not in tool_names:
        return name, arguments, ToolCallParseStatus.UNKNOWN_TOOL
    return name, arguments, ToolCallParseStatus.OK


def _deeper_than(value: Any, levels: int) -> bool:
    """Whether containers are nested more than `levels` deep; level by level, so that no depth exhausts the stack."""
    layer = [value]
    for _ in range(levels):
        containers = [item for item in layer if isinstance(item, (dict, list))]
        layer = [inner for item in containers for inner in (item.values() if isinstance(item, dict) else item)]
    return any(isinstance(item, (dict, list)) for item in layer)


def _tool_names(tools: Sequence[Mapping[str, Any]] | None) -> frozenset[str] | None:
    if tools is None:
        return None
    return frozenset(str(tool.get("function", tool).get("name")) for tool in tools)
