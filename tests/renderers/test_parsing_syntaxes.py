# ruff: noqa: RUF001, E501  (DeepSeek spells its tokens with a fullwidth bar, which counts as two columns)
"""Every tool-call syntax: what is malformed keeps its text, its place and the status that says why."""

from __future__ import annotations

import functools
import json
from typing import Any, NamedTuple

import pytest
from bytewise import bytewise_tokenizer, ids_of_text
from hypothesis import given, settings
from hypothesis import strategies as st

from renderers import ParsedResponse, ParsedToolCall, ToolCallParseStatus
from renderers.formats import Format, by_name, names
from renderers.parsing import parse_response
from renderers.parsing.json_text import MAX_DEPTH, is_deeper_than
from renderers.tokens.tokenizer import TemplateTokenizer

OK = ToolCallParseStatus.OK
INVALID_JSON = ToolCallParseStatus.INVALID_JSON
UNCLOSED = ToolCallParseStatus.UNCLOSED
MISSING_NAME = ToolCallParseStatus.MISSING_NAME
MALFORMED = ToolCallParseStatus.MALFORMED
UNKNOWN_TOOL = ToolCallParseStatus.UNKNOWN_TOOL

#: Control tokens that the tokenizers of each family have.
CONTROL: dict[str, tuple[str, ...]] = {
    "qwen3": ("<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"),
    "glm-4.5": (
        "<|user|>", "<|observation|>", "<|endoftext|>", "<think>", "</think>", "<tool_call>", "</tool_call>",
        "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
    ),
    "minimax-m2": ("[e~[", "<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>"),
    "minimax-m3": ("[e~[", "]<]minimax[>[", "<mm:think>", "</mm:think>", "<tool_call>", "</tool_call>"),
    "deepseek-v3": (
        "<｜end▁of▁sentence｜>", "<think>", "</think>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
    ),
    "deepseek-v4": ("<｜end▁of▁sentence｜>", "<think>", "</think>", "｜DSML｜"),
    "kimi-k2": (
        "<|im_end|>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>", "<|tool_call_end|>",
    ),
    "mistral": ("</s>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"),
    "gemma-4": ("<turn|>", "<|tool_response>", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'),
    "lfm2": ("<|im_end|>", "<|tool_call_start|>", "<|tool_call_end|>"),
    "llama-3.1": ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|python_tag|>"),
    "llama-4-pythonic": ("<|eot|>", "<|eom|>", "<|end_of_text|>"),
}  # fmt: skip
CONTROL["qwen3.5"] = CONTROL["qwen3"]
CONTROL["deepseek-v3.1"] = CONTROL["deepseek-v3"]
CONTROL["deepseek-v3.2"] = CONTROL["deepseek-v4"]

LOOK = {
    "name": "look",
    "parameters": {
        "type": "object",
        "properties": {"q": {"type": "string"}, "n": {"type": "integer"}, "xs": {"type": "array"}},
    },
}
TOOLS = [{"type": "function", "function": LOOK}]


@functools.cache
def tokenizer_for(name: str, *, textual: bool = False) -> TemplateTokenizer:
    """`textual`: only the stop tokens are tokens, every marker is text."""
    return bytewise_tokenizer(by_name(name).stop_tokens if textual else CONTROL[name])


def parse(name: str, text: str, *, tools: Any = None, stop: bool = True, textual: bool = False) -> ParsedResponse:
    format, tokenizer = by_name(name), tokenizer_for(name, textual=textual)
    ids = ids_of_text(tokenizer, text + (format.stop_tokens[0] if stop else ""))
    parsed = parse_response(ids, format, tokenizer, reasoning_open=False, tools=tools)
    position = 0
    for call in parsed.tool_calls:
        start, end = call.token_span
        assert position <= start < end <= len(ids)
        assert tokenizer.decode(ids[start:end]) == call.raw
        position = end
    return parsed


def one(name: str, text: str, **options: Any) -> ParsedToolCall:
    (call,) = parse(name, text, **options).tool_calls
    return call


class Case(NamedTuple):
    text: str
    status: ToolCallParseStatus
    name: str | None = None
    arguments: dict[str, Any] | None = None


def m3(text: str) -> str:
    """Every tag behind MiniMax's namespace token."""
    return text.replace("<", "]<]minimax[>[<")


def fenced(inner: str) -> str:
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


BLOCKS: dict[str, list[Case]] = {
    "qwen3.5": [
        Case("<tool_call>\n<function=look>\n<parameter=q>\nä\nb\n</parameter>\n<parameter=n>\n2\n</parameter>\n"
             "</function>\n</tool_call>", OK, "look", {"q": "ä\nb", "n": 2}),
        Case("<tool_call>\n<function=look>\n</function>\n</tool_call>", OK, "look", {}),
        Case("<tool_call><function=look><parameter=n>two</parameter></function></tool_call>", INVALID_JSON, "look",
             {"n": "two"}),
        Case("<tool_call><function=look><parameter=q>x</function></tool_call>", MALFORMED, "look", {}),
        Case("<tool_call><function=look>junk</function></tool_call>", MALFORMED, "look", {}),
        Case("<tool_call><function=look", UNCLOSED),
        Case("<tool_call><function=look></tool_call>", UNCLOSED, "look", {}),
        Case("<tool_call><function=></function></tool_call>", MISSING_NAME),
        Case("<tool_call>look</tool_call>", MALFORMED),
        Case("<tool_call></tool_call>", MALFORMED),
        Case("<tool_call><function=look><parameter=q>\nx\n</parameter></function>", UNCLOSED, "look", {"q": "x"}),
        Case("<tool_call><function=jump></function></tool_call>", UNKNOWN_TOOL, "jump", {}),
    ],
    "glm-4.5": [
        Case("<tool_call>look\n<arg_key>q</arg_key>\n<arg_value>1</arg_value>\n<arg_key>n</arg_key>\n<arg_value>2"
             "</arg_value>\n</tool_call>", OK, "look", {"q": "1", "n": 2}),
        Case("<tool_call>look<arg_key>n</arg_key><arg_value>x</arg_value></tool_call>", INVALID_JSON, "look",
             {"n": "x"}),
        Case("<tool_call>look<arg_key>q</arg_key></tool_call>", MALFORMED, "look", {}),
        Case("<tool_call>look<arg_key>q<arg_key>n</arg_key><arg_value>1</arg_value></tool_call>", MALFORMED, "look",
             {"n": 1}),
        Case("<tool_call>look<arg_key>q</arg_key><arg_value>x</tool_call>", MALFORMED, "look", {}),
        Case("<tool_call><arg_key>q</arg_key><arg_value>x</arg_value></tool_call>", MISSING_NAME),
        Case("<tool_call>look<arg_key>q</arg_key><arg_value>x</arg_value>", UNCLOSED, "look", {"q": "x"}),
        Case("<tool_call>jump</tool_call>", UNKNOWN_TOOL, "jump", {}),
    ],
    "minimax-m2": [
        Case('<minimax:tool_call>\n<invoke name="look">\n<parameter name="q">a</parameter>\n<parameter name="xs">[1]'
             "</parameter>\n</invoke>\n</minimax:tool_call>", OK, "look", {"q": "a", "xs": [1]}),
        Case('<minimax:tool_call><invoke name="look"><parameter name="n">x</parameter></invoke></minimax:tool_call>',
             INVALID_JSON, "look", {"n": "x"}),
        Case('<minimax:tool_call><invoke name="look"><parameter name="n">1</invoke></minimax:tool_call>', MALFORMED,
             "look", {}),
        Case("<minimax:tool_call><invoke name=look></invoke></minimax:tool_call>", MALFORMED),
        Case('<minimax:tool_call><invoke name=""></invoke></minimax:tool_call>', MISSING_NAME),
        Case('<minimax:tool_call><invoke name="look">', UNCLOSED, "look", {}),
        Case("<minimax:tool_call>look()</minimax:tool_call>", MALFORMED),
        Case('<minimax:tool_call><invoke name="jump"></invoke></minimax:tool_call>', UNKNOWN_TOOL, "jump", {}),
    ],
    "minimax-m3": [
        Case(m3('<tool_call>\n<invoke name="look"><q>a</q><n>2</n><xs><item>1</item><item>b</item></xs></invoke>\n'
                "</tool_call>"), OK, "look", {"q": "a", "n": 2, "xs": [1, "b"]}),
        Case(m3('<tool_call><invoke name="look"><n>x</n></invoke></tool_call>'), INVALID_JSON, "look"),
        Case(m3('<tool_call><invoke name="look"><n>1</q></invoke></tool_call>'), MALFORMED, "look"),
        Case(m3('<tool_call><invoke name="look"></n></invoke></tool_call>'), MALFORMED, "look"),
        Case(m3('<tool_call><invoke name="look"><n></invoke></tool_call>'), MALFORMED, "look"),
        Case(m3('<tool_call><invoke name=""></invoke></tool_call>'), MISSING_NAME),
        Case(m3("<tool_call><invoke look></invoke></tool_call>"), MALFORMED),
        Case(m3('<tool_call><invoke name="look">' + "<a>" * 99 + "</a>" * 99 + "</invoke></tool_call>"), MALFORMED,
             "look"),
        Case(m3('<tool_call><invoke name="look"><q>a'), UNCLOSED, "look"),
        Case(m3('<tool_call><invoke name="jump"></invoke></tool_call>'), UNKNOWN_TOOL, "jump", {}),
    ],
    "deepseek-v3": [
        Case(fenced('<｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n{"q": "a"}\n```<｜tool▁call▁end｜>'), OK,
             "look", {"q": "a"}),
        Case(fenced("<｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n{q}\n```<｜tool▁call▁end｜>"),
             INVALID_JSON, "look"),
        Case(fenced('<｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n{"q": "a"}<｜tool▁call▁end｜>'), MALFORMED, "look"),
        Case(fenced("<｜tool▁call▁begin｜>function look<｜tool▁call▁end｜>"), MALFORMED),
        Case(fenced("<｜tool▁call▁begin｜>function<｜tool▁sep｜>\n```json\n{}\n```<｜tool▁call▁end｜>"), MISSING_NAME),
        Case(fenced("look"), MALFORMED),
        Case(fenced(""), MALFORMED),
        Case("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n{}", UNCLOSED, "look"),
        Case(fenced("<｜tool▁call▁begin｜>function<｜tool▁sep｜>jump\n```json\n{}\n```<｜tool▁call▁end｜>"), UNKNOWN_TOOL,
             "jump", {}),
    ],
    "deepseek-v3.1": [
        Case(fenced('<｜tool▁call▁begin｜>look<｜tool▁sep｜>{"q": "a"}<｜tool▁call▁end｜>'), OK, "look", {"q": "a"}),
        Case(fenced("<｜tool▁call▁begin｜>look<｜tool▁sep｜>{<｜tool▁call▁end｜>"), INVALID_JSON, "look"),
        Case(fenced("<｜tool▁call▁begin｜>look<｜tool▁sep｜>[]<｜tool▁call▁end｜>"), MALFORMED, "look"),
        Case(fenced("<｜tool▁call▁begin｜><｜tool▁sep｜>{}<｜tool▁call▁end｜>"), MISSING_NAME),
        Case("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>{}", UNCLOSED, "look", {}),
        Case(fenced("<｜tool▁call▁begin｜>jump<｜tool▁sep｜>{}<｜tool▁call▁end｜>"), UNKNOWN_TOOL, "jump", {}),
    ],
    "deepseek-v4": [
        Case('<｜DSML｜tool_calls>\n<｜DSML｜invoke name="look">\n<｜DSML｜parameter name="q" string="true">1'
             '</｜DSML｜parameter>\n<｜DSML｜parameter name="n" string="false">1</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
             "</｜DSML｜tool_calls>", OK, "look", {"q": "1", "n": 1}),
        Case('<｜DSML｜tool_calls><｜DSML｜invoke name="look"><｜DSML｜parameter name="n" string="false">x'
             "</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜tool_calls>", INVALID_JSON, "look", {"n": "x"}),
        Case('<｜DSML｜tool_calls><｜DSML｜invoke name="look"><｜DSML｜parameter name="n" string="maybe">x'
             "</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜tool_calls>", MALFORMED, "look", {}),
        Case('<｜DSML｜tool_calls><｜DSML｜invoke name="look">', UNCLOSED, "look", {}),
        Case('<｜DSML｜tool_calls><｜DSML｜invoke name=""></｜DSML｜invoke></｜DSML｜tool_calls>', MISSING_NAME),
        Case('<｜DSML｜tool_calls><｜DSML｜invoke name="jump"></｜DSML｜invoke></｜DSML｜tool_calls>', UNKNOWN_TOOL,
             "jump", {}),
    ],
    "kimi-k2": [
        Case("<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>{\"n\": 1}"
             "<|tool_call_end|><|tool_calls_section_end|>", OK, "look", {"n": 1}),
        Case("<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>n"
             "<|tool_call_end|><|tool_calls_section_end|>", INVALID_JSON, "look"),
        Case("<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_end|>"
             "<|tool_calls_section_end|>", MALFORMED),
        Case("<|tool_calls_section_begin|><|tool_call_begin|>functions.:0<|tool_call_argument_begin|>{}"
             "<|tool_call_end|><|tool_calls_section_end|>", MISSING_NAME),
        Case("<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>{}", UNCLOSED,
             "look", {}),
        Case("<|tool_calls_section_begin|>look<|tool_calls_section_end|>", MALFORMED),
        Case("<|tool_calls_section_begin|><|tool_call_begin|>jump<|tool_call_argument_begin|>{}<|tool_call_end|>"
             "<|tool_calls_section_end|>", UNKNOWN_TOOL, "jump", {}),
    ],
    "mistral": [
        Case('[TOOL_CALLS][{"name": "look", "arguments": {"n": 1}, "id": "abcdefghi"}]', OK, "look", {"n": 1}),
        Case('[TOOL_CALLS]look[ARGS]{"n": 1}', OK, "look", {"n": 1}),
        Case('[TOOL_CALLS]look[CALL_ID]abcdefghi[ARGS]{"n": 1}', OK, "look", {"n": 1}),
        Case("[TOOL_CALLS]look[ARGS]{", INVALID_JSON, "look"),
        Case("[TOOL_CALLS][ARGS]{}", MISSING_NAME),
        Case("[TOOL_CALLS]look", MALFORMED),
        Case('[TOOL_CALLS][{"arguments": {}}]', MISSING_NAME),
        Case('[TOOL_CALLS][{"name": ', INVALID_JSON),
        Case("[TOOL_CALLS]jump[ARGS]{}", UNKNOWN_TOOL, "jump", {}),
    ],
    "gemma-4": [
        Case('<|tool_call>call:look{n:2,q:<|"|>a "b" {,<|"|>,xs:[1,{k:null}]}<tool_call|>', OK, "look",
             {"q": 'a "b" {,', "n": 2, "xs": [1, {"k": None}]}),
        Case("<|tool_call>call:look{}<tool_call|>", OK, "look", {}),
        Case("<|tool_call>call:look{n:}<tool_call|>", MALFORMED, "look"),
        Case("<|tool_call>call:look{n:1<tool_call|>", MALFORMED, "look"),
        Case("<|tool_call>call:look{n:1}}<tool_call|>", MALFORMED, "look", {"n": 1}),
        Case("<|tool_call>call:look{n:" + "[" * 99 + "]" * 99 + "}<tool_call|>", MALFORMED, "look"),
        Case('<|tool_call>{"name": "look"}<tool_call|>', MALFORMED),
        Case("<|tool_call>call:{}<tool_call|>", MISSING_NAME),
        Case("<|tool_call>call:look{}", UNCLOSED, "look", {}),
        Case("<|tool_call>call:jump{}<tool_call|>", UNKNOWN_TOOL, "jump", {}),
    ],
    "lfm2": [
        Case("<|tool_call_start|>[look(q='a\\n\"b\"', n=-2, xs=[True, null, 1.5e3])]<|tool_call_end|>", OK, "look",
             {"q": 'a\n"b"', "n": -2, "xs": [True, None, 1500.0]}),
        Case("<|tool_call_start|>[look(q=__import__('os'))]<|tool_call_end|>", MALFORMED),
        Case("<|tool_call_start|>[look('a')]<|tool_call_end|>", MALFORMED),
        Case("<|tool_call_start|>look<|tool_call_end|>", MALFORMED),
        Case("<|tool_call_start|>[look(n=" + "[" * 9000 + ")]<|tool_call_end|>", MALFORMED),
        Case("<|tool_call_start|>[look(q='a", UNCLOSED),
        Case("<|tool_call_start|>[jump()]<|tool_call_end|>", UNKNOWN_TOOL, "jump", {}),
    ],
    "llama-3.1": [
        Case('{"name": "look", "parameters": {"n": 1}}', OK, "look", {"n": 1}),
        Case('{"type": "function", "name": "look", "parameters": {}}', OK, "look", {}),
        Case('{"name": "look", "parameters": {"n": }}', INVALID_JSON),
        Case('{"name": "look", "parameters": [1]}', MALFORMED, "look"),
        Case('{"name": "", "parameters": {}}', MISSING_NAME),
        Case("<|python_tag|>print(1)", MALFORMED),
        Case('{"name": "jump", "parameters": {}}', UNKNOWN_TOOL, "jump", {}),
    ],
    "llama-4-pythonic": [
        Case("[look(n=1)]", OK, "look", {"n": 1}),
        Case("[look(n=x)]", MALFORMED),
        Case("[jump()]", UNKNOWN_TOOL, "jump", {}),
    ],
}  # fmt: skip
CASES = [(name, case) for name, cases in BLOCKS.items() for case in cases]


@pytest.mark.parametrize(("name", "case"), CASES, ids=[f"{n}-{c.text[:30]}" for n, c in CASES])
def test_every_attempt_is_kept_with_its_text_its_place_and_its_status(name: str, case: Case) -> None:
    parsed = parse(name, case.text, tools=TOOLS)
    (call,) = parsed.tool_calls
    assert (call.status, call.name, call.arguments) == (case.status, case.name, case.arguments)
    assert call.raw == case.text
    assert parsed.content == ""
    message = parsed.to_message()
    assert message["content"] == ("" if case.status is OK else case.text)
    assert ("tool_calls" in message) == (case.status is OK)


@pytest.mark.parametrize("name", [name for name in BLOCKS if not name.startswith("llama")])
def test_a_call_behind_words_has_the_same_reading(name: str) -> None:
    case = BLOCKS[name][0]
    call = one(name, "Grüße.\n" + case.text, tools=TOOLS)
    assert (call.status, call.name, call.arguments, call.raw) == (case.status, case.name, case.arguments, case.text)


@pytest.mark.parametrize("name", [name for name in BLOCKS if not name.startswith("llama")])
def test_a_completion_that_is_cut_off_keeps_its_attempt_and_makes_up_no_call(name: str) -> None:
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


def test_every_syntax_with_markers_has_every_status_that_it_can_have() -> None:
    every = set(ToolCallParseStatus)
    no_json = {"gemma-4", "lfm2", "llama-4-pythonic"}
    for name, cases in BLOCKS.items():
        possible = every - ({INVALID_JSON} if name in no_json else set())
        if name == "lfm2" or name.startswith("llama-4"):
            possible -= {MISSING_NAME}  # a call without a name is no call of Python's
        if name in ("mistral", "llama-3.1", "llama-4-pythonic"):
            possible -= {UNCLOSED}  # nothing closes these but the end of the turn
        assert {case.status for case in cases} == possible, name


# Markers.


@pytest.mark.parametrize("name", [n for n in BLOCKS if not n.startswith("llama")])
def test_markers_spelled_in_ordinary_tokens_are_content(name: str) -> None:
    tokenizer = tokenizer_for(name)
    case = BLOCKS[name][0]
    ids = tokenizer.encode_run(case.text).ids
    parsed = parse_response(ids, by_name(name), tokenizer, reasoning_open=False)
    assert (parsed.content, parsed.tool_calls) == (case.text, [])


@pytest.mark.parametrize("name", [n for n in BLOCKS if not n.startswith("llama")])
def test_markers_that_a_tokenizer_has_not_are_read_in_text(name: str) -> None:
    case = BLOCKS[name][0]
    call = one(name, case.text, textual=True)
    assert (call.status, call.name, call.raw) == (OK, "look", case.text)


def test_a_closing_tag_in_ordinary_tokens_inside_an_argument_is_part_of_it() -> None:
    tokenizer = tokenizer_for("glm-4.5")
    pieces = ["<tool_call>", "look", "<arg_key>", "q", "</arg_key>", "<arg_value>"]
    ids = [i for piece in pieces for i in ids_of_text(tokenizer, piece)]
    ids += tokenizer.encode_run("x</arg_value></tool_call>").ids
    ids += ids_of_text(tokenizer, "</arg_value></tool_call>")
    (call,) = parse_response(ids, by_name("glm-4.5"), tokenizer, reasoning_open=False).tool_calls
    assert call.arguments == {"q": "x</arg_value></tool_call>"}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("glm-4.5", "<tool_call>f" + "<arg_key>a</arg_key><arg_value>1</arg_value>" * 2 + "</tool_call>"),
        ("qwen3.5", "<tool_call><function=f>" + "<parameter=a>\n1\n</parameter>" * 2 + "</function></tool_call>"),
        ("gemma-4", "<|tool_call>call:f{a:1,a:1}<tool_call|>"),
        ("lfm2", "<|tool_call_start|>[f(a=1, a=1)]<|tool_call_end|>"),
    ],
)
def test_an_argument_that_comes_twice_makes_a_call_malformed(name: str, text: str) -> None:
    assert one(name, text).status is MALFORMED


