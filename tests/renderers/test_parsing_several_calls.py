# ruff: noqa: RUF001  (DeepSeek spells its tokens with a fullwidth bar, which counts as two columns)
"""Several tool calls in the same block: the text and span of each, and the text between them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from bytewise import ids_of_text
from tool_call_texts import (
    MALFORMED_STRUCTURE,
    OK,
    SURPLUS_CALL,
    UNKNOWN_TOOL,
    fenced,
    m3,
    parse,
    tokenizer_for,
)

from renderers import ToolCallDelta
from renderers.formats import by_name
from renderers.parsing.parser import ResponseParser, parse_response

SEVERAL = {
    "minimax-m2": ('<minimax:tool_call>\n{}\n{}\n</minimax:tool_call>', '<invoke name="{}">\n</invoke>'),
    "minimax-m3": (m3("<tool_call>\n{}\n{}\n</tool_call>"), m3('<invoke name="{}"></invoke>')),
    "deepseek-v3": (
        fenced("{}\n{}"), "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{{}}\n```<｜tool▁call▁end｜>"
    ),
    "deepseek-v4": (
        "<｜DSML｜tool_calls>\n{}\n{}\n</｜DSML｜tool_calls>", '<｜DSML｜invoke name="{}">\n\n</｜DSML｜invoke>'
    ),
    "kimi-k2": (
        "<|tool_calls_section_begin|>{}{}<|tool_calls_section_end|>",
        "<|tool_call_begin|>functions.{}:0<|tool_call_argument_begin|>{{}}<|tool_call_end|>",
    ),
    "qwen3.5": ("<tool_call>{}\n{}</tool_call>", "<function={}>\n</function>"),
}  # fmt: skip


@pytest.mark.parametrize("name", ["minimax-m2", "minimax-m3", "deepseek-v3", "deepseek-v4", "kimi-k2", "qwen3.5"])
def test_text_between_calls_is_kept_as_a_malformed_call(name: str) -> None:
    block, template = SEVERAL[name]
    parsed = parse(name, block.format(template.format("look") + "junk", template.format("see")))
    assert [(call.name, call.status) for call in parsed.tool_calls] == [
        ("look", OK),
        (None, MALFORMED_STRUCTURE),
        ("see", OK),
    ]
    assert parsed.tool_calls[1].raw.strip() == "junk"


def test_where_a_format_has_one_call_in_a_turn_further_ones_are_surplus_and_stay_text() -> None:
    format, tokenizer = by_name("llama-3.1"), tokenizer_for("llama-3.1")
    first, second = '{"name": "look", "parameters": {}}', '{"name": "see", "parameters": {}}'
    ids = ids_of_text(tokenizer, f"{first}; {second}")
    parser = ResponseParser(replace(format, one_call=True), tokenizer, reasoning_open=False)
    deltas = [*parser.feed(ids), *parser.end()]
    parsed = parser.finish()
    assert [each.call for each in deltas if isinstance(each, ToolCallDelta) and each.call] == parsed.tool_calls
    assert [(call.name, call.status) for call in parsed.tool_calls] == [("look", OK), ("see", SURPLUS_CALL)]
    message = parsed.to_message()
    assert message["content"] == second
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["look"]
    assert all(call.status is OK for call in parse_response(ids, format, tokenizer, reasoning_open=False).tool_calls)
    offered = [{"type": "function", "function": {"name": "see", "parameters": {}}}]
    parsed = parse_response(ids, replace(format, one_call=True), tokenizer, reasoning_open=False, tools=offered)
    assert [(call.name, call.status) for call in parsed.tool_calls] == [("look", UNKNOWN_TOOL), ("see", SURPLUS_CALL)]
    assert [call["function"]["name"] for call in parsed.to_message()["tool_calls"]] == ["look"]
