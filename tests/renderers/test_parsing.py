"""Sampled ids -> content, reasoning, tool calls; any ids parse."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from spelling import ids_of

from renderers import ParsedResponse, ParsedToolCall, TemplateRenderer, ToolCallParseStatus

TOOLS = [{"type": "function", "function": {"name": "look"}}, {"name": "bare"}]


def parse(renderer: TemplateRenderer, *pieces: str, **options: Any) -> ParsedResponse:
    return renderer.parse_response(ids_of(renderer, *pieces), **options)


# Tool calls.


STATUSES: dict[str, tuple[str, ToolCallParseStatus, str | None, dict[str, Any] | None]] = {
    "ok": ('{"name": "look", "arguments": {"a": 1}}', ToolCallParseStatus.OK, "look", {"a": 1}),
    "no arguments": ('{"name": "look"}', ToolCallParseStatus.OK, "look", {}),
    "not json": ('{"name": look}', ToolCallParseStatus.INVALID_JSON, None, None),
    "empty": ("", ToolCallParseStatus.INVALID_JSON, None, None),
    "half": ('{"name": "look", "arguments": {', ToolCallParseStatus.INVALID_JSON, None, None),
    "huge number": (
        f'{{"name": "look", "arguments": {{"a": {"9" * 5000}}}}}',
        ToolCallParseStatus.INVALID_JSON,
        None,
        None,
    ),
    "bottomless": ("[" * 20_000, ToolCallParseStatus.INVALID_JSON, None, None),
    "half a character": (
        '{"name": "look", "arguments": {"a": "\\ud800"}}',
        ToolCallParseStatus.INVALID_JSON,
        None,
        None,
    ),
    "escapes": (
        '{"name": "look", "arguments": {"a": "\\ud83d\\ude00"}}',
        ToolCallParseStatus.OK,
        "look",
        {"a": "\U0001f600"},
    ),
    "a list": ("[]", ToolCallParseStatus.MALFORMED_STRUCTURE, None, None),
    "a string": ('"look"', ToolCallParseStatus.MALFORMED_STRUCTURE, None, None),
    "missing name": ('{"arguments": {}}', ToolCallParseStatus.MISSING_NAME, None, None),
    "empty name": ('{"name": "", "arguments": {}}', ToolCallParseStatus.MISSING_NAME, None, None),
    "number for a name": ('{"name": 3, "arguments": {}}', ToolCallParseStatus.MISSING_NAME, None, None),
    "list of arguments": ('{"name": "look", "arguments": [1]}', ToolCallParseStatus.MALFORMED_STRUCTURE, "look", None),
    "arguments as text": ('{"name": "look", "arguments": "{}"}', ToolCallParseStatus.MALFORMED_STRUCTURE, "look", None),
    "parameters": ('{"name": "look", "parameters": {"a": 1}}', ToolCallParseStatus.NONCANONICAL, "look", {"a": 1}),
    "unknown key": (
        '{"name": "look", "arguments": {"a": 1}, "b": 2}',
        ToolCallParseStatus.MALFORMED_STRUCTURE,
        "look",
        {"a": 1},
    ),
    "unknown": ('{"name": "jump", "arguments": {}}', ToolCallParseStatus.UNKNOWN_TOOL, "jump", {}),
    "deep": (
        '{"name": "look", "arguments": {"a": ' + "[" * 60 + "]" * 60 + "}}",
        ToolCallParseStatus.OK,
        "look",
        {"a": json.loads("[" * 60 + "]" * 60)},
    ),
    "too deep": (
        '{"name": "look", "arguments": {"a": ' + "[" * 300 + "]" * 300 + "}}",
        ToolCallParseStatus.MALFORMED_STRUCTURE,
        "look",
        None,
    ),
}


@pytest.mark.parametrize("name", STATUSES)
def test_every_attempt_is_kept_with_its_status(renderer: TemplateRenderer, name: str) -> None:
    block, status, tool, arguments = STATUSES[name]
    parsed = parse(renderer, "a", "<tool_call>", block, "</tool_call>", "<|im_end|>", tools=TOOLS)
    raw = f"<tool_call>{block}</tool_call>"
    assert parsed.tool_calls == [ParsedToolCall(raw, tool, arguments, (1, 1 + len(block) + 2), status)]
    message = parsed.to_message()
    if status in (ToolCallParseStatus.OK, ToolCallParseStatus.NONCANONICAL, ToolCallParseStatus.UNKNOWN_TOOL):
        assert message["content"] == "a"
        assert [call["function"]["name"] for call in message["tool_calls"]] == [tool]
    else:
        assert message["content"] == f"a{raw}"
        assert "tool_calls" not in message


# Render, then parse.

words = st.text(max_size=10).filter(lambda text: "<" not in text)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False) | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)
tool_calls = st.lists(
    st.tuples(st.sampled_from(["look", "go_to", "ünï"]), st.dictionaries(words, json_values, max_size=3)), max_size=3
)


@pytest.mark.slow
@settings(max_examples=80)
@given(content=words, calls=tool_calls)
def test_parsing_what_was_rendered_gives_the_message_back(
    renderer: TemplateRenderer, content: str, calls: list[tuple[str, dict[str, Any]]]
) -> None:
    content = content.rstrip("\n") if calls else content
    message = {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"function": {"name": name, "arguments": arguments}} for name, arguments in calls],
    }
    rendered = renderer.render([{"role": "user", "content": "x"}, message])
    sampled = [t for t, chosen in zip(rendered.token_ids, rendered.sampled_mask, strict=True) if chosen]
    parsed = renderer.parse_response(sampled)
    assert parsed.content == content
    assert [(call.name, call.arguments, call.status) for call in parsed.tool_calls] == [
        (name, json.loads(json.dumps(arguments)), ToolCallParseStatus.OK) for name, arguments in calls
    ]
    assert parsed.stopped
    assert parsed.reasoning_content is None
    for call in parsed.tool_calls:
        assert renderer.tokenizer.decode(sampled[slice(*call.token_span)]) == call.raw
