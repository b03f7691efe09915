"""Templates that want more than a question: tools, a system message, a name of their own among several."""

import json
from pathlib import Path
from typing import Any

import pytest
from corpus import TOOLS, answer, call, says, system, user
from grafted import graft
from transformers import PreTrainedTokenizerFast

from renderers import (
    BridgeRefusal,
    RenderedTokens,
    RendererOptions,
    TemplateRenderer,
    ToolCallParseStatus,
    create_renderer,
    load_renderer,
)
from renderers.errors import LoadError, TemplateError

# Like the tool_use templates of Hermes 2 Pro and Hermes 3: the loop over the tools does not ask whether there are any.
HERMES = """\
{{- '<|im_start|>system\\nYou may call functions. Their signatures: <tools>' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}{{- '</tools><|im_end|>\\n' }}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>tool\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- elif message.role == 'assistant' and message.tool_calls %}
        {{- '<|im_start|>assistant' }}
        {%- for call in message.tool_calls %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
CHATML = """\
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
NEEDS_SYSTEM = (
    "{%- if messages[0].role != 'system' %}{{ raise_exception('a system message comes first') }}{%- endif %}" + CHATML
)
RAG = "{%- for d in documents %}{{- '<doc>' + d.text + '</doc>' }}{%- endfor %}" + CHATML
ASKED = [system("S"), user("Weather?")]
CYCLE = [*ASKED, says("", None, [call("get_weather", {"city": "Zürich"})]), answer("22 °C")]


def loaded(source: str, **options: Any) -> TemplateRenderer:
    return load_renderer(graft("needs", HERMES), chat_template=source, **options)


def hugging_face(source: str | dict[str, str], messages: list[dict[str, Any]], **options: Any) -> list[int]:
    path = graft("needs", HERMES) / "tokenizer.json"
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(path), bos_token="<s>", eos_token="</s>", chat_template=source
    )
    return list(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **options))


def bridged(renderer: TemplateRenderer, messages: list[dict[str, Any]], turn: int, **options: Any) -> Any:
    """The bridge behind message `turn` as the template prints it, and the full render."""
    prompt = renderer.render(messages[:turn], add_generation_prompt=True, **options).token_ids
    printed = renderer.render(messages[: turn + 1], **options)
    sampled = [i for i, m in enumerate(printed.message_indices) if m == turn and printed.sampled_mask[i]]
    completion = printed.token_ids[len(prompt) : sampled[-1] + 1]
    outcome = renderer.try_bridge(prompt, completion, messages[turn + 1 :], **options)
    return outcome, renderer.render(messages, add_generation_prompt=True, **options)


# A template that prints only conversations with tools.


@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize("messages", [ASKED, CYCLE], ids=["asked", "cycle"])
def test_a_template_for_tools_only_prints_what_transformers_prints(messages: list[Any], prompt: bool) -> None:
    ids = loaded(HERMES).render(messages, tools=TOOLS, add_generation_prompt=prompt).token_ids
    assert ids == hugging_face(HERMES, messages, tools=TOOLS, add_generation_prompt=prompt)


def test_a_template_for_tools_only_is_bridged_and_parsed() -> None:
    renderer = loaded(HERMES)
    assert renderer.format.tool_calls is not None
    outcome, full = bridged(renderer, CYCLE, 2, tools=TOOLS)
    assert isinstance(outcome, RenderedTokens)
    assert outcome.token_ids == full.token_ids
    completion = renderer.tokenizer.encode_scaffold(
        '<tool_call>\n{"name": "run", "arguments": {"code": "1"}}\n</tool_call><|im_end|>'
    )
    (made,) = renderer.parse_response(completion, tools=TOOLS).tool_calls
    assert (made.status, made.name, made.arguments) == (ToolCallParseStatus.OK, "run", {"code": "1"})