# Several calls in one block.

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
    "mistral": ("{}{}", "[TOOL_CALLS]{}[ARGS]{{}}"),
    "qwen3.5": ("<tool_call>{}\n{}</tool_call>", "<function={}>\n</function>"),
    "qwen3": ("<tool_call>[{}, {}]</tool_call>", '{{"name": "{}"}}'),
    "lfm2": ("<|tool_call_start|>[{}, {}]<|tool_call_end|>", "{}(x='ä')"),
    "llama-3.1": ("{}; {}", '{{"name": "{}", "parameters": {{}}}}'),
}  # fmt: skip


@pytest.mark.parametrize("name", SEVERAL)
def test_several_calls_in_one_block_each_have_their_own_text_and_span(name: str) -> None:
    block, template = SEVERAL[name]
    calls = [template.format("look"), template.format("see")]
    parsed = parse(name, block.format(*calls))
    assert [(call.name, call.raw, call.status) for call in parsed.tool_calls] == [
        ("look", calls[0], OK),
        ("see", calls[1], OK),
    ]


@pytest.mark.parametrize("name", ["minimax-m2", "minimax-m3", "deepseek-v3", "deepseek-v4", "kimi-k2", "qwen3.5"])
def test_what_stands_between_calls_is_kept_as_an_attempt(name: str) -> None:
    block, template = SEVERAL[name]
    parsed = parse(name, block.format(template.format("look") + "junk", template.format("see")))
    assert [(call.name, call.status) for call in parsed.tool_calls] == [("look", OK), (None, MALFORMED), ("see", OK)]
    assert parsed.tool_calls[1].raw.strip() == "junk"


