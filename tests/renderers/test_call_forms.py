# ruff: noqa: RUF001  (DeepSeek spells its tokens with a fullwidth bar)
"""Tool calls are shown to a template in the form that it reads, whichever of the usual forms they come in."""

import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import corpus
import pytest
from grafted import graft
from loaded import renderer_of
from test_parsing_families import KIMI
from transformers.utils.chat_template_utils import _compile_jinja_template

from renderers import build_training_samples, load_renderer
from renderers.errors import TemplateError
from renderers.messages import check_messages
from renderers.template.call_forms import CallForms
from renderers.template.chat_template import ChatTemplate, ConvertedTemplate

VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}
ARGUMENTS = {"city": "Kraków", "days": 3, "when": {"hour": [1, 2]}}
TEXT = json.dumps(ARGUMENTS, ensure_ascii=False)


def converting_calls(source: str, name: str) -> ConvertedTemplate:
    """A template whose tool calls and tools are converted, and no contents."""
    template = ChatTemplate(source, model=name, variables=VARIABLES)
    return ConvertedTemplate(template, CallForms(template).convert)


def forms_of_a_call(*, with_result: bool) -> Iterator[list[dict[str, Any]]]:
    """One conversation with its call in every usual form: arguments, content, `type` and OpenAI's wrapping."""
    result = [{"role": "tool", "content": "R", "tool_call_id": "call00000", "name": "get_weather"}]
    for arguments, content, is_typed in itertools.product(
        (ARGUMENTS, TEXT), ({"content": ""}, {"content": None}), (1, 0)
    ):
        function = {"name": "get_weather", "arguments": arguments}
        call = {"id": "call00000", **({"type": "function"} if is_typed else {}), "function": function}
        turn = {"role": "assistant", **content, "tool_calls": [call]}
        yield [{"role": "user", "content": "Q"}, turn, *(result if with_result else [])]


def printed(template: Any, messages: list[dict[str, Any]]) -> str:
    """What the template prints; empty where it refuses."""
    try:
        return str(template.print(check_messages(messages), tools=corpus.TOOLS).text)
    except TemplateError:
        return ""


def printed_by_transformers(source: str, messages: list[dict[str, Any]]) -> str:
    """As `printed`, of the messages as they are, content None included."""
    try:
        return str(_compile_jinja_template(source).render(messages=messages, tools=corpus.TOOLS, **VARIABLES))
    except Exception:  # noqa: BLE001  a template may raise anything
        return ""


@pytest.mark.parametrize("with_result", [False, True])
@pytest.mark.parametrize("name", corpus.drawn(corpus.templates()))
def test_a_call_in_every_usual_form_is_printed_alike_and_as_transformers_prints_one_of_them(name, with_result):
    source = corpus.templates()[name]
    template = converting_calls(source, name)
    conversations = list(forms_of_a_call(with_result=with_result))
    theirs = {printed_by_transformers(source, messages) for messages in conversations}
    ours = {printed(template, messages) for messages in conversations}
    if any("Krak" in text for text in theirs):
        assert len(ours) == 1
        assert ours <= theirs
    assert any("Krak" in text for text in ours) == any("Krak" in text for text in theirs)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("trl/llama3_1", '"parameters": {"city": "Paris"}}'),
        ("trl/gptoss", '<|message|>{"city": "Paris"}<|call|>'),
        ("trl/qwen2_5", '"arguments": {"city": "Paris"}}'),
        ("trl/qwen3", '"arguments": {"city": "Paris"}}'),
        ("trl/gemma4", 'call:get_weather{city:<|"|>Paris<|"|>}'),
        ("own/glm-4.5v", "<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>"),
        ("own/deepseek-v3.1", '<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜>'),
        ("own/deepseek-v3", '```json\n{"city": "Paris"}\n```'),
    ],
)
def test_arguments_as_text_are_what_the_model_writes_and_what_is_trained(name, call):
    for arguments in ({"city": "Paris"}, '{"city": "Paris"}'):
        turn = {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "get_weather", "arguments": arguments}}],
        }
        renderer = renderer_of(name)
        (sample,) = build_training_samples(renderer, [corpus.user("Q"), turn], tools=corpus.TOOLS)
        trained = [token for token, is_trained in zip(sample.token_ids, sample.loss_mask, strict=True) if is_trained]
        assert call in renderer.tokenizer.decode(trained)


