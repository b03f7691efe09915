"""Reasoning and tool calls in the same completion: where reasoning ends, and calls inside it."""

from __future__ import annotations

import pytest
from tool_call_texts import OK, parse


def test_a_call_drafted_inside_closed_reasoning_is_reasoning() -> None:
    parsed = parse("qwen3", '<think>a<tool_call>{"name": "look"}</tool_call>b</think>Yes.')
    assert parsed.reasoning_content == 'a<tool_call>{"name": "look"}</tool_call>b'
    assert (parsed.content, parsed.tool_calls) == ("Yes.", [])


def test_a_complete_call_at_the_end_of_a_stopped_turn_ends_unclosed_reasoning() -> None:
    parsed = parse("qwen3", '<think>a\n<tool_call>{"name": "look"}</tool_call>\n<tool_call>{"name": "see"}</tool_call>')
    assert (parsed.reasoning_content, parsed.reasoning_complete, parsed.content) == ("a", True, "")
    assert [(call.name, call.status) for call in parsed.tool_calls] == [("look", OK), ("see", OK)]


def test_reasoning_may_be_closed_inside_a_drafted_call() -> None:
    parsed = parse("qwen3", '<think>a<tool_call>{"name": </think>Yes.')
    assert parsed.reasoning_content == 'a<tool_call>{"name": '
    assert (parsed.content, parsed.tool_calls) == ("Yes.", [])


def test_line_breaks_before_reasoning_are_dropped() -> None:
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


def test_think_markers_after_the_first_end_marker_are_content() -> None:
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