@pytest.mark.parametrize("name", ["minimax-m2", "minimax-m3", "deepseek-v3", "deepseek-v4", "kimi-k2"])
def test_a_call_that_the_next_one_begins_in_is_unclosed_and_the_next_one_is_read(name: str) -> None:
    block, template = SEVERAL[name]
    begun = template.format("look")
    end = begun.rindex("<") if name != "minimax-m3" else begun.rindex("]<]")
    parsed = parse(name, block.format(begun[:end], template.format("see")))
    assert [(call.name, call.status) for call in parsed.tool_calls] == [("look", UNCLOSED), ("see", OK)]


# Reasoning and calls.


def test_a_call_drafted_inside_closed_reasoning_is_reasoning() -> None:
    parsed = parse("qwen3", '<think>a<tool_call>{"name": "look"}</tool_call>b</think>Yes.')
    assert parsed.reasoning_content == 'a<tool_call>{"name": "look"}</tool_call>b'
    assert (parsed.content, parsed.tool_calls) == ("Yes.", [])


def test_a_complete_call_at_the_end_of_a_stopped_turn_ends_reasoning_that_nothing_closed() -> None:
    parsed = parse("qwen3", '<think>a\n<tool_call>{"name": "look"}</tool_call>\n<tool_call>{"name": "see"}</tool_call>')
    assert (parsed.reasoning_content, parsed.reasoning_complete, parsed.content) == ("a", True, "")
    assert [(call.name, call.status) for call in parsed.tool_calls] == [("look", OK), ("see", OK)]