@pytest.mark.parametrize("text", ["[1, 2]", "not JSON"])
def test_text_that_is_no_object_is_printed_as_given(text):
    source = corpus.templates()["trl/llama3_1"]
    messages = [corpus.user("Q"), corpus.says("", None, [corpus.call("get_weather", text)])]
    theirs = printed_by_transformers(source, messages)
    assert json.dumps(text, ensure_ascii=False) in theirs
    assert printed(converting_calls(source, "llama"), messages)[-60:] == theirs[-60:]


@pytest.mark.parametrize(
    ("printed_arguments", "arguments", "cure"),
    [
        (".items()", [{"city": "Rome"}, '{"city": "Ro'], r"as text.*json.loads\(arguments\), or {} where"),
        (".items()", ["[1]"], r"as text.*json.loads\(arguments\), or {} where"),
        (" + 'end'", [{"city": "Rome"}], r"as a dict.*json.dumps\(arguments\)"),
    ],
)
def test_a_template_that_fails_on_arguments_has_the_cure_for_those_that_it_was_given(
    printed_arguments, arguments, cure
):
    loops = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments",
        " }}{% endfor %}{% endfor %}",
    )
    template = ChatTemplate(printed_arguments.join(loops), model="m")
    calls = [corpus.call("get_weather", each) for each in arguments]
    with pytest.raises(TemplateError, match=cure) as refused:
        template.print(check_messages([corpus.user("Q"), corpus.says("", None, calls)]), tools=corpus.TOOLS)
    assert "at message 1" in str(refused.value)


SCHEMAS = [tool["function"] for tool in corpus.TOOLS]
#: Tools in every usual form: those of chat completions without a type, a schema alone, those of OpenAI's Responses API.
FORMS_OF_TOOLS = [
    [{"function": schema} for schema in SCHEMAS],
    SCHEMAS,
    [{"type": "function", **schema} for schema in SCHEMAS],
]


@pytest.mark.parametrize("name", corpus.drawn(corpus.templates()))
def test_tools_in_every_usual_form_are_declared_as_transformers_declares_its_own(name):
    source = corpus.templates()[name]
    template = converting_calls(source, name)
    for content in ("Q", corpus.text("Q")):
        messages = [corpus.user(content)]
        expected = printed(template, messages)
        assert expected == printed_by_transformers(source, messages)
        if expected:
            assert {template.print(messages, tools=tools).text for tools in FORMS_OF_TOOLS} == {expected}


def test_a_tool_that_is_no_function_is_declared_as_given():
    template = converting_calls("{{ tools | tojson }}", "m")
    tools = [{"type": "web_search", "name": "search"}]
    assert template.print([corpus.user("Q")], tools=tools).text == json.dumps(tools)


@pytest.mark.parametrize(
    "ids", [["a", "b", "c"], ["c1", "c2", "c1"], [f"functions.run:{n}" for n in range(3)], [None] * 3]
)
def test_ids_hold_the_names_of_calls_where_a_template_prints_no_names(ids):
    """Kimi's: the model writes `functions.run:0` where other APIs carry any id."""
    source = KIMI.replace("{{ m.content", "{% if m.role == 'tool' %}({{ m.tool_call_id }}) {% endif %}{{ m.content")
    renderer = load_renderer(graft("kimi", source + "<|im_assistant|><|im_user|><|im_tool|>"), chat_template=source)
    calls = [{**corpus.call("run", {}), "id": id} for id in ids]
    results = [{"role": "tool", "content": "R", "tool_call_id": id} for id in ids]
    turns = [corpus.says("", None, calls[:2]), *results[:2], corpus.says("", None, calls[2:]), results[2]]
    text = renderer.tokenizer.decode(renderer.render_ids([corpus.user("Q"), *turns]))
    assert re.findall(r"call_begin.>([^<]*)<", text) == ["functions.run:0", "functions.run:1", "functions.run:2"]
    if None not in ids:
        assert re.findall(r"\(([^)]*)\) R", text) == ["functions.run:0", "functions.run:1", "functions.run:2"]
