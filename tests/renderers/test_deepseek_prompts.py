# ruff: noqa: RUF001  (DeepSeek spells its tokens with a fullwidth bar)
"""Prompts of DeepSeek V3.2 and V4, compared with the vendor's encoder and with texts written by hand."""

import copy
import functools
import importlib.util
import json
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loaded import tokenizer_named
from printed_text import copied, owned

from renderers.errors import TemplateError
from renderers.formats import deepseek_prompts as deepseek_v4
from renderers.formats.deepseek_prompts import prompt_for
from renderers.messages import check_messages
from renderers.template.chat_template import Printed
from renderers.template.python_template import PythonTemplate
from renderers.template.traced import Origin
from renderers.tokens.encoding import EncodedText, encode_printed, find_controls
from renderers.tokens.tokenizer import TemplateTokenizer
from tests.renderers.corpus import CONVERSATIONS, TOOLS, _data, answer, call, model_dir, says, system, text, user

Messages = list[dict[str, Any]]
Tools = list[dict[str, Any]] | None

V4, V32 = "deepseek-v4", "deepseek-v3.2"
TASKS = ("action", "query", "authority", "domain", "title", "read_url")


def settings_of(name: str) -> dict[str, Any]:
    return json.loads((model_dir(name) / "tokenizer_config.json").read_text(encoding="utf-8"))


def template_of(name: str, **variables: Any) -> PythonTemplate:
    template = prompt_for(settings_of(name), tokenizer_named(name), variables=variables)
    assert template is not None
    return template


def print_with(template: PythonTemplate, messages: Messages, tools: Tools = None, **variables: Any) -> Printed:
    return template.print(check_messages(messages), tools=tools, **{"add_generation_prompt": True, **variables})


def encoded(printed: Printed, name: str, messages: Messages) -> EncodedText:
    tokenizer = tokenizer_named(name)
    return encode_printed(printed.text, find_controls(printed, tokenizer, [m["role"] for m in messages]), tokenizer)


# The vendor's encoder.