def test_reasoning_may_be_closed_inside_a_drafted_call() -> None:
    parsed = parse("qwen3", '<think>a<tool_call>{"name": </think>Yes.')
    assert parsed.reasoning_content == 'a<tool_call>{"name": '
    assert (parsed.content, parsed.tool_calls) == ("Yes.", [])


def test_line_breaks_in_front_of_reasoning_are_layout() -> None:
    for text in ("\n<think>a", "\n\n<think>a</think>\n"):
        parsed = parse("qwen3", text)
        assert (parsed.reasoning_content, parsed.content) == ("a", "")


@pytest.mark.parametrize(
    ("text", "stop"),
    [
        ('<think>a<tool_call>{"name": "look"}</tool_call>', False),  # cut off: it may have gone on thinking
        ('<think>a<tool_call>{"name": "look"}</tool_call> or not', True),
        ('<think>a<tool_call>{"name": "look"}', True),
    ],
)
def test_any_other_call_inside_open_reasoning_is_reasoning(text: str, stop: bool) -> None:
    parsed = parse("qwen3", text, stop=stop)
    assert (parsed.reasoning_content, parsed.reasoning_complete) == (text.removeprefix("<think>"), False)
    assert (parsed.content, parsed.tool_calls) == ("", [])


def test_think_markers_behind_the_first_close_are_content() -> None:
    parsed = parse("qwen3", "<think>a</think>b<think>c</think>")
    assert (parsed.reasoning_content, parsed.content) == ("a", "b<think>c</think>")


