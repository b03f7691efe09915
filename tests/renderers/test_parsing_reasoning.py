"""Reasoning and tool calls in the same completion: where reasoning ends, and calls inside it."""

from dataclasses import replace

import pytest
from bytewise import ids_of_text
from tool_call_texts import OK, TOOLS, UNKNOWN_TOOL, parse, tokenizer_for
from training_conversations import renderer_of

from renderers import ParsedResponse, config_from_name
from renderers.formats import by_name
from renderers.model_families import with_parsing_rules
from renderers.parsing.format import ReasoningMarkers
from renderers.parsing.parser import parse_response


def test_a_call_drafted_inside_closed_reasoning_is_reasoning() -> None:
    parsed = parse("qwen3", '<think>a<tool_call>{"name": "look"}</tool_call>b</think>Yes.')
    assert parsed.reasoning_content == 'a<tool_call>{"name": "look"}</tool_call>b'
    assert (parsed.content, parsed.tool_calls) == ("Yes.", [])


def test_a_complete_call_at_the_end_of_a_stopped_turn_ends_unclosed_reasoning() -> None:
    parsed = parse("qwen3", '<think>a\n<tool_call>{"name": "look"}</tool_call>\n<tool_call>{"name": "see"}</tool_call>')
    assert (parsed.reasoning_content, parsed.reasoning_complete, parsed.content) == ("a", True, "")
    assert [(call.name, call.status) for call in parsed.tool_calls] == [("look", OK), ("see", OK)]


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


def test_empty_reasoning_that_is_closed_is_none() -> None:
    """Templates print it for an answer without reasoning; `""` against None broke prefix matching."""
    parsed = parse("qwen3", "<think>\n\n</think>\n\nYes.")
    assert (parsed.reasoning_content, parsed.content) == (None, "Yes.")
    parsed = parse("qwen3", "<think>\n", stop=False)
    assert (parsed.reasoning_content, parsed.reasoning_complete) == ("", False)


# The rules of typed configurations.

TYPED = with_parsing_rules(by_name("qwen3"), "qwen3")
CALL = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'


def parse_typed(text: str, *, opened: bool = True, stop: bool = True, verbatim: bool = False) -> ParsedResponse:
    tokenizer = tokenizer_for("qwen3")
    ids = ids_of_text(tokenizer, text + ("<|im_end|>" if stop else ""))
    format = replace(TYPED, reasoning=ReasoningMarkers(verbatim=verbatim))
    return parse_response(ids, format, tokenizer, reasoning_open=opened, tools=TOOLS)


@pytest.mark.parametrize("stop", [False, True])
def test_a_call_inside_open_reasoning_ends_it(stop: bool) -> None:
    for parsed in (parse_typed(f"a\n{CALL}", stop=stop), parse_typed(f"<think>a{CALL}", opened=False, stop=stop)):
        assert (parsed.reasoning_content, parsed.reasoning_complete, parsed.content) == ("a", True, "")
        assert [(call.name, call.status) for call in parsed.tool_calls] == [("look", OK)]
    parsed = parse_typed(f"a{CALL}", stop=stop)
    assert parsed.tool_calls[0].token_span == (1, len(CALL) - len("<tool_call></tool_call>") + 3)


def test_reasoning_that_is_closed_later_holds_the_calls_before_its_end() -> None:
    parsed = parse_typed(f"a{CALL}b</think>c")
    assert (parsed.reasoning_content, parsed.content, parsed.tool_calls) == (f"a{CALL}b", "c", [])


def test_a_start_marker_at_the_very_start_of_opened_reasoning_is_dropped_and_a_later_one_is_kept() -> None:
    assert parse_typed("\n<think>a</think>b").reasoning_content == "a"
    assert parse_typed("<think><think>a</think>b").reasoning_content == "<think>a"
    assert parse_typed("a<think>b</think>c").reasoning_content == "a<think>b"
    assert parse_typed("<think><think>a</think>b", opened=False).reasoning_content == "<think>a"


def test_only_some_families_report_a_tool_that_is_not_offered() -> None:
    call = '<tool_call>{"name": "other", "arguments": {}}</tool_call>'
    assert [found.status for found in parse_typed(call, opened=False).tool_calls] == [OK]
    assert [found.status for found in parse("qwen3", call, tools=TOOLS).tool_calls] == [UNKNOWN_TOOL]
    for name, reports in (("glm-4.5", True), ("gemma4", True), ("kimi-k2", False), ("default", False)):
        assert with_parsing_rules(by_name("glm-5"), name).reports_unknown_tools == reports


def test_line_breaks_at_the_ends_of_reasoning_belong_to_it_where_the_template_prints_it_unchanged() -> None:
    text = "\na\n\n</think>\n\nb"
    assert parse_typed(text).reasoning_content == "a"
    assert parse_typed(text, verbatim=True).reasoning_content == "\na\n\n"
    assert parse_typed("a\n" + CALL, verbatim=True).reasoning_content == "a"


def without_prompt(text: str, *, typed: bool = True) -> ParsedResponse:
    """The response of a renderer whose template opens reasoning, parsed without the ids of the prompt."""
    renderer = renderer_of("own/minimax", config=config_from_name("minimax-m2") if typed else None)
    assert renderer.format.reasoning is not None
    assert renderer.format.reasoning.opened_by_prompt
    return renderer.parse_response(ids_of_text(renderer.tokenizer, text))


def test_without_the_prompt_a_typed_configuration_takes_reasoning_for_open_only_if_the_completion_ends_it() -> None:
    closed = without_prompt("because</think>yes")
    assert (closed.reasoning_content, closed.content) == ("because", "yes")
    begun = without_prompt("<think>because</think>yes")
    assert (begun.reasoning_content, begun.content) == ("because", "yes")
    answer = without_prompt("yes")
    assert (answer.reasoning_content, answer.content) == (None, "yes")
    assert without_prompt("yes", typed=False).reasoning_content == "yes"
