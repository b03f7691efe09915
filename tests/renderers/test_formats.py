# ruff: noqa: RUF001  (Hy3 spells its tokens with a fullwidth bar)
"""Which format a model gets: found by what its template prints, or named."""

from typing import Any

import corpus
import pytest
from bytewise import bytewise_tokenizer
from grafted import grafted_tokenizer_dir
from loaded import tokenizer_named

from renderers import Format, ToolCallParseStatus, load_renderer
from renderers.errors import LoadError
from renderers.formats import by_name, detect_format, names
from renderers.parsing.parser import parse_response
from renderers.parsing.syntaxes.json_calls import JsonCalls
from renderers.template.chat_template import ChatTemplate

#: Template of the corpus -> its format; a template stands for its variant for training too.
DETECTED = {
    template: format
    for format, templates in {
        "generic": (
            "trl/cohere trl/cohere2 trl/idefics3 trl/llava_next trl/muse_glimmer trl/phi3 trl/phi3_5 "
            "trl/smolvlm own/deepseek-v2 own/jiutian-139moe-chat own/minimax-m1-40k own/minimax-text-01"
        ),
        "deepseek": "trl/deepseek_r1_distill own/deepseek-v2.5 own/deepseek-v3",
        "deepseek-v3": "trl/deepseekv3 own/deepseek-r1-0528-qwen3-8b",
        "gemma-4": "trl/diffusion_gemma trl/gemma4 trl/gemma4_v2 trl/gemma4_v3 trl/gemma4_v4 trl/gemma4_v5",
        "gemma-3": "trl/gemma trl/gemma3",
        "glm-4.5": "trl/glm4moe own/glm-4.5v own/glm-4.6v own/glm-4.6v-flash",
        "gpt-oss": "trl/gptoss",
        "chatml": "trl/lfm2 own/qwen2.5-math-prm-7b own/qwen2.5-omni-3b",
        "lfm2": "trl/lfm2_2_5 trl/lfm2_2_5_v2 trl/lfm2_2_5_vl trl/lfm2_v2",
        "llama-3": "trl/llama3",
        "llama-3.1": "trl/llama3_1 trl/llama3_2",
        "nemotron-3": "trl/nemotron_3_5_lightning trl/nemotron_3_nano trl/nemotron_3_super trl/nemotron_3_ultra",
        "hermes": "trl/qwen2_5 own/jt-coder-8b-base own/jt-math-8b-instruct",
        "qwen-vl": "trl/qwen2_5_vl",
        "qwen3": "trl/qwen3 trl/qwen3_instruct_2507 trl/qwen3_vl own/qwen3-235b-a22b-mlx-4bit own/qwq-32b",
        "qwen3.5": "trl/qwen3_5_nothink trl/qwen3_5_think trl/qwen3_6 trl/qwen3_8",
        "deepseek-v3.1": "own/deepseek-v3.1",
        "glm-4": "own/glm-4 own/glm-4-32b-0414 own/glm-z1-32b-0414",
        "glm-5": "own/glm-4.7-flash own/glm-5 own/glm-5.1 own/glm-5.2",
        "minimax-m2": "own/minimax",
        "minimax-m3": "own/minimax-m3",
    }.items()
    for template in templates.split()
}
#: Formats whose prompt opens reasoning, by template.
OPENED = {
    "trl/deepseek_r1_distill", "trl/deepseekv3", "trl/nemotron_3_5_lightning", "trl/nemotron_3_nano",
    "trl/nemotron_3_super", "trl/nemotron_3_ultra", "trl/qwen3_5_think", "trl/qwen3_6", "trl/qwen3_8",
    "own/glm-4.7-flash", "own/glm-5", "own/glm-5.1", "own/glm-5.2", "own/glm-z1-32b-0414", "own/minimax",
    "own/qwq-32b",
}  # fmt: skip
JSON_ARGUMENTS = {"trl/deepseekv3", "own/deepseek-r1-0528-qwen3-8b", "own/deepseek-v3.1"}
OPENINGS = {"trl/glm4moe": "\n", "own/glm-4": "\n", "own/glm-4-32b-0414": "\n"}
ENDED_BY_EOS = {"own/deepseek-v2"}  # prints eos_token, which nobody names here
UNUSABLE = {"own/deepseek-vl2-small": "<|EOT|>"}  # a token that its template prints and its tokenizer lacks


