# ruff: noqa: RUF001  (DeepSeek spells its tokens with a fullwidth bar)
"""Every tool-call syntax: a malformed call keeps its text, its token span and the status that names the fault."""

from dataclasses import replace
from typing import Any

import pytest
from bytewise import bytewise_tokenizer, ids_of_text
from tool_call_texts import (
    BLOCKS,
    INVALID_JSON,
    MALFORMED_STRUCTURE,
    NONCANONICAL,
    OK,
    SURPLUS_CALL,
    TOOLS,
    UNKNOWN_TOOL,
    Case,
    fenced,
    m3,
    parse,
    parse_single,
    tokenizer_for,
)

from renderers import ParsedResponse, ToolCallDelta, ToolCallParseStatus
from renderers.formats import by_name
from renderers.parsing.parser import ResponseParser, parse_response

CASES = [(name, case) for name, cases in BLOCKS.items() for case in cases]


@pytest.mark.parametrize(("name", "case"), CASES, ids=[f"{n}-{c.text[:30]}" for n, c in CASES])
def test_every_call_has_its_text_span_and_status(name: str, case: Case) -> None:
    parsed = parse(name, case.text, tools=TOOLS)
    (call,) = parsed.tool_calls
    assert (call.status, call.name, call.arguments) == (case.status, case.name, case.arguments)
    assert call.raw == case.text
    assert parsed.content == ""
    message = parsed.to_message()
    is_call = case.status in (OK, NONCANONICAL, UNKNOWN_TOOL)  # other servers return one of an unknown tool, too
    assert message["content"] == ("" if is_call else case.text)
    names = [call["function"]["name"] for call in message.get("tool_calls", [])]
    assert names == ([case.name] if is_call else [])


@pytest.mark.parametrize("name", [name for name in BLOCKS if not name.startswith("llama")])
def test_a_truncated_completion_keeps_the_incomplete_call_and_invents_none(name: str) -> None:
    case, format, tokenizer = BLOCKS[name][0], by_name(name), tokenizer_for(name)
    ids = ids_of_text(tokenizer, case.text)
    opening = len(ids_of_text(tokenizer, format.tool_calls.start_markers[0] if format.tool_calls else ""))
    for length in range(opening, len(ids)):
        parsed = parse_response(ids[:length], format, tokenizer, reasoning_open=False, tools=TOOLS)
        assert parsed.stopped is False
        assert parsed.content == ""
        assert parsed.tool_calls
        for call in parsed.tool_calls:
            assert call.status is not OK or (call.name, call.arguments) == (case.name, case.arguments)


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        (
            "qwen3",
            '<tool_call>{"name": "look", "arguments": {"q": "x}}</tool_call>\n'
            '<tool_call>{"name": "look", "arguments": {"q": "y"}}</tool_call>',
            [(INVALID_JSON, None), (OK, {"q": "y"})],
        ),
        (
            "qwen3.5",
            "<tool_call><function=look><parameter=q>\nx\n</function>"
            "<function=look><parameter=q>\ny\n</parameter></function></tool_call>",
            [(MALFORMED_STRUCTURE, {"q": "x"}), (OK, {"q": "y"})],
        ),
        (
            "glm-4.5",
            "<tool_call>look<arg_key>q</arg_key><arg_value>x</tool_call>"
            "<tool_call>look<arg_key>q</arg_key><arg_value>y</arg_value></tool_call>",
            [(MALFORMED_STRUCTURE, {"q": "x"}), (OK, {"q": "y"})],
        ),
        (
            "deepseek-v3.1",
            fenced(
                '<｜tool▁call▁begin｜>look<｜tool▁sep｜>{"q": "x<｜tool▁call▁end｜>'
                '<｜tool▁call▁begin｜>look<｜tool▁sep｜>{"q": "y"}<｜tool▁call▁end｜>'
            ),
            [(INVALID_JSON, '{"q": "x'), (OK, {"q": "y"})],
        ),
    ],
)
def test_a_value_without_its_end_takes_nothing_of_the_next_call(
    name: str, text: str, calls: list[tuple[ToolCallParseStatus, Any]]
) -> None:
    parsed = parse(name, text, tools=TOOLS)
    assert [(call.status, call.arguments) for call in parsed.tool_calls] == calls
    assert parsed.content == ""


