"""Arbitrary sampled ids: deeply nested values, half surrogate pairs and random pieces of syntax parse without error."""

import json

import pytest
from bytewise import ids_of_text
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_call_texts import CONTROL, parse, parse_single, tokenizer_for

from renderers.formats import by_name
from renderers.parsing.grammar import grammar_of
from renderers.parsing.json_text import MAX_DEPTH, is_deeper_than
from renderers.parsing.parser import parse_response, plain_response


@pytest.mark.slow
@pytest.mark.parametrize(
    "value", ["[" * 50_000, '{"a":' * 50_000, "[" * 50_000 + "]" * 50_000, "-" * 50_000, "9" * 50_000]
)
def test_deeply_nested_or_long_values_parse_without_recursion_errors(value: str) -> None:
    for name, text in (
        ("qwen3", f'<tool_call>{{"name": "f", "arguments": {{"a": {value}}}}}</tool_call>'),
        ("glm-4.5", f"<tool_call>f<arg_key>a</arg_key><arg_value>{value}</arg_value></tool_call>"),
        ("lfm2", f"<|tool_call_start|>[f(a={value})]<|tool_call_end|>"),
        ("gemma-4", f"<|tool_call>call:f{{a:{value}}}<tool_call|>"),
        ("llama-3.1", f'{{"name": "f", "parameters": {{"a": {value}}}}}'),
    ):
        (call,) = parse(name, text).tool_calls
        json.dumps(call.arguments)
        assert call.arguments is None or not is_deeper_than(call.arguments, MAX_DEPTH)


@pytest.mark.parametrize("name", ["gemma-4", "lfm2"])
def test_half_a_surrogate_pair_never_reaches_the_arguments(name: str) -> None:
    text = {
        "lfm2": "<|tool_call_start|>[f(a='\\ud800')]<|tool_call_end|>",
        "gemma-4": '<|tool_call>call:f{a:<|"|>\\ud800<|"|>}<tool_call|>',
    }[name]
    call = parse_single(name, text)
    json.dumps(call.arguments, ensure_ascii=False).encode()


PIECES = [*"{}[]\"'()=:,\n <>/é1", "name", "look", "\\u"]


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(name=st.sampled_from(sorted(CONTROL)), data=st.data())
def test_a_turn_of_content_alone_has_the_response_of_the_parser(name: str, data: st.DataObject) -> None:
    tokenizer, format = tokenizer_for(name), by_name(name)
    texts = [*PIECES, "\n\n", "I go left.", *CONTROL[name]]
    pieces = data.draw(st.lists(st.sampled_from(texts) | st.integers(-3, 300) | st.just(2**40), max_size=8))
    ids: list[int] = []
    for piece in pieces:
        ids += [piece] if isinstance(piece, int) else ids_of_text(tokenizer, piece)
    ids += data.draw(st.sampled_from([[], *([tokenizer.require_control_id(t, "")] for t in format.stop_tokens)]))
    plain = plain_response(ids, grammar_of(format, tokenizer))
    assert plain is None or plain == parse_response(ids, format, tokenizer, reasoning_open=False)