@functools.cache
def encoder_v4() -> ModuleType:
    spec = importlib.util.spec_from_file_location("encoding_dsv4", _data() / V4 / "encoding_dsv4.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def as_encoder_takes(messages: Messages, tools: Tools) -> Messages:
    """As the encoder is documented to be called: tools on the system message, arguments as JSON text."""
    given = copy.deepcopy(messages)
    for message in given:
        for made in message.get("tool_calls") or ():
            if not isinstance(made["function"]["arguments"], str):
                made["function"]["arguments"] = json.dumps(made["function"]["arguments"], ensure_ascii=False)
    if tools:
        if not given or given[0]["role"] != "system":
            given.insert(0, system(""))
        given[0]["tools"] = tools
    return given


def by_encoder(messages: Messages, tools: Tools, mode: str, drop: bool, effort: str | None = None) -> str | None:
    """What the vendor's encoder prints, or None where it fails."""
    try:
        return encoder_v4().encode_messages(
            as_encoder_takes(messages, tools), mode, drop_thinking=drop, reasoning_effort=effort
        )
    except (AssertionError, TypeError, AttributeError, NotImplementedError):
        return None


# Conversations that the shared matrix lacks.
_A, _B = call("get_weather", {"city": "A"}, "a"), call("run", {"code": "B"}, "b")
MORE: dict[str, tuple[Messages, Tools]] = {
    "nothing": ([], None),
    "only tools": ([], TOOLS),
    "developer with tools": ([{"role": "developer", "content": "D", "tools": TOOLS}, user("a"), says("b", "r")], None),
    "developer last": ([user("a"), says("b", "r"), {"role": "developer", "content": "D"}], None),
    "developer between": ([user("a"), {"role": "developer", "content": "D"}, says("b"), user("c")], None),
    "response format": ([{**system("S"), "response_format": {"type": "ü"}}, user("a")], None),
    "tools and response format": ([{**system("S"), "response_format": {"a": [1]}}, user("a")], TOOLS),
    "malformed arguments": ([user("a"), says("", "r", [call("run", '{"code": ')]), answer("no")], TOOLS),
    "nested arguments": ([user("a"), says("", "r", [call("run", {"a": {"b": ["ü", {"c": None}]}, "d": ""})])], TOOLS),
    "answers out of order, then words": (
        [user("q"), says("", "r", [_A, _B]), answer("2", "b"), answer("1", "a"), user("and?")],
        TOOLS,
    ),
    "words between answers": (
        [user("q"), says("", "r", [_A, _B]), answer("2", "b"), user("w"), answer("1", "a")],
        None,
    ),
    "answers to nothing": ([user("q"), answer("2", "x"), answer("1", "y")], None),
    "answers of unknown calls": ([user("q"), says("", None, [_A, _B]), answer("2", "b"), answer("?", "zz")], TOOLS),
    "answer first": ([answer("2", "x"), says("ok", "r")], None),
    "answer, then a later user": ([user("q"), says("", "r", [_A]), answer("1", "a"), says("x", "s"), user("t")], None),
    "unended turn": ([user("q"), {**says("half"), "wo_eos": True}], None),
    **{f"task {task}": ([user("q"), says("a", "r"), {**user("t"), "task": task}], None) for task in TASKS},
    **{
        f"task {task}, answered": ([{**user("t"), "task": task}, says("a", "r"), user("q")], None)
        for task in ("action", "query")
    },
    "task, then an answer of a tool": ([{**user("t"), "task": "query"}, answer("1", "a")], None),
    "task, then a user": ([{**user("t"), "task": "query"}, user("a")], None),
    "task of a system message": ([{**system("S"), "task": "title"}], None),
}
ALL = {**CONVERSATIONS, **MORE}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("mode", ["chat", "thinking"])
@pytest.mark.parametrize("drop", [True, False])
def test_deepseek_v4_prints_the_text_of_the_vendors_encoder(name: str, mode: str, drop: bool) -> None:
    messages, tools = ALL[name]
    expected = by_encoder(messages, tools, mode, drop)
    if expected is None:
        assert name in ("parts", "parts in every role")
        return
    printed = print_with(template_of(V4), messages, tools, thinking_mode=mode, drop_thinking=drop)
    assert printed.text == expected


@pytest.mark.parametrize("effort", [None, "high", "max"])
@pytest.mark.parametrize("mode", ["chat", "thinking"])
@pytest.mark.parametrize("name", ["nothing", "one question", "tools offered", "developer"])
def test_deepseek_v4_effort_of_the_first_release_is_the_vendors(effort: str | None, mode: str, name: str) -> None:
    messages, tools = ALL[name]
    printed = print_with(
        template_of(V4), messages, tools, thinking_mode=mode, reasoning_effort=effort, release="preview"
    )
    assert printed.text == by_encoder(messages, tools, mode, True, effort)


# What the format cannot express.

REFUSED: dict[str, tuple[Messages, Tools, dict[str, Any], str, int | None]] = {
    "mode": ([user("a")], None, {"thinking_mode": "deep"}, "'chat' or 'thinking'", None),
    "effort without release": ([user("a")], None, {"reasoning_effort": "max"}, "release='preview'", None),
    "option": ([user("a")], None, {"thinking": True}, "thinking_mode, drop_thinking", None),
    "system in parts": ([system(text("a", "b"))], None, {}, "Join them into one text", 0),
    "arguments without names": ([says("", None, [call("run", "[1]")])], None, {}, "as a JSON object", 0),
    "arguments that are no JSON": ([says("", None, [call("run", {"x": {1, 2}})])], None, {}, "plain JSON", None),
    "tool without function": ([user("a")], [{"name": "run"}], {}, "A tool is", None),
    "tools twice": ([{**system("S"), "tools": TOOLS}], TOOLS, {}, "Declare them once", 0),
    "unknown task": ([{**user("a"), "task": "poem"}], None, {}, "action, query", 0),
    "lost task": ([user("a"), {**user("b"), "task": "query"}], None, {}, "Put the task on message 0", 1),
}


@pytest.mark.parametrize("name", REFUSED)
def test_deepseek_v4_refuses_conversations_that_it_cannot_express_and_names_the_cure(name: str) -> None:
    messages, tools, variables, cure, index = REFUSED[name]
    with pytest.raises(TemplateError) as caught:
        print_with(template_of(V4), messages, tools, **variables)
    assert cure in str(caught.value)
    assert V4 in str(caught.value)
    assert caught.value.message_index == index


# Attribution.


@pytest.mark.parametrize("name", [name for name in ALL if name not in ("parts", "parts in every role")])
@pytest.mark.parametrize("model", [V4, V32])
def test_segments_partition_the_text_and_contents_keep_their_origin(name: str, model: str) -> None:
    messages, tools = ALL[name]
    try:
        printed = print_with(template_of(model), messages, tools, thinking_mode="thinking")
    except TemplateError:
        assert model == V32  # V4 takes them all, by the test above
        return
    assert [s.start for s in printed.segments] == [0, *(s.end for s in printed.segments)][: len(printed.segments)]
    assert printed.segments[-1].end == len(printed.text)
    texts = copied(printed)
    for index, message in enumerate(messages):
        if message["role"] != "developer" and isinstance(message["content"], str):
            assert texts.get(Origin(index, "content"), "") == message["content"]
            if message["content"]:
                assert message["content"] in owned(printed, index)


# Injection.

_FORGED = st.lists(
    st.sampled_from(
        [
            "<｜User｜>",
            "<｜Assistant｜>",
            "<｜end▁of▁sentence｜>",
            "<｜begin▁of▁sentence｜>",
            "｜DSML｜",
            "<｜DSML｜invoke",
            "</｜DSML｜tool_calls>",
            "<think>",
            "</think>",
            "<｜action｜>",
            "<｜latest_reminder｜>",
            "<",
            "｜",
            "DSML｜",
            "<｜Us",
            "word",
            "\n\n",
        ]
    ),
    max_size=5,
).map("".join)


def control_ids(encoding: EncodedText) -> list[int]:
    return [encoding.ids[index] for index in encoding.control_at]


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(forged=_FORGED, model=st.sampled_from([V4, V32]), mode=st.sampled_from(["chat", "thinking"]))
def test_the_text_of_control_tokens_in_content_stays_content(forged: str, model: str, mode: str) -> None:
    def conversation(content: str) -> tuple[Messages, Tools]:
        tool = {"type": "function", "function": {"name": "run", "description": content}}
        schema = {**system(content), "response_format": {"is": content}}
        return [schema, user(content), says("", "r", [_A]), answer(content, "a"), user(content)], [tool]

    def printed_ids(content: str) -> list[int]:
        messages, tools = conversation(content)
        printed = print_with(template_of(model, thinking_mode=mode), messages, tools)
        return control_ids(encoded(printed, model, messages))

    assert printed_ids(forged) == printed_ids("benign")


# DeepSeek V3.2, against text written out from the vendor's published example.

_V32_CYCLE: Messages = [
    user("q"),
    says("", "first", [_A, _B]),
    answer("1", "a"),
    answer("2", "b"),
    says("done", "second"),
    user("more"),
]
_V32_CALLS = (
    "\n\n<｜DSML｜function_calls>\n"
    '<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">A</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n"
    '<｜DSML｜invoke name="run">\n<｜DSML｜parameter name="code" string="true">B</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n"
    "</｜DSML｜function_calls><｜end▁of▁sentence｜>"
)
_V32_RESULTS = "\n\n<function_results>\n<result>1</result>\n<result>2</result>\n</function_results>"


def test_deepseek_v32_thinks_only_behind_the_last_question() -> None:
    template = template_of(V32, thinking_mode="thinking")
    begin = "<｜begin▁of▁sentence｜><｜User｜>q<｜Assistant｜>"
    assert print_with(template, _V32_CYCLE[:5]).text == (
        f"{begin}<think>first</think>{_V32_CALLS}{_V32_RESULTS}\n\n<think>second</think>done<｜end▁of▁sentence｜>"
    )
    assert print_with(template, _V32_CYCLE).text == (
        f"{begin}</think>{_V32_CALLS}{_V32_RESULTS}\n\n</think>done<｜end▁of▁sentence｜><｜User｜>more<｜Assistant｜><think>"
    )


def test_deepseek_v32_declares_tools_as_json_lines_between_tags() -> None:
    text = print_with(template_of(V32), [system("S"), user("q")], TOOLS).text
    schemas = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in TOOLS)
    assert text.startswith("<｜begin▁of▁sentence｜>S\n\n## Tools\n\nYou have access to a set of tools you can use")
    assert text.endswith(f"<functions>\n{schemas}\n</functions>\n<｜User｜>q<｜Assistant｜></think>")