def detected(name: str) -> Format:
    directory = corpus.tokenizer_of(name)
    if directory in corpus.tokenizer_names():
        template = ChatTemplate(corpus.templates()[name], model=name)
        return detect_format(template, tokenizer_named(str(directory)), eos_token=None)
    return load_renderer(grafted_tokenizer_dir(name)).format


def family_member(name: str) -> str:
    base = name.removesuffix("_training")
    return base if base in DETECTED else name


@pytest.mark.parametrize("name", corpus.drawn(name for name in corpus.templates() if name not in UNUSABLE))
def test_every_template_of_the_corpus_has_its_format(name: str) -> None:
    base = family_member(name)
    if base in ENDED_BY_EOS:
        with pytest.raises(LoadError, match="eos_token"):
            detected(name)
        return
    format = detected(name)
    assert format.name == DETECTED[base]
    assert (format.reasoning is not None and format.reasoning.opened_by_prompt) == (base in OPENED)
    if name != "trl/deepseekv3_training":  # which prints a dict as JSON itself
        assert format.arguments == ("json" if base in JSON_ARGUMENTS else "object")
    assert format.leading_newlines == OPENINGS.get(base, "")


def test_the_table_above_has_every_template_of_the_corpus() -> None:
    assert {family_member(name) for name in corpus.templates()} == set(DETECTED) | set(UNUSABLE)


@pytest.mark.slow
@pytest.mark.parametrize("name", UNUSABLE)
def test_a_printed_control_token_that_the_tokenizer_lacks_is_named(name: str) -> None:
    with pytest.raises(LoadError) as caught:
        detected(name)
    assert f"has no token {UNUSABLE[name]!r}" in str(caught.value)


# What detection asks.

