"""Formats that users write: a syntax of tool calls as a subclass, and the values that a `Format` refuses."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from bytewise import bytewise_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from renderers.errors import ConfigError
from renderers.formats import (
    Attempt,
    CallText,
    Format,
    InvalidJsonError,
    JsonCalls,
    ReasoningMarkers,
    ToolCallParseStatus,
    ToolCallSyntax,
)
from renderers.parsing.parser import ResponseParser, parse_response


@dataclass(frozen=True, slots=True)
class LineCalls(ToolCallSyntax):
    """`[call]`, the name, a line `key: value` for each argument, `[/call]`; values are typed by the tool's schema."""

    start_markers: tuple[str, ...] = ("[call]",)
    end_markers: tuple[str, ...] = ("[/call]",)

    def attempts(self, block: CallText) -> list[Attempt]:
        name, *lines = block.plain_text(*block.body).strip("\n").split("\n")
        schema = block.tools.of_arguments(name)
        arguments: dict[str, Any] = {}
        for line in lines:
            key, separator, value = line.partition(": ")
            if not separator or key in arguments:
                return [block.failed(name=name)]
            try:
                arguments[key] = schema.property(key).parse_value(value)
            except InvalidJsonError:
                return [block.failed(ToolCallParseStatus.INVALID_JSON, name)]
        return [block.attempt(name, arguments)]


class UndecoratedCalls(ToolCallSyntax):
    start_markers = ("[call]",)

    def attempts(self, block: CallText) -> list[Attempt]:
        return [block.failed()]


LINES = Format("lines", ("<|im_end|>",), ReasoningMarkers("[thoughts]", "[/thoughts]"), LineCalls())
TOKENIZER = bytewise_tokenizer(["<|im_end|>"])
PROPERTIES = {"text": {"type": "string"}, "number": {"type": "integer"}}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"properties": PROPERTIES}}}]


def ids(text: str) -> list[int]:
    return TOKENIZER.encode_scaffold(text)


@given(
    st.text(st.characters(exclude_categories=["C", "Z"], exclude_characters="[")),
    st.integers(-(10**9), 10**9),
    st.data(),
)
def test_a_syntax_of_a_user_is_read_whole_streamed_and_cut_off(text: str, number: int, data: st.DataObject) -> None:
    completion = ids(f"[thoughts]Hm.[/thoughts]Now.[call]\nlook\ntext: {text}\nnumber: {number}\n[/call]<|im_end|>")
    whole = parse_response(completion, LINES, TOKENIZER, reasoning_open=False, tools=TOOLS)
    assert (whole.reasoning_content, whole.content) == ("Hm.", "Now.")
    assert [(call.name, call.arguments, call.status) for call in whole.tool_calls] == [
        ("look", {"text": text, "number": number}, ToolCallParseStatus.OK)
    ]
    cut = data.draw(st.integers(0, len(completion)))
    parser = ResponseParser(LINES, TOKENIZER, reasoning_open=False, tools=TOOLS)
    parser.feed(completion[:cut])
    partly = parse_response(completion[:cut], LINES, TOKENIZER, reasoning_open=False, tools=TOOLS)
    assert {call.status for call in partly.tool_calls} <= {ToolCallParseStatus.OK, ToolCallParseStatus.UNCLOSED_BLOCK}
    parser.feed(completion[cut:])
    assert parser.finish() == whole


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: Format("mine", "<|im_end|>"), "stop_tokens of the Format mine is '<|im_end|>'; it can be a tuple"),
        (lambda: Format("mine", ()), r"stop_tokens of the Format mine is \(\); it can be a tuple of texts, of which"),
        (
            lambda: Format("mine", ("a",), history_ends=["b"]),
            "history_ends of the Format mine is .*; it can be a tuple",
        ),
        (lambda: Format("mine", ("a",), tool_calls=JsonCalls("<fn>")), "start_markers of the Format mine is '<fn>'"),
        (
            lambda: Format("mine", ("a",), tool_calls=UndecoratedCalls()),
            r"start_markers of UndecoratedCalls is \(\); it can be .* in a class with @dataclass\(frozen=True\)",
        ),
    ],
)
def test_a_format_refuses_values_with_which_it_would_read_nothing(make: Callable[[], Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        make()
