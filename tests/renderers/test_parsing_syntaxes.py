"""Every tool-call syntax: a malformed call keeps its text, its token span and the status that names the fault."""

from __future__ import annotations

import pytest
from bytewise import bytewise_tokenizer, ids_of_text
from tool_call_texts import (
    BLOCKS,
    INVALID_JSON,
    MALFORMED_STRUCTURE,
    MISSING_NAME,
    OK,
    SURPLUS_CALL,
    TOOLS,
    UNCLOSED_BLOCK,
    Case,
    parse,
    parse_single,
    tokenizer_for,
)

from renderers import ToolCallParseStatus
from renderers.formats import Format, by_name, names
from renderers.parsing.parser import parse_response

CASES = [(name, case) for name, cases in BLOCKS.items() for case in cases]


@pytest.mark.parametrize(("name", "case"), CASES, ids=[f"{n}-{c.text[:30]}" for n, c in CASES])
def test_every_call_has_its_text_span_and_status(name: str, case: Case) -> None:
    parsed = parse(name, case.text, tools=TOOLS)
    (call,) = parsed.tool_calls
    assert (call.status, call.name, call.arguments) == (case.status, case.name, case.arguments)
    assert call.raw == case.text
    assert parsed.content == ""
    message = parsed.to_message()
    assert message["content"] == ("" if case.status is OK else case.text)
    assert ("tool_calls" in message) == (case.status is OK)


@pytest.mark.parametrize("name", [name for name in BLOCKS if not name.startswith("llama")])
def test_a_call_after_content_parses_the_same(name: str) -> None:
    case = BLOCKS[name][0]
    call = parse_single(name, "Grüße.\n" + case.text, tools=TOOLS)
    assert (call.status, call.name, call.arguments, call.raw) == (case.status, case.name, case.arguments, case.text)


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


def test_every_syntax_with_markers_has_every_status_that_it_can_have() -> None:
    every = set(ToolCallParseStatus) - {SURPLUS_CALL}  # of a template, not of a syntax
    no_json = {"gemma-4", "lfm2", "llama-4-pythonic"}
    for name, cases in BLOCKS.items():
        possible = every - ({INVALID_JSON} if name in no_json else set())
        if name == "lfm2" or name.startswith("llama-4"):
            possible -= {MISSING_NAME}  # a call without a name is no call of Python's
        if name in ("mistral", "llama-3.1", "llama-4-pythonic"):
            possible -= {UNCLOSED_BLOCK}  # nothing closes these but the end of the turn
        assert {case.status for case in cases} == possible, name


@pytest.mark.parametrize("name", [n for n in BLOCKS if not n.startswith("llama")])
def test_markers_made_of_ordinary_tokens_are_content(name: str) -> None:
    tokenizer = tokenizer_for(name)
    case = BLOCKS[name][0]
    ids = tokenizer.encode_run(case.text).ids
    parsed = parse_response(ids, by_name(name), tokenizer, reasoning_open=False)
    assert (parsed.content, parsed.tool_calls) == (case.text, [])


@pytest.mark.parametrize("name", [n for n in BLOCKS if not n.startswith("llama")])
def test_markers_that_are_no_tokens_are_found_in_the_text(name: str) -> None:
    case = BLOCKS[name][0]
    call = parse_single(name, case.text, textual=True)
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
    assert parse_single(name, text).status is MALFORMED_STRUCTURE


def test_the_tool_call_texts_cover_every_syntax() -> None:
    covered = set(BLOCKS) | {"qwen3"}
    others = {n for n in names() if by_name(n).tool_calls is not None} - covered
    same = {
        "hermes": "qwen3",
        "phi-4-mini": "qwen3",
        "qwen3-coder": "qwen3.5",
        "nemotron-3": "qwen3.5",
        "glm-5": "glm-4.5",
        "laguna": "glm-4.5",
    }
    same |= {"deepseek-v3.2": "deepseek-v4", "llama-4": "llama-3.1"}
    for name in others:
        assert type(by_name(name).tool_calls) is type(by_name(same[name]).tool_calls)


def test_a_custom_format_is_parsed() -> None:
    format = Format("mine", ("<end>",))
    tokenizer = bytewise_tokenizer(["<end>"])
    parsed = parse_response(ids_of_text(tokenizer, "a<think><end>"), format, tokenizer, reasoning_open=True)
    assert (parsed.content, parsed.reasoning_content, parsed.stopped) == ("a<think>", None, True)