CHATML = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}CALL{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
HERMES_CALL = (
    "<tool_call>{"
    + '"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}'
    + "}</tool_call>"
)
TOKENS = ["<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"]


def detect(source: str, tokens: list[str], eos_token: str | None = None) -> Format:
    return detect_format(ChatTemplate(source, model="m"), bytewise_tokenizer(tokens), eos_token=eos_token)


def test_a_syntax_counts_only_if_it_reads_back_what_the_template_prints() -> None:
    assert detect(CHATML.replace("CALL", HERMES_CALL), TOKENS).tool_calls == JsonCalls()
    for broken in ("CALL", "<tool_call></tool_call>", HERMES_CALL.replace('"name"', '"tool"'), HERMES_CALL[:-12]):
        format = detect(CHATML.replace("CALL", broken), TOKENS)
        assert (format.name, format.tool_calls) == ("chatml", None)


def test_an_unknown_template_is_generic_and_stops_at_what_it_prints() -> None:
    source = "{% for m in messages %}<r>{{ m.role }}:{{ m.content }}</r>{% endfor %}"
    format = detect(source, ["<r>", "</r>"])
    assert (format.name, format.stop_tokens, format.tool_calls) == ("generic", ("</r>",), None)


def test_nothing_that_would_ever_stop_a_turn_is_an_error() -> None:
    with pytest.raises(LoadError, match="never stop"):
        detect("{% for m in messages %}{{ m.content }}\n{% endfor %}", [])


# By name.


def test_an_unknown_name_is_an_error_that_lists_the_names() -> None:
    with pytest.raises(LoadError) as caught:
        by_name("qwen9")
    assert str(caught.value).startswith("no format 'qwen9'; there are ")
    for name in names():
        assert name in str(caught.value)


# Formats whose models' templates the corpus lacks, with small templates of the same layout.

HY3 = """{% for m in messages %}<｜hy_{{ m.role | capitalize }}:opensource｜>{% if m.role == 'assistant' -%}
<think:opensource>{{ m.reasoning_content }}</think:opensource>{% endif %}{{ m.content }}{% if m.tool_calls -%}
<tool_calls:opensource>
{% for c in m.tool_calls %}<tool_call:opensource>{{ c.function.name }}<tool_sep:opensource>
{% for k, v in c.function.arguments.items() %}<arg_key:opensource>{{ k }}</arg_key:opensource>
<arg_value:opensource>{{ v if v is string else v | tojson }}</arg_value:opensource>
{% endfor %}</tool_call:opensource>
{% endfor %}</tool_calls:opensource>{% endif %}
{%- if m.role == 'assistant' and (m.tool_calls or not loop.last) %}
<｜hy_eos:opensource｜>{% endif %}
{%- endfor %}{% if add_generation_prompt %}<｜hy_Assistant:opensource｜><think:opensource>{% endif %}"""
LAGUNA = """{% for m in messages %}<{{ m.role }}>
{% if m.role == 'assistant' %}{{ '<think>\n' ~ m.reasoning_content ~ '\n' if m.reasoning_content }}{{ '</think>\n' -}}
{%- endif %}{{ m.content ~ '\n' if m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}
{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key>
<arg_value>{{ v if v is string else v | tojson }}</arg_value>
{% endfor %}</tool_call>
{% endfor %}</{{ m.role }}>
{% endfor %}{% if add_generation_prompt %}<assistant>
</think>{% endif %}"""


HY3_TOKENS = ["<｜hy_User:opensource｜>", "<｜hy_Assistant:opensource｜>", "<｜hy_eos:opensource｜>"]
HY3_TOKENS += [f"<{slash}{tag}:opensource>" for slash in ("", "/") for tag in ("think", "tool_calls", "tool_call")]
LAGUNA_TOKENS = ["<assistant>", "</assistant>", "<think>", "</think>", "<tool_call>", "</tool_call>"]


@pytest.mark.parametrize(
    ("name", "source", "tokens"), [("hy3", HY3, HY3_TOKENS), ("laguna", LAGUNA, LAGUNA_TOKENS)], ids=["hy3", "laguna"]
)
def test_turns_of_hy3_and_laguna_are_read_back(name: str, source: str, tokens: list[str]) -> None:
    template, tokenizer = ChatTemplate(source, model="m"), bytewise_tokenizer(tokens)
    format = detect_format(template, tokenizer, eos_token=None)
    assert format.name == name
    arguments: list[dict[str, Any]] = [{"q": "x<y>\n z", "n": 2}, {}]
    calls = [
        {"id": f"c{n}", "type": "function", "function": {"name": "look", "arguments": each}}
        for n, each in enumerate(arguments)
    ]
    question = {"role": "user", "content": "Q"}
    for words in ("I look.", ""):
        turn = {"role": "assistant", "content": words, "reasoning_content": "Hm", "tool_calls": calls}
        printed = template.print([question, turn]).text
        sampled = printed[printed.index("<think") :]
        parsed = parse_response(tokenizer.encode_scaffold(sampled), format, tokenizer, reasoning_open=False)
        assert (parsed.content, parsed.reasoning_content) == (words, "Hm")
        assert [(call.name, call.arguments, call.status) for call in parsed.tool_calls] == [
            ("look", each, ToolCallParseStatus.OK) for each in arguments
        ]


def test_a_template_that_reads_parts_only_is_probed_with_parts() -> None:
    source = "{% for m in messages %}{{ m.role }}:{% for p in m.content %}{{ p.text }}{% endfor %}</s>{% endfor %}"
    assert detect(source, ["</s>"]).stop_tokens == ("</s>",)