def test_empty_reasoning_that_is_closed_is_none() -> None:
    """Templates print it for an answer without reasoning; `""` against None broke prefix matching."""
    parsed = parse("qwen3", "<think>\n\n</think>\n\nYes.")
    assert (parsed.reasoning_content, parsed.content) == (None, "Yes.")
    parsed = parse("qwen3", "<think>\n", stop=False)
    assert (parsed.reasoning_content, parsed.reasoning_complete) == ("", False)


def test_a_stop_token_inside_open_reasoning_leaves_it_open() -> None:
    parsed = parse("qwen3", "<think>a")
    assert (parsed.stopped, parsed.reasoning_complete, parsed.reasoning_content) == (True, False, "a")


# Types of arguments that are written without quotes.


def typed(value: str, schema: Any, name: str = "glm-4.5") -> tuple[Any, ToolCallParseStatus]:
    tools = [
        {
            "name": "f",
            "parameters": {"type": "object", "properties": {"a": schema}, "$defs": {"T": {"type": "integer"}}},
        }
    ]
    text = {
        "glm-4.5": f"<tool_call>f<arg_key>a</arg_key><arg_value>{value}</arg_value></tool_call>",
        "qwen3.5": f"<tool_call>\n<function=f>\n<parameter=a>\n{value}\n</parameter>\n</function>\n</tool_call>",
    }[name]
    call = one(name, text, tools=None if schema is None else tools)
    assert call.arguments is not None
    return call.arguments["a"], call.status


