# ruff: noqa: RUF001  (DeepSeek spells its tokens with a fullwidth bar)
"""Delimiters inside the values of arguments: what a template prints of a call is read as the same call."""

import ast
import functools
import warnings
from collections.abc import Mapping
from typing import Any

import pytest
from corpus import call, drawn, says
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_parsing_families import (
    TOOLS,
    UNQUOTED,
    WITH_CALLS,
    as_read,
    cut_at_turn,
    given_id,
    ids_of_text,
    print_turn,
    renderer_of,
)

from renderers import ParsedResponse, TemplateRenderer, ToolCallParseStatus
from renderers.formats import Format, by_name, names
from renderers.parsing.parser import ResponseParser, leaves_reasoning_open
from renderers.parsing.syntaxes.element_calls import GlmCalls, InvokeCalls, MiniMaxM3Calls, QwenXmlCalls
from renderers.parsing.syntaxes.literal_calls import GemmaCalls

#: The tags of all syntaxes that are not markers of a format.
_TAGS = (
    "<function=look_up>", "<function=", "</function>", "<parameter=count>", "<parameter=", "</parameter>",
    '<invoke name="look_up">', "</invoke>", '<parameter name="count">', "<count>", "</count>", "</text>", "</tree>",
    '<｜DSML｜parameter name="count" string="false">', "</｜DSML｜parameter>", "</｜DSML｜invoke>", "call:look_up{",
    "functools[", "functions.look_up:0", '{"name": "look_up", "arguments": {}}', "```json", "\n```", "<|constrain|>",
    '"', "'", "\\", "{", "}", "[", "]", ", count=", "; ",
)  # fmt: skip


def markers_of(format: Format) -> tuple[str, ...]:
    syntax, channels = format.tool_calls, format.channels
    return (
        *format.stop_tokens,
        *format.sampled_markers,
        *(() if syntax is None else (*syntax.end_markers, *syntax.inner_markers, *syntax.bare_calls)),
        *(() if channels is None else (channels.start, channels.channel, channels.message, *channels.ends)),
    )


@functools.cache
def delimiters() -> tuple[str, ...]:
    return tuple(dict.fromkeys([*_TAGS, *(marker for name in names() for marker in markers_of(by_name(name)))]))


def texts(format: Format) -> st.SearchStrategy[str]:
    """Texts of delimiters, of which every second is a marker of the format itself."""
    own = [marker for marker in markers_of(format) if marker not in format.stop_tokens]
    others = st.sampled_from(delimiters()) | st.sampled_from(("a", " ", "\n", "é", "1", "true"))
    return st.lists(others | st.sampled_from(own or ["a"]), min_size=1, max_size=6).map("".join)


def parse(renderer: TemplateRenderer, prompt: list[int], ids: list[int]) -> ParsedResponse:
    format, tokenizer = renderer.format, renderer.tokenizer
    is_open = leaves_reasoning_open(prompt, renderer._grammar)
    whole = ResponseParser(format, tokenizer, reasoning_open=is_open, tools=TOOLS)
    whole.feed(ids)
    one_by_one = ResponseParser(format, tokenizer, reasoning_open=is_open, tools=TOOLS)
    for token_id in ids:
        one_by_one.feed([token_id])
    assert one_by_one.finish() == whole.finish()
    return whole.finish()