@pytest.mark.slow
def test_a_template_for_tools_only_refuses_a_conversation_without_tools_and_names_the_argument_to_pass() -> None:
    renderer = loaded(HERMES)
    with pytest.raises(TemplateError, match="pass tools=") as refused:
        renderer.render(ASKED)
    assert "'NoneType' object is not iterable" in refused.value.template_message
    ids = renderer.tokenizer.encode_scaffold("<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n")
    assert renderer.try_bridge(ids, renderer.tokenizer.encode_scaffold("b<|im_end|>"), [user("c")]) is (
        BridgeRefusal.TEMPLATE_REFUSES
    )
    assert renderer.render(ASKED, tools=[]).token_ids == hugging_face(HERMES, ASKED, tools=[])


# A template that wants a system message.


def test_a_template_that_requires_a_system_message_is_loaded_bridged_and_printed_as_by_transformers() -> None:
    renderer = loaded(NEEDS_SYSTEM)
    messages = [*ASKED, says("Sunny."), user("And tomorrow?")]
    assert renderer.render(messages).token_ids == hugging_face(NEEDS_SYSTEM, messages)
    outcome, full = bridged(renderer, messages, 2)
    assert isinstance(outcome, RenderedTokens)
    assert outcome.token_ids == full.token_ids
    with pytest.raises(TemplateError, match="a system message comes first"):
        renderer.render(ASKED[1:])


def test_a_template_that_refuses_every_conversation_is_a_load_error_with_its_first_message() -> None:
    with pytest.raises(LoadError, match="with tools and a system message too: not today"):
        loaded("{{ raise_exception('not today' if not tools else 'nor with tools') }}")


# Several templates of one model.

NAMED = {"default": CHATML, "tool_use": HERMES, "rag": RAG}


def model_with(named: dict[str, str], directory: Path) -> Path:
    """A model directory whose tokenizer_config.json lists templates by name."""
    stock = graft("needs", HERMES)
    (directory / "tokenizer.json").write_bytes((stock / "tokenizer.json").read_bytes())
    settings = json.loads((stock / "tokenizer_config.json").read_text())
    settings["chat_template"] = [{"name": name, "template": source} for name, source in named.items()]
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("tools", [None, [], TOOLS], ids=["none", "empty", "some"])
def test_of_several_templates_the_same_one_is_used_as_in_transformers(tmp_path: Path, tools: Any) -> None:
    directory = model_with(NAMED, tmp_path)
    expected = hugging_face(NAMED, ASKED, tools=tools, add_generation_prompt=True)
    assert load_renderer(directory).render(ASKED, tools=tools, add_generation_prompt=True).token_ids == expected
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    assert isinstance(tokenizer.chat_template, dict)
    assert create_renderer(tokenizer).render(ASKED, tools=tools, add_generation_prompt=True).token_ids == expected


@pytest.mark.slow
def test_a_template_is_chosen_by_its_name_for_conversations_of_every_kind(tmp_path: Path) -> None:
    directory = model_with(NAMED, tmp_path)
    always = load_renderer(directory, chat_template="default")
    assert always.render(ASKED, tools=TOOLS).token_ids == hugging_face(NAMED, ASKED, chat_template="default")
    config = RendererOptions(chat_template="rag", chat_template_kwargs={"documents": [{"text": "a fact"}]})
    expected = hugging_face(NAMED, ASKED, chat_template="rag", documents=[{"text": "a fact"}])
    assert load_renderer(directory, config=config).render(ASKED).token_ids == expected
    assert create_renderer(PreTrainedTokenizerFast.from_pretrained(directory), config).render_ids(ASKED) == expected
    with pytest.raises(LoadError, match="or the name of one"):
        load_renderer(directory, chat_template="tool_users")


def test_without_a_default_template_conversations_need_tools_as_in_transformers(tmp_path: Path) -> None:
    named = {"tool_use": HERMES, "rag": RAG}
    renderer = load_renderer(model_with(named, tmp_path))
    assert renderer.render(CYCLE, tools=TOOLS).token_ids == hugging_face(named, CYCLE, tools=TOOLS)
    with pytest.raises(ValueError, match="no default"):
        hugging_face(named, ASKED)
    with pytest.raises(TemplateError, match="Pass tools="):
        renderer.render(ASKED)