@pytest.mark.parametrize(
    ("value", "schema", "expected"),
    [
        ("12", {"type": "string"}, "12"),
        ("null", {"type": "string"}, "null"),
        ('"x"', {"type": "string"}, '"x"'),
        ("  x\n", {"type": "string"}, "  x\n"),
        ("12", {"type": "integer"}, 12),
        (" 12\n", {"type": "integer"}, 12),
        ("1e3", {"type": "number"}, 1000.0),
        ("true", {"type": "boolean"}, True),
        ('{"b":1}', {"type": "object"}, {"b": 1}),
        ("[1,2]", {"type": "array"}, [1, 2]),
        ("null", {"type": "null"}, None),
        ("null", {"type": ["string", "null"]}, None),
        ("null", {"type": "string", "nullable": True}, None),
        ("12", {"type": ["string", "null"]}, "12"),
        ("12", {"anyOf": [{"type": "integer"}, {"type": "string"}]}, 12),
        ("a", {"anyOf": [{"type": "integer"}, {"type": "string"}]}, "a"),
        ("true", {"oneOf": [{"type": "integer"}, {"type": "string"}]}, "true"),
        ("true", {"anyOf": [{"type": "boolean"}, {"type": "string"}]}, True),
        ("1", {"enum": ["1", "2"]}, "1"),
        ("1", {"enum": [1, 2]}, 1),
        ("x", {"const": "x"}, "x"),
        ("7", {"$ref": "#/$defs/T"}, 7),
        ("7", {"$ref": "#/nowhere"}, 7),
        ("[1]", {"items": {"type": "integer"}}, [1]),
        ('{"a": 1}', {"properties": {}}, {"a": 1}),
    ],
)
def test_a_declared_type_decides(value: str, schema: Any, expected: Any) -> None:
    found, status = typed(value, schema)
    assert (found, type(found), status) == (expected, type(expected), OK)


