"""For every family: what its template prints for an assistant is read back as the same assistant."""

import functools
import json
import os.path
from collections.abc import Mapping, Sequence
from typing import Any

import corpus
import pytest
from corpus import call, says, user
from grafted import graft, grafted_tokenizer_dir
from loaded import tokenizer_named

from renderers import ParsedResponse, TemplateRenderer, ToolCallParseStatus, load_renderer
from renderers.formats import detect_format
from renderers.formats.deepseek_v4 import V4_SOURCE, deepseek_v4_prompt
from renderers.messages import check_messages
from renderers.parsing.parser import ResponseParser, leaves_reasoning_open, parse_response
from renderers.template.chat_template import ChatTemplate
from renderers.template.python_template import PythonTemplate

KIMI = """{% for m in messages %}<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>
{%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content or '' }}
{%- if m.tool_calls %}<|tool_calls_section_begin|>{% for c in m.tool_calls -%}
<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}<|tool_call_end|>
{%- endfor %}<|tool_calls_section_end|>{% endif %}<|im_end|>{% endfor %}
{%- if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"""
MISTRAL_LIST = """<s>{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]
{%- elif m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls -%}
{"name": {{ c.function.name | tojson }}, "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}
{%- if not loop.last %}, {% endif %}{% endfor %}]</s>
{%- else %}{{ m.content }}</s>{% endif %}{% endfor %}"""
MISTRAL_ARGS = """<s>{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]
{%- else %}{% if m.reasoning_content %}[THINK]{{ m.reasoning_content }}[/THINK]{% endif %}{{ m.content or '' }}
{%- for c in m.tool_calls or [] %}[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}
{%- endfor -%}
</s>{% endif %}{% endfor %}"""
LLAMA4 = """{% for m in messages %}<|header_start|>{{ m.role }}<|header_end|>

{% if m.tool_calls %}[{% for c in m.tool_calls %}{{ c.function.name }}(
{%- for k, v in c.function.arguments.items() %}{{ k }}={{ pythonic(v) }}{% if not loop.last %}, {% endif %}{% endfor %})
{%- if not loop.last %}, {% endif %}{% endfor %}]{% else %}{{ m.content }}{% endif %}<|eot|>{% endfor %}
{%- if add_generation_prompt %}<|header_start|>assistant<|header_end|>

{% endif %}""".replace(
    "pythonic(v)", "('None' if v is none else 'True' if v is true else 'False' if v is false else v | tojson)"
)
PHI4 = """{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}{% if m.tool_calls %}<|tool_call|>[
{%- for c in m.tool_calls %}{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
{%- if not loop.last %}, {% endif %}{% endfor %}]<|/tool_call|>{% endif %}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
#: name -> (template, tokens that it does not spell out, family)
HANDMADE = {
    "kimi": (KIMI, ("<|im_assistant|>", "<|im_user|>"), "kimi-k2"),
    "mistral list": (MISTRAL_LIST, ("[ARGS]", "[CALL_ID]"), "mistral"),
    "mistral args": (MISTRAL_ARGS, ("[CALL_ID]",), "mistral"),
    "llama 4": (LLAMA4, (), "llama-4-pythonic"),
    "phi 4": (PHI4, (), "phi-4-mini"),
}

PROPERTIES: dict[str, Any] = {
    "tree": {"type": "object", "properties": {"a": {"type": "array", "items": {}}, "b": {"type": "string"}}},
    "many": {"type": "array", "items": {"type": "integer"}},
    "gone": {"type": ["string", "null"]},
    **{name: {"type": "string"} for name in ("text", "digits", "json")},
    **{"count": {"type": "integer"}, "ratio": {"type": "number"}, "flag": {"type": "boolean"}},
}
PARAMETERS = {
    "type": "object",
    "properties": {name: {**schema, "description": "t"} for name, schema in PROPERTIES.items()},
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": PARAMETERS}}
    for name in ("look_up", "go-to")
]
TEXT = 'He said "hi"\n<b>&amp; </tool> \\n {x: [1]} 你好 🙂\té\n'
NASTY = {
    "text": TEXT,
    "digits": "12",
    "json": '{"a": 1}',
    "count": -3,
    "ratio": 2.5,
    "flag": False,
    "tree": {"a": [1, True, "x"], "b": ""},
    "many": [1, 2],
    "gone": None,
}
# `value` without quotes around it, or quotes that nothing escapes.
UNQUOTED = {"trl/lfm2_2_5", "trl/lfm2_2_5_v2"}
ONE_CALL = {"trl/llama3_1", "trl/llama3_2", "trl/gptoss", "trl/gptoss_training"}
# One or a few of each family; test_formats.py asks every template of the corpus for its family.
REAL = (
    "trl/qwen2_5", "trl/qwen3", "trl/qwen3_vl", "trl/qwen3_5_think", "trl/qwen3_5_nothink", "trl/qwen3_6",
    "trl/deepseekv3", "own/deepseek-v3.1", "trl/glm4moe", "own/glm-4.5v", "own/glm-5", "own/minimax", "own/minimax-m3",
)  # fmt: skip
GRAFTED = (
    "trl/gemma3", "trl/gemma4", "trl/gemma4_v2", "trl/gemma4_v5", "trl/gptoss", "trl/gptoss_training", "trl/lfm2_2_5",
    "trl/lfm2_2_5_vl", "trl/llama3_1", "trl/nemotron_3_nano", "trl/nemotron_3_ultra", "trl/cohere",
)  # fmt: skip
NAMES = [*REAL, *GRAFTED, *HANDMADE, "deepseek-v4"]
NO_CALLS = {"trl/gemma3", "trl/cohere"}
WITH_CALLS = [name for name in NAMES if name not in NO_CALLS]


@functools.cache
def renderer_of(name: str) -> TemplateRenderer:
    if name in HANDMADE:
        source, more, _ = HANDMADE[name]
        return load_renderer(graft(name.replace(" ", "-"), source, more=more))
    if name in GRAFTED:
        return load_renderer(grafted_tokenizer_dir(name))
    tokenizer = tokenizer_named(corpus.tokenizer_of(name) or "" if name in REAL else name)
    template = (
        ChatTemplate(corpus.templates()[name], model=name)
        if name in REAL
        else PythonTemplate(deepseek_v4_prompt, source=V4_SOURCE, model=name, variables={"thinking_mode": "thinking"})
    )
    return TemplateRenderer(template, tokenizer, detect_format(template, tokenizer, eos_token=None))


def sampled(
    renderer: TemplateRenderer, turn: Mapping[str, Any], tools: Sequence[Mapping[str, Any]] | None
) -> tuple[list[int], list[int]]:
    """The ids of the prompt and those that the assistant would have sampled behind it."""
    prompt, behind = cut_at_turn(renderer, turn, tools)
    return ids_of_text(renderer, prompt), ids_of_text(renderer, behind)


def cut_at_turn(renderer: TemplateRenderer, turn: Mapping[str, Any], tools: Any) -> tuple[str, str]:
    """The text of the prompt, and the text that the template prints for the turn behind it.

    A prompt that opens reasoning is left where the printed turn has none.
    """
    printed = print_turn(renderer, turn, tools)
    prompt = renderer.template.print(check_messages([user("Q")]), tools=tools, add_generation_prompt=True).text
    cut = len(os.path.commonprefix([prompt, printed]))  # noqa: RUF071  (character by character is what is meant)
    begun = printed.rfind("<", 0, cut)  # two markers that differ begin alike
    if cut < len(prompt) and begun >= 0 and ">" not in printed[begun:cut]:
        cut = begun
    return printed[:cut], printed[cut:]


def print_turn(renderer: TemplateRenderer, turn: Mapping[str, Any], tools: Any = None) -> str:
    return renderer.template.print(check_messages([user("Q"), turn]), tools=tools).text


def ids_of_text(renderer: TemplateRenderer, text: str) -> list[int]:
    """Text with its control tokens as ids, as a model samples it."""
    ids: list[int] = []
    position = 0
    while (found := renderer.tokenizer.find_control(text, position, len(text))) is not None:
        ids += [*renderer.tokenizer.encode_run(text[position : found.start]).ids, found.token_id]
        position = found.end
    return [*ids, *renderer.tokenizer.encode_run(text[position:]).ids]


def read_back(
    renderer: TemplateRenderer, turn: Mapping[str, Any], tools: Sequence[Mapping[str, Any]] | None = None
) -> ParsedResponse:
    prompt, ids = sampled(renderer, turn, tools)
    is_open = leaves_reasoning_open(prompt, renderer._grammar)
    parsed = parse_response(ids, renderer.format, renderer.tokenizer, reasoning_open=is_open, tools=tools)
    one_by_one = ResponseParser(renderer.format, renderer.tokenizer, reasoning_open=is_open, tools=tools)
    for token_id in ids:
        one_by_one.feed([token_id])
    assert one_by_one.finish() == parsed
    for made in parsed.tool_calls:
        assert made.raw in renderer.tokenizer.decode(ids[slice(*made.token_span)])
    return parsed


def as_read(renderer: TemplateRenderer, arguments: dict[str, Any]) -> Any:
    return json.dumps(arguments, ensure_ascii=False) if renderer.format.arguments == "json" else arguments


def given_id(renderer: TemplateRenderer, name: str, index: int) -> str:
    return renderer.format.call_id.replace("{name}", name).replace("{index}", str(index))


def calls_of(parsed: ParsedResponse) -> list[tuple[str | None, Any, ToolCallParseStatus]]:
    return [(made.name, made.arguments, made.status) for made in parsed.tool_calls]


def nasty(name: str) -> dict[str, Any]:
    if name in UNQUOTED:
        return {**NASTY, "text": TEXT.replace("\\", ""), "many": [1, 2]}
    if name == "own/minimax-m3":  # its template leaves out what is None
        return {key: value for key, value in NASTY.items() if value is not None}
    return NASTY


@pytest.mark.parametrize("name", WITH_CALLS)
def test_a_call_with_nasty_arguments_is_read_back(name: str) -> None:
    renderer, arguments = renderer_of(name), nasty(name)
    made = call("look_up", as_read(renderer, arguments), id=given_id(renderer, "look_up", 0))
    parsed = read_back(renderer, says("", None, [made]), TOOLS)
    assert calls_of(parsed) == [("look_up", arguments, ToolCallParseStatus.OK)]
    assert parsed.content == ""
    message = parsed.to_message()
    assert message["tool_calls"][0]["function"] == {"name": "look_up", "arguments": as_read(renderer, arguments)}


@pytest.mark.parametrize("name", [name for name in WITH_CALLS if name not in ONE_CALL])
def test_words_reasoning_and_parallel_calls_are_read_back(name: str) -> None:
    renderer = renderer_of(name)
    arguments = [{"text": "one"}, {"count": 2, "flag": True}, {}]
    names = ["look_up", "go-to", "look_up"]
    if name == "llama 4" or name.startswith("trl/lfm2"):
        names = ["look_up", "go_to", "look_up"]  # a name in Python has no hyphen
    tools = [{**t, "function": {**t["function"], "name": n}} for t, n in zip(TOOLS, names, strict=False)]
    calls = [
        call(n, as_read(renderer, a), id=given_id(renderer, n, i))
        for i, (n, a) in enumerate(zip(names, arguments, strict=True))
    ]
    turn = says("I look.", "Which?", calls)
    printed = print_turn(renderer, turn, tools)
    parsed = read_back(renderer, turn, tools)
    assert calls_of(parsed) == [(n, a, ToolCallParseStatus.OK) for n, a in zip(names, arguments, strict=True)]
    assert parsed.content == ("I look." if "I look." in printed else "")
    assert parsed.reasoning_content == ("Which?" if "Which?" in printed else None)
    spans = [made.token_span for made in parsed.tool_calls]
    assert spans == sorted(spans)
    assert len(set(spans)) == 3


# gpt-oss: a turn of several messages.


def test_harmony_reads_reasoning_a_preamble_and_a_call_as_one_turn() -> None:
    renderer = renderer_of("trl/gptoss")
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.look_up <|constrain|>json<|message|>{"count": 1}<|call|>'
    )
    parsed = parse_text(renderer, text)
    assert (parsed.reasoning_content, parsed.content) == ("Hm.", "I look.")
    assert calls_of(parsed) == [("look_up", {"count": 1}, ToolCallParseStatus.OK)]
    assert parsed.tool_calls[0].raw == text[text.rindex("<|start|>") :]
    assert parsed.stopped


def test_markers_in_a_json_string_of_a_harmony_call_are_text_of_it() -> None:
    renderer = renderer_of("trl/gptoss")
    header = "<|channel|>commentary to=functions.look_up<|message|>"
    inside = "<|end|><|start|>assistant<|channel|>final<|message|>No"
    parsed = parse_text(renderer, header + f'{{"text": "{inside}"}}<|call|>')
    assert calls_of(parsed) == [("look_up", {"text": inside}, ToolCallParseStatus.OK)]
    # The string has no end: the first marker ended the message.
    for marker, status in (("<|end|>", ToolCallParseStatus.INVALID_JSON), ("", ToolCallParseStatus.UNCLOSED_BLOCK)):
        parsed = parse_text(
            renderer, f'{header}{{"text": "a{marker}<|start|>assistant<|channel|>final<|message|>Say "yes".<|return|>'
        )
        assert calls_of(parsed) == [("look_up", '{"text": "a', status)]
        assert parsed.tool_calls[0].raw == f'{header}{{"text": "a{marker}'
        assert parsed.content == 'Say "yes".'


def test_a_harmony_turn_that_is_cut_off_in_a_header_loses_nothing() -> None:
    renderer = renderer_of("trl/gptoss")
    for text in (" to=functions.look_up", "<|channel|>commentary to=functions.look_up <|constrain|>json"):
        (made,) = parse_text(renderer, text).tool_calls
        assert (made.name, made.raw, made.status) == ("look_up", text, ToolCallParseStatus.UNCLOSED_BLOCK)
    parsed = parse_text(renderer, "I go to=left.")
    assert (parsed.content, parsed.tool_calls) == ("I go to=left.", [])
    parsed = parse_text(renderer, "Well.<|channel|>final<|message|>Yes.<|return|>")
    assert parsed.content == "Well.\nYes."


@pytest.mark.parametrize(
    ("text", "content", "reasoning"),
    [
        ("<|channel|>final Yes, 4.<|return|>", "Yes, 4.", None),
        ("<|channel|>final 4<|return|>", "4", None),
        ("<|channel|>finalYes.<|return|>", "Yes.", None),
        ("<|channel|>analysis Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>", "Yes.", "Hm."),
        ("<|channel|>final<|message|>Yes.<|end|><|start|>assistant And no.<|return|>", "Yes.\nAnd no.", None),
        ("<|channel|>commentary I look it up<|message|>now.<|return|>", "I look it up\nnow.", None),
        ("<|channel|>final <|constrain|>json<|message|>{}<|return|>", "{}", None),
        ("<|channel|>final <|constrain|>json", "", None),
        ("<|channel|>final<|message|>Yes.<|end|><|start|>assistant<|channel|>comm", "Yes.", None),
    ],
)
def test_words_in_a_harmony_header_are_text_of_its_message(text: str, content: str, reasoning: str | None) -> None:
    parsed = parse_text(renderer_of("trl/gptoss"), text)
    assert (parsed.content, parsed.reasoning_content, parsed.tool_calls) == (content, reasoning, [])


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.look_up to=functions.go-to<|message|>",
        '<|channel|>commentary to=functions.look_up {"count": 2}<|message|>',
        "Well. to=functions.look_up<|channel|>commentary json<|message|>",
        "<|channel|>commentary I look it up<|channel|>commentary to=functions.look_up<|message|>",
    ],
)
def test_words_in_the_header_of_a_harmony_call_make_it_malformed(header: str) -> None:
    (made,) = parse_text(renderer_of("trl/gptoss"), header + '{"count": 1}<|call|>', tools=TOOLS).tool_calls
    assert (made.status, made.arguments) == (ToolCallParseStatus.MALFORMED_STRUCTURE, {"count": 1})
    assert made.raw == header + '{"count": 1}<|call|>'


def test_a_prompt_that_opens_an_analysis_message_opens_reasoning() -> None:
    renderer = renderer_of("trl/gptoss")
    prompt = ids_of_text(renderer, "<|start|>assistant<|channel|>analysis<|message|>")
    assert leaves_reasoning_open(prompt, renderer._grammar)
    assert not leaves_reasoning_open(prompt[:1], renderer._grammar)
    parsed = parse_text(renderer, "Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.", reasoning_open=True)
    assert (parsed.reasoning_content, parsed.content) == ("Hm.", "Yes.")


def parse_text(
    renderer: TemplateRenderer, text: str, *, reasoning_open: bool = False, tools: Any = None
) -> ParsedResponse:
    return parse_response(
        ids_of_text(renderer, text), renderer.format, renderer.tokenizer, reasoning_open=reasoning_open, tools=tools
    )


# Facts of single families.


def test_a_think_marker_that_is_several_tokens_is_read_in_text_and_at_the_end_of_the_prompt() -> None:
    renderer = renderer_of("trl/deepseekv3")
    assert renderer.tokenizer.control_id("<think>") is None
    parsed = parse_text(renderer, "<think>\nHm.\n</think>\n\nYes.")
    assert (parsed.reasoning_content, parsed.content) == ("Hm.", "Yes.")
    prompt = renderer.render_ids([user("Q")], add_generation_prompt=True)
    assert leaves_reasoning_open(prompt, renderer._grammar)
    prompt = renderer.render_ids([user("what is <think>?")])
    assert not leaves_reasoning_open(prompt, renderer._grammar)


def test_llama_calls_may_be_several_or_stand_behind_the_python_tag() -> None:
    renderer = renderer_of("trl/llama3_1")
    one, two = '{"name": "a", "parameters": {"x": 1}}', '{"name": "b", "parameters": {}}'
    parsed = parse_text(renderer, f"{one}; {two}<|eot_id|>")
    assert [made.raw for made in parsed.tool_calls] == [one, two]
    parsed = parse_text(renderer, '<|python_tag|>search.call(query="x y")<|eom_id|>')
    assert calls_of(parsed) == [("search", {"query": "x y"}, ToolCallParseStatus.OK)]
    parsed = parse_text(renderer, f"<|python_tag|>{one}<|eom_id|>")
    assert calls_of(parsed) == [("a", {"x": 1}, ToolCallParseStatus.OK)]
    parsed = parse_text(renderer, '{"name": "a", "parameters": {"x": <|eot_id|>')
    assert parsed.tool_calls[0].status is ToolCallParseStatus.INVALID_JSON


def test_a_python_list_of_calls_is_read_and_another_list_is_an_answer() -> None:
    renderer = renderer_of("llama 4")
    parsed = parse_text(renderer, "[a(x='it\\'s', y=[1, {'k': null}]), b.c()]<|eot|>")
    assert calls_of(parsed) == [
        ("a", {"x": "it's", "y": [1, {"k": None}]}, ToolCallParseStatus.OK),
        ("b.c", {}, ToolCallParseStatus.OK),
    ]
    for text in ("[1, 2]", "[a link](http://x)", "[x(y)] is code"):
        assert parse_text(renderer, f"{text}<|eot|>").content == text


@pytest.mark.parametrize("name", ["kimi", "mistral list"])
def test_the_id_that_a_model_wrote_is_kept(name: str) -> None:
    renderer = renderer_of(name)
    call_id = given_id(renderer, "look_up", 7)
    parsed = read_back(renderer, says("", None, [call("look_up", {}, id=call_id)]), TOOLS)
    assert parsed.tool_calls[0].id == call_id
    assert parsed.to_message()["tool_calls"][0]["id"] == call_id
