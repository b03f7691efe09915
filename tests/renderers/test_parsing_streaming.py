# ruff: noqa: RUF001  (DeepSeek spells its tokens with a fullwidth bar)
"""Reading a completion piece by piece gives what reading it at once gives, and the pieces add up."""

import functools
import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from bytewise import bytewise_tokenizer, ids_of_text
from hypothesis import given, settings
from hypothesis import strategies as st

from renderers import ParsedResponse
from renderers.formats import Format, by_name
from renderers.parsing.parser import ResponseParser, parse_response
from renderers.parsing.response import ContentDelta, Delta, ReasoningDelta, ToolCallDelta
from renderers.tokens.tokenizer import TemplateTokenizer

#: family -> (tokens that its tokenizer has, texts that take part in its markers)
FAMILIES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "qwen3": (("<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"), ('{"name": "f"}',)),
    "qwen3.5": (
        ("<|im_end|>", "<think>", "</think>", "<tool_call>"),
        ("</tool_call>", "<function=f>", "</function>", "<parameter=a>", "</parameter>", "{", '"'),
    ),
    "glm-4.5": (
        ("<|user|>", "<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>"),
        ("f", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    "minimax-m2": (
        ("[e~[",),
        ("<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="f">'),
    ),
    "minimax-m3": (("[e~[", "]<]minimax[>[", "</mm:think>"), ("<mm:think>", "<tool_call>", "</tool_call>", "<invoke ")),
    "deepseek-v4": (
        ("<｜end▁of▁sentence｜>", "｜DSML｜"),
        ("<think>", "</think>", "<｜DSML｜tool_calls>", "<", "tool_calls>"),
    ),
    "gemma-4": (
        ("<turn|>", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>"),
        ("thought", "tho", "call:f{}"),
    ),
    "kimi-k2": (
        (
            "<|im_end|>",
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
        ),
        ("f", "functions.f:0", '{"a": "', '"}', "{}", '"'),
    ),
    "lfm2": (("<|im_end|>", "<|tool_call_start|>", "<|tool_call_end|>"), ("[f(a='", "')]", '[{"name": "f"}]', "'")),
    "phi-4-mini": (("<|end|>", "<|tool_call|>", "<|/tool_call|>"), ("functools", '[{"name": "f"}]', '"')),
    "llama-3.1": (("<|eot_id|>", "<|python_tag|>"), ('{"name": "f", "parameters": {}}', "; ", "{")),
    "llama-4-pythonic": (("<|eot|>",), ("[f(x=1)]", "[")),
    "mistral": (("</s>", "[TOOL_CALLS]"), ("[ARGS]{}", "[THINK]", "[/THINK]", "f")),
    "gpt-oss": (
        ("<|return|>", "<|call|>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>"),
        ("assistant", "analysis", "final", " to=functions.f", "commentary", "{}", '{"a": "', '"}'),
    ),
}
WORDS = ("a", " ", "\n", "\n\n", "é", "🙂", "<", "</th", "<thi", "ink>", "tool_call>", "{", "]")


@functools.cache
def tokenizer_for(name: str) -> TemplateTokenizer:
    return bytewise_tokenizer(FAMILIES[name][0])


def joined(deltas: Sequence[Delta], kind: type[ContentDelta] | type[ReasoningDelta]) -> str:
    return "".join(delta.text for delta in deltas if isinstance(delta, kind))


def stream(parser: ResponseParser, chunks: Sequence[Sequence[int]]) -> tuple[list[Delta], ParsedResponse]:
    deltas = [delta for chunk in chunks for delta in parser.feed(chunk)]
    return [*deltas, *parser.end()], parser.finish()


@st.composite
def completions(draw: st.DrawFn) -> tuple[Format, TemplateTokenizer, list[int], bool]:
    name = draw(st.sampled_from(sorted(FAMILIES)))
    tokenizer = tokenizer_for(name)
    control, texts = FAMILIES[name]
    pieces = draw(
        st.lists(st.sampled_from((*control, *control[1:], *texts, *texts, *WORDS)) | st.integers(-2, 300), max_size=25)
    )
    ids: list[int] = []
    for piece in pieces:
        ids += [piece] if isinstance(piece, int) else ids_of_text(tokenizer, piece)
    format = by_name(name)
    if draw(st.booleans()):
        format = replace(format, calls_end_reasoning=True, drops_repeated_start=True)
    if format.reasoning is not None and draw(st.booleans()):
        format = replace(format, reasoning=replace(format.reasoning, verbatim=True))
    return format, tokenizer, ids, draw(st.booleans())


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(completion=completions(), cuts=st.lists(st.integers(0, 80), max_size=6))
def test_any_chunks_give_the_same_response_and_deltas_that_add_up_to_it(
    completion: tuple[Format, TemplateTokenizer, list[int], bool], cuts: list[int]
) -> None:
    format, tokenizer, ids, reasoning_open = completion
    whole = parse_response(ids, format, tokenizer, reasoning_open=reasoning_open)
    edges = sorted({0, len(ids), *(cut for cut in cuts if cut < len(ids))})
    in_chunks = [ids[start:end] for start, end in pairwise(edges)]
    for chunks in (in_chunks, [[token_id] for token_id in ids], [ids]):
        deltas, response = stream(ResponseParser(format, tokenizer, reasoning_open=reasoning_open), chunks)
        assert response == whole
        assert joined(deltas, ContentDelta) == whole.content
        assert joined(deltas, ReasoningDelta) == (whole.reasoning_content or "")
        finished = [delta.call for delta in deltas if isinstance(delta, ToolCallDelta) and delta.call is not None]
        assert finished == whole.tool_calls
    for call, following in pairwise([*whole.tool_calls, None]):
        start, end = call.token_span
        assert 0 <= start < end <= (following.token_span[0] if following else len(ids))
        assert tokenizer.decode(ids[start:end]) == call.raw
    json.dumps(whole.to_message(), ensure_ascii=False).encode()


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(completion=completions())
def test_a_prefix_never_says_what_the_whole_takes_back(
    completion: tuple[Format, TemplateTokenizer, list[int], bool],
) -> None:
    format, tokenizer, ids, reasoning_open = completion
    whole = parse_response(ids, format, tokenizer, reasoning_open=reasoning_open)
    parser = ResponseParser(format, tokenizer, reasoning_open=reasoning_open)
    content = reasoning = ""
    for token_id in ids:
        deltas = parser.feed([token_id])
        content += joined(deltas, ContentDelta)
        reasoning += joined(deltas, ReasoningDelta)
        assert whole.content.startswith(content)
        assert (whole.reasoning_content or "").startswith(reasoning)


def feed(parser: ResponseParser, text: str) -> list[Delta]:
    return parser.feed(ids_of_text(tokenizer_for("qwen3"), text))


_QWEN_CALL = "<tool_call><function=f><parameter=a>"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "pieces"),
    [
        *(("qwen3", [piece]) for piece in ("\n", "<", " ", "a", "\ufffd")),
        ("qwen3", ["<tool_call>", "</tool_call>"]),
        ("qwen3", ['<tool_call>"', "</tool_call>"]),
        ("qwen3", ['<tool_call>["</tool_call><tool_call>[","']),
        ("qwen3.5", ["<function=f>"]),
        ("qwen3.5", ["<function=f></function> a"]),
        ("qwen3.5", [f"{_QWEN_CALL}</tool_call>"]),
        ("qwen3.5", [f"{_QWEN_CALL}</function></tool_call>", "</parameter>"]),
        ("qwen3.5", ['<tool_call><function=f><parameter=a>{"</parameter></tool_call>']),
        ("kimi-k2", ['<|tool_calls_section_begin|><|tool_call_begin|>"<|tool_call_end|>']),
        ("kimi-k2", ["<|tool_call_begin|><|tool_call_argument_begin|>{}<|tool_call_end|>"]),
        ("gpt-oss", ['<|channel|> to=f<|message|>"<|end|><|start|>']),
    ],
)
@pytest.mark.parametrize("begun", [pytest.param(True, marks=pytest.mark.slow), False])
def test_the_work_grows_with_the_length_and_not_with_its_square(name: str, pieces: list[str], begun: bool) -> None:
    """Twenty thousand ids, one by one; the time limit of the suite is the judge."""
    tokenizer, format = tokenizer_for(name), by_name(name)
    ids = [i for piece in pieces for i in ids_of_text(tokenizer, piece)]
    parser = ResponseParser(format, tokenizer, reasoning_open=False)
    if begun:  # the first piece once, then the others
        start = len(ids_of_text(tokenizer, pieces[0]))
        parser.feed(ids[:start])
        ids = ids[start:] or ids
    for token_id in (ids * 20_000)[:20_000]:
        parser.feed([token_id])
    parser.finish()