@pytest.mark.parametrize(
    ("value", "schema"), [("x", {"type": "integer"}), ("{", {"type": "object"}), ("", {"type": "null"})]
)
def test_what_is_of_no_declared_type_is_invalid_and_kept_as_text(value: str, schema: Any) -> None:
    assert typed(value, schema) == (value, INVALID_JSON)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("12", 12),
        ("2.5", 2.5),
        ("true", True),
        ("null", None),
        ('{"a": [1, null]}', {"a": [1, None]}),
        ("[]", []),
        # No template prints these for anything but the text itself.
        ('{"a":1}', '{"a":1}'),
        ("012", "012"),
        ("1e3", "1e3"),
        (" 12", " 12"),
        ('"x"', '"x"'),
        ("NaN", "NaN"),
        ("x", "x"),
        ("", ""),
    ],
)
@pytest.mark.parametrize("schema", [None, {}])
def test_without_a_declared_type_a_value_is_what_is_printed_as_exactly_this_text(
    value: str, expected: Any, schema: Any
) -> None:
    assert typed(value, schema) == (expected, OK)


def test_words_of_python_are_values_where_templates_print_them() -> None:
    """The engine prints `false`, a template prints `False`: both are the same boolean."""
    for value in ("False", "false"):
        assert typed(value, {"type": "boolean"}, "qwen3.5") == (False, OK)
    assert typed("None", {"type": ["integer", "null"]}, "qwen3.5") == (None, OK)
    assert typed("True", None, "qwen3.5") == (True, OK)
    assert typed("True", {"type": "string"}, "qwen3.5") == ("True", OK)
    assert typed("True", None, "glm-4.5") == ("True", OK)