@pytest.mark.parametrize(
    "name", ["qwen3.5", "hy3", "minimax-m2", "minimax-m3", "deepseek-v3", "deepseek-v4", "kimi-k2"]
)
@pytest.mark.parametrize("keeps_end", [False, True])
def test_a_call_without_the_markers_of_its_block_is_a_call_at_the_end_of_the_turn(name: str, keeps_end: bool) -> None:
    format, (text, _, tool, arguments) = by_name(name), BLOCKS[name][0]
    assert format.tool_calls is not None
    (start,), (end,) = format.tool_calls.start_markers, format.tool_calls.end_markers
    bare = text.removeprefix(start).lstrip()
    bare = bare if keeps_end else bare.removesuffix(end).rstrip()
    call = parse_single(name, f"Now.\n{bare}", tools=TOOLS)
    assert (call.status, call.name, call.arguments, call.raw) == (NONCANONICAL, tool, arguments, bare)
    first, second = parse(name, bare + "\n" + bare, tools=TOOLS).tool_calls
    assert [first.status, second.status, first.raw, second.raw] == [NONCANONICAL, NONCANONICAL, bare, bare]
    assert parse(name, bare + "\n" + text, tools=TOOLS).tool_calls[1].status is OK
    unknown = [{"type": "function", "function": {"name": "other"}}]
    if not keeps_end:
        parsed = parse(name, f"Write\n{bare} in your answer.", tools=TOOLS)
        assert (parsed.content, parsed.tool_calls) == (f"Write\n{bare} in your answer.", [])
    for content, tools in ((bare, unknown), (bare[: len(bare) // 2], TOOLS)):
        parsed = parse(name, content, tools=tools)
        assert (parsed.content, parsed.tool_calls) == (content, [])
    # Text that only begins like a call takes nothing of the calls behind it.
    begin = bare[: bare.index("look")] + "..."
    assert parse_single(name, begin + text, tools=TOOLS).status is OK


SEVERAL = {
    "minimax-m2": ("<minimax:tool_call>\n{}\n{}\n</minimax:tool_call>", '<invoke name="{}">\n</invoke>'),
    "minimax-m3": (m3("<tool_call>\n{}\n{}\n</tool_call>"), m3('<invoke name="{}"></invoke>')),
    "deepseek-v3": (
        fenced("{}\n{}"),
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{{}}\n```<｜tool▁call▁end｜>",
    ),
    "kimi-k2": (
        "<|tool_calls_section_begin|>{}{}<|tool_calls_section_end|>",
        "<|tool_call_begin|>functions.{}:0<|tool_call_argument_begin|>{{}}<|tool_call_end|>",
    ),
    "qwen3.5": ("<tool_call>{}\n{}</tool_call>", "<function={}>\n</function>"),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_text_between_calls_is_kept_as_a_malformed_call(name: str) -> None:
    block, template = SEVERAL[name]
    parsed = parse(name, block.format(template.format("look") + "junk", template.format("see")))
    names = [("look", OK), (None, MALFORMED_STRUCTURE), ("see", OK)]
    assert [(call.name, call.status) for call in parsed.tool_calls] == names
    assert parsed.tool_calls[1].raw.strip() == "junk"


def test_where_a_format_has_one_call_in_a_turn_further_ones_are_surplus_and_stay_text() -> None:
    format, tokenizer = replace(by_name("llama-3.1"), one_call=True), tokenizer_for("llama-3.1")
    first, second = '{"name": "look", "parameters": {}}', '{"name": "see", "parameters": {}}'
    ids = ids_of_text(tokenizer, f"{first}; {second}")
    parser = ResponseParser(format, tokenizer, reasoning_open=False)
    deltas = [*parser.feed(ids), *parser.end()]
    parsed = parser.finish()
    assert [each.call for each in deltas if isinstance(each, ToolCallDelta) and each.call] == parsed.tool_calls
    assert [(call.name, call.status) for call in parsed.tool_calls] == [("look", OK), ("see", SURPLUS_CALL)]
    message = parsed.to_message()
    assert message["content"] == second
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["look"]
    offered = [{"type": "function", "function": {"name": "see", "parameters": {}}}]
    parsed = parse_response(ids, format, tokenizer, reasoning_open=False, tools=offered)
    assert [(call.name, call.status) for call in parsed.tool_calls] == [("look", UNKNOWN_TOOL), ("see", SURPLUS_CALL)]


@pytest.mark.parametrize(
    ("text", "calls", "content"),
    [
        ("{one}<|python_tag|>{two}", [OK, OK], ""),
        ("<|python_tag|>{one}<|python_tag|>{two}", [OK, OK], ""),
        ("{one}\nI called it.", [OK], "I called it."),
        ("<|python_tag|>{one} I called it.", [OK], "I called it."),
        ("{one}; {two}; then", [OK, OK], "then"),
        ("{one} is how one calls <|python_tag|>{two}", [], None),
        ('{{"name": "jump", "parameters": {{}}}} is a call', [], None),
    ],
)
def test_llama_calls_are_divided_by_a_tag_or_followed_by_text(
    text: str, calls: list[ToolCallParseStatus], content: str | None
) -> None:
    one, two = '{"name": "look", "parameters": {"q": "<|python_tag|>"}}', '{"name": "look", "parameters": {"n": 1}}'
    text = text.format(one=one, two=two)
    format = replace(by_name("llama-3.1"), one_call=False)
    tokenizer = tokenizer_for("llama-3.1")
    parsed = parse_response(ids_of_text(tokenizer, text), format, tokenizer, reasoning_open=False, tools=TOOLS)
    assert [call.status for call in parsed.tool_calls] == [NONCANONICAL for _ in calls]
    assert [call.arguments for call in parsed.tool_calls] == [{"q": "<|python_tag|>"}, {"n": 1}][: len(calls)]
    assert parsed.content == (text if content is None else content)


def test_an_id_of_kimi_that_may_name_two_tools_names_none() -> None:
    tools = [*TOOLS, {"type": "function", "function": {"name": "look5"}}]
    block = (
        "<|tool_calls_section_begin|><|tool_call_begin|>{}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
        "<|tool_calls_section_end|>"
    )
    assert parse_single("kimi-k2", block.format("functionslook5"), tools=tools).status is MALFORMED_STRUCTURE
    call = parse_single("kimi-k2", block.format("functions.look5:0"), tools=tools)
    assert (call.status, call.name, call.id) == (OK, "look5", "functions.look5:0")
    call = parse_single("kimi-k2", block.format("functions_look_5"), tools=None)
    assert (call.status, call.name, call.id) == (NONCANONICAL, "look", "functions_look_5")


def phi(text: str) -> ParsedResponse:
    tokenizer, format = bytewise_tokenizer(["<|end|>", "<|tool_call|>", "<|/tool_call|>"]), by_name("phi-4-mini")
    return parse_response(ids_of_text(tokenizer, text), format, tokenizer, reasoning_open=False, tools=TOOLS)


def test_phi_writes_calls_as_functools_at_the_beginning_of_a_turn() -> None:
    one = '{"name": "look", "arguments": {"q": "<|/tool_call|>]"}}'
    for text, count in ((f"functools[{one}]", 1), (f" functools[{one}, {one}]<|end|>", 2)):
        parsed = phi(text)
        calls = [(call.status, call.arguments) for call in parsed.tool_calls]
        assert (calls, parsed.content) == ([(NONCANONICAL, {"q": "<|/tool_call|>]"})] * count, "")
    assert [call.status for call in phi("functools[{]<|end|>").tool_calls] == [INVALID_JSON]
    assert [call.status for call in phi(f"<|tool_call|>[{one}]<|/tool_call|>").tool_calls] == [OK]
    for text in ("functools", "functools.wraps(f)", "functools[0]", f"Now functools[{one}]"):
        assert (phi(text).content, phi(text).tool_calls) == (text, [])
    parsed = phi(f"functools.<|tool_call|>[{one}]<|/tool_call|>")
    assert (parsed.content, [call.status for call in parsed.tool_calls]) == ("functools.", [OK])


@pytest.mark.parametrize(
    ("name", "broken", "whole"),
    [
        ("qwen3", r'<tool_call>"\"</tool_call>', '<tool_call>{"name": "look", "arguments": {"q": "a"}}</tool_call>'),
        (
            "qwen3.5",
            r'<tool_call><function=f><parameter=q>{"\"</tool_call>',
            "<tool_call><function=look><parameter=q>\na\n</parameter></function></tool_call>",
        ),
        ("mistral", r'[TOOL_CALLS]f[ARGS]{"\"', '[TOOL_CALLS]look[ARGS]{"q": "a"}'),
    ],
)
def test_a_call_behind_many_whose_values_have_lost_their_ends_is_read(name: str, broken: str, whole: str) -> None:
    *lost, last = parse(name, broken * 40 + whole).tool_calls
    assert len(lost) == 40
    assert not any(call.status.is_well_formed for call in lost)
    assert (last.name, last.arguments, last.status) == ("look", {"q": "a"}, OK)


@pytest.mark.parametrize(
    ("name", "call", "before", "behind", "status"),
    [
        (
            "qwen3.5",
            "<function=look>\n<parameter=q>\n{}\n</parameter>\n</function>\n",
            "<tool_call>",
            "</tool_call>",
            OK,
        ),
        ("glm-4.5", "<tool_call>look<arg_key>q</arg_key><arg_value>{}</arg_value></tool_call>\n", "", "", OK),
        ("minimax-m2", '<invoke name="look"><parameter name="q">{}</parameter></invoke>\n', "", "", NONCANONICAL),
    ],
)
@pytest.mark.parametrize("text", ['[INFO] disk 3.5" full', '{{"', '[{"a": "'])
def test_texts_that_begin_like_json_without_its_end_take_nothing_of_later_calls(
    name: str, call: str, before: str, behind: str, status: ToolCallParseStatus, text: str
) -> None:
    (end,) = by_name(name).tool_calls.end_markers  # type: ignore[union-attr]
    values = [*[text] * 20, f"a {end} b"]
    parsed = parse(name, before + "".join(map(call.format, values)) + behind, tools=TOOLS)
    assert [(made.status, made.arguments) for made in parsed.tool_calls] == [(status, {"q": value}) for value in values]
    assert parsed.content.strip() == ""