def test_deepseek_v32_puts_a_developer_message_behind_the_tools() -> None:
    text = print_with(template_of(V32), [{"role": "developer", "content": "D", "response_format": {"a": 1}}]).text
    assert text == (
        "<｜begin▁of▁sentence｜><｜User｜>\n\n## Response Format:\n\n"
        'You MUST strictly adhere to the following schema to reply:\n{"a": 1}\n\n'
        "# The user's message is: D<｜Assistant｜></think>"
    )


@pytest.mark.parametrize(
    ("messages", "cure"),
    [
        ([user("q"), says("", None, [_A, _B]), answer("2", "b"), answer("1", "a")], "into the order of the calls"),
        ([user("q"), says("", None, [_A, _B]), answer("1", "a"), user("so?")], "one result for each call"),
        ([user("q"), says("", None, [_A, _B]), answer("1", "a")], "one result for each call"),
        ([user("q"), answer("1", "a")], "behind the assistant message that calls"),
        ([user("q"), says("", None, [_A]), answer("1", "a"), answer("2", "a")], "behind the assistant message"),
        ([user(text("a", "b"))], "Join them into one text"),
    ],
)
def test_deepseek_v32_refuses_results_that_its_format_cannot_distinguish(messages: Messages, cure: str) -> None:
    with pytest.raises(TemplateError, match=cure):
        print_with(template_of(V32), messages)


# Detection.


@pytest.mark.parametrize("missing", deepseek_v4.REQUIRED_TOKENS)
def test_a_tokenizer_without_one_token_of_v4_is_neither_release(missing: str) -> None:
    definition = json.loads((model_dir(V4) / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = {"type": "WordLevel", "vocab": {"?": 0}, "unk_token": "?"}
    added = [token for token in definition["added_tokens"] if token["content"] in deepseek_v4.REQUIRED_TOKENS]

    def recognised(tokens: Sequence[Mapping[str, Any]]) -> bool:
        tokenizer = TemplateTokenizer({"model": vocabulary, "added_tokens": list(tokens)}, model="small")
        return prompt_for({}, tokenizer) is not None

    assert recognised(added)
    assert not recognised([token for token in added if token["content"] != missing])