def test_a_schema_that_refers_to_itself_is_read() -> None:
    loop = {"$ref": "#/properties/a"}
    assert typed("1", loop) == (1, OK)


# Bombs.


@pytest.mark.parametrize(
    "bomb", ["[" * 50_000, '{"a":' * 50_000, "[" * 50_000 + "]" * 50_000, "-" * 50_000, "9" * 50_000]
)
def test_a_bomb_exhausts_nothing(bomb: str) -> None:
    for name, text in (
        ("qwen3", f'<tool_call>{{"name": "f", "arguments": {{"a": {bomb}}}}}</tool_call>'),
        ("glm-4.5", f"<tool_call>f<arg_key>a</arg_key><arg_value>{bomb}</arg_value></tool_call>"),
        ("lfm2", f"<|tool_call_start|>[f(a={bomb})]<|tool_call_end|>"),
        ("gemma-4", f"<|tool_call>call:f{{a:{bomb}}}<tool_call|>"),
        ("llama-3.1", f'{{"name": "f", "parameters": {{"a": {bomb}}}}}'),
    ):
        (call,) = parse(name, text).tool_calls
        json.dumps(call.arguments)
        assert call.arguments is None or not is_deeper_than(call.arguments, MAX_DEPTH)


@pytest.mark.parametrize("name", ["gemma-4", "lfm2"])
def test_half_a_surrogate_pair_is_no_argument(name: str) -> None:
    text = {
        "lfm2": "<|tool_call_start|>[f(a='\\ud800')]<|tool_call_end|>",
        "gemma-4": '<|tool_call>call:f{a:<|"|>\\ud800<|"|>}<tool_call|>',
    }[name]
    call = one(name, text)
    json.dumps(call.arguments, ensure_ascii=False).encode()


# Anything a policy may sample.

PIECES = [
    "{",
    "}",
    "[",
    "]",
    '"',
    "'",
    "name",
    "look",
    "(",
    ")",
    "=",
    ":",
    ",",
    "\n",
    " ",
    "<",
    ">",
    "/",
    "é",
    "1",
    "\\u",
]


@settings(max_examples=150, deadline=None)
@given(name=st.sampled_from(sorted(CONTROL)), data=st.data(), tools=st.sampled_from([None, [], TOOLS]))
def test_any_ids_parse_and_nothing_but_layout_is_lost(name: str, data: st.DataObject, tools: Any) -> None:
    tokenizer, format = tokenizer_for(name), by_name(name)
    stops = {tokenizer.control_id(token) for token in format.stop_tokens}
    texts = [*PIECES, *(t for t in CONTROL[name] if t not in format.stop_tokens), "<function=f>", '<invoke name="f">']
    pieces = data.draw(st.lists(st.sampled_from(texts) | st.integers(-3, 2**40), max_size=30))
    ids: list[int] = []
    for piece in pieces:
        ids += [piece] if isinstance(piece, int) else ids_of_text(tokenizer, piece)
    ids = [i for i in ids if i not in stops]
    parsed = parse_response(ids, format, tokenizer, reasoning_open=data.draw(st.booleans()), tools=tools)
    position = 0
    for call in parsed.tool_calls:
        start, end = call.token_span
        assert position <= start < end <= len(ids)
        assert tokenizer.decode(ids[start:end]) == call.raw
        position = end
    json.dumps(parsed.to_message(), ensure_ascii=False).encode()


def test_the_cases_above_cover_every_family_with_calls() -> None:
    covered = set(BLOCKS) | {"qwen3"}
    others = {n for n in names() if by_name(n).tool_calls is not None} - covered
    same = {
        "hermes": "qwen3",
        "phi-4-mini": "qwen3",
        "qwen3-coder": "qwen3.5",
        "nemotron-3": "qwen3.5",
        "glm-5": "glm-4.5",
    }
    same |= {"deepseek-v3.2": "deepseek-v4", "llama-4": "llama-3.1"}
    for name in others:
        assert type(by_name(name).tool_calls) is type(by_name(same[name]).tool_calls)


def test_formats_of_ones_own_parse_too() -> None:
    format = Format("mine", ("<end>",))
    tokenizer = bytewise_tokenizer(["<end>"])
    parsed = parse_response(ids_of_text(tokenizer, "a<think><end>"), format, tokenizer, reasoning_open=True)
    assert (parsed.content, parsed.reasoning_content, parsed.stopped) == ("a<think>", None, True)