def turn_of(renderer: TemplateRenderer, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return says("", None, [call("look_up", as_read(renderer, dict(arguments)), id=given_id(renderer, "look_up", 0))])


def sample(renderer: TemplateRenderer, arguments: Any, text: str, *, as_text: bool) -> tuple[list[int], list[int]]:
    """The ids of the prompt and of a turn whose arguments hold `text`: there, with `as_text`, as ordinary tokens, else
    with its control tokens.
    """
    prompt, printed = cut_at_turn(renderer, turn_of(renderer, arguments(text)), TOOLS)
    prompt_ids = ids_of_text(renderer, prompt)
    if not as_text:
        return prompt_ids, ids_of_text(renderer, printed)
    _, other = cut_at_turn(renderer, turn_of(renderer, arguments("PLACE")), TOOLS)
    before, found, behind = other.partition("PLACE")
    assert found
    assert printed.startswith(before)
    assert printed.endswith(behind)
    value = printed[len(before) : len(printed) - len(behind)]
    ids = [*ids_of_text(renderer, before), *renderer.tokenizer.encode_run(value).ids, *ids_of_text(renderer, behind)]
    return prompt_ids, ids


def tags_of_values(renderer: TemplateRenderer, *, in_json: bool, as_text: bool) -> list[str]:
    """The tags of a syntax that writes values as raw text: in such a value they are not told from tags of the call."""
    tokenizer = renderer.tokenizer
    match renderer.format.tool_calls:
        case QwenXmlCalls():
            tags = () if in_json else ("<parameter=", "</parameter>", "<function=")
        case GlmCalls():
            tags = () if in_json else ("<arg_key>", "<arg_value>", "</arg_value>")
        case InvokeCalls(inner_markers=(invoke, _, parameter, parameter_end)):
            tags = () if in_json else (f'{invoke} name="', f'{parameter} name="', f"{parameter_end}>")
        case MiniMaxM3Calls(inner_markers=tags) | GemmaCalls(inner_markers=tags):
            pass
        case _:
            tags = ()
    return [tag for tag in tags if not as_text or tokenizer.find_control(tag, 0, len(tag)) is None]


def without_layout(renderer: TemplateRenderer, text: str) -> str:
    """A text without white space and without what frames a turn and a block."""
    format = renderer.format
    syntax = format.tool_calls
    frame = [*format.stop_tokens, *format.sampled_markers, *(() if syntax is None else syntax.end_markers)]
    for marker in frame:
        text = text.replace(marker, "")
    return "".join(text.split())


def as_literal(text: str) -> str:
    """What Python reads of a text that a template prints between quotes, with no escapes, and that is one literal."""
    with warnings.catch_warnings(action="ignore"):  # of escapes that Python leaves unchanged
        value = ast.literal_eval(f"'''{text}'''")
    assert isinstance(value, str)
    return value


@pytest.mark.parametrize("as_text", [True, False], ids=["ordinary tokens", "control tokens"])
@pytest.mark.parametrize(
    "text", [r"\a", r"\1", r"\true", r"\\", r"\'", "\\\n", r"\[", r"\functions.look_up:0", r"\</think>"]
)
def test_a_text_that_is_printed_without_escapes_is_read_as_a_literal_of_python(text: str, as_text: bool) -> None:
    # The model wrote a literal, or its template printed a text: the parser cannot tell.
    renderer = renderer_of("trl/lfm2_2_5")
    prompt, ids = sample(renderer, lambda text: {"text": text, "count": 3}, text, as_text=as_text)
    (made,) = parse(renderer, prompt, ids).tool_calls
    assert (made.arguments, made.status) == ({"text": as_literal(text), "count": 3}, ToolCallParseStatus.OK)


@pytest.mark.parametrize("as_text", [True, False], ids=["ordinary tokens", "control tokens"])
@pytest.mark.parametrize("name", drawn(WITH_CALLS))
@settings(max_examples=10, deadline=None)
@given(data=st.data(), in_json=st.booleans())
def test_a_call_whose_values_hold_delimiters_is_read_back_or_flagged_without_a_loss(
    name: str, as_text: bool, data: st.DataObject, in_json: bool
) -> None:
    renderer = renderer_of(name)
    text = data.draw(texts(renderer.format))
    assume(as_text or not any(stop in text for stop in renderer.format.stop_tokens))  # the turn ends there

    def arguments(text: str) -> dict[str, Any]:
        return {"tree": {"b": text}, "count": 3} if in_json else {"text": text, "count": 3}

    prompt, ids = sample(renderer, arguments, text, as_text=as_text)
    parsed = parse(renderer, prompt, ids)
    calls = [(made.name, made.arguments, made.status) for made in parsed.tool_calls]
    if (calls, parsed.content) == ([("look_up", arguments(text), ToolCallParseStatus.OK)], ""):
        return
    tags = tags_of_values(renderer, in_json=in_json, as_text=as_text)
    if name in UNQUOTED:
        tags = [*tags, "'", "\\"]
    assert any(tag in text for tag in tags), calls
    # A value that holds its own end tag and that of its block ends the call, and the rest is content.
    if all(made.status.is_call for made in parsed.tool_calls) and not parsed.content:
        read = calls[0][1]
        assert isinstance(read, dict)
        if name in UNQUOTED and "\\" in text:
            assert read == arguments(as_literal(text))
            return
        # The template prints the call that was read in the same way.
        assert print_turn(renderer, turn_of(renderer, read), TOOLS) == print_turn(
            renderer, turn_of(renderer, arguments(text)), TOOLS
        )
        return
    rest, start = renderer.tokenizer.decode(ids), 0
    for made in parsed.tool_calls:
        start = rest.index(made.raw, start)
        rest = rest[:start] + rest[start + len(made.raw) :]
    rest = rest.replace(parsed.reasoning_content or "", "", 1)
    assert without_layout(renderer, rest) == without_layout(renderer, parsed.content)
