"""Content is shown to a template in the form that it reads, and printed as by transformers once it is converted."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import corpus
import numpy as np
import pytest
from corpus import TOOLS, answer, call, says, system, text, user
from grafted import graft
from hf_families import FAMILIES
from hypothesis import given, settings
from hypothesis import strategies as st
from loaded import directory_of, renderer_of
from PIL import Image
from tokenizers import Tokenizer, models
from transformers import AutoProcessor, PreTrainedTokenizerFast

from renderers import (
    RenderedTokens,
    RendererOptions,
    TemplateRenderer,
    build_training_sample,
    build_training_samples,
    load_renderer,
)
from renderers.errors import ConfigError, PlaceholderCountError, TemplateError
from renderers.messages import check_messages, without_media
from renderers.template.chat_template import ChatTemplate
from renderers.template.content_forms import ContentForms, ConvertingTemplate

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
ROLES = ("system", "developer", "user", "assistant", "tool")
# What is printed of a model that reads only strings, and of one that reads only parts.
STRINGS = """\
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
PARTS = """\
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}
{%- for part in m.content %}{{- '<image>' if part.type == 'image' else part.text }}{%- endfor %}
{{- '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
# As in Pixtral's: a user may show images, an assistant and a system message are strings.
MIXED = """\
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'user' %}{%- for part in m.content %}{{- part.text }}{%- endfor %}
{%- else %}{{- m.content }}{%- endif %}{{- '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


def loaded(source: str, **options: Any) -> TemplateRenderer:
    return load_renderer(graft("forms", PARTS + "<|im_start|><|im_end|>"), chat_template=source, **options)


@functools.cache
def plain_tokenizer() -> PreTrainedTokenizerFast:
    """Any tokenizer: only its templating is used."""
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), **SPECIAL)


def hugging_face(source: str, messages: list[dict[str, Any]], tools: Any = None, *, prompt: bool = False) -> str | None:
    """What transformers prints; None where the template refuses."""
    try:
        return str(
            plain_tokenizer().apply_chat_template(
                messages, tools=tools, chat_template=source, add_generation_prompt=prompt, tokenize=False
            )
        )
    except Exception:  # noqa: BLE001  a template may raise anything
        return None


# Every template of the corpus, in both directions.


def small_conversations(role: str, content: Any, other: Callable[[str], Any]) -> Iterator[list[dict[str, Any]]]:
    """Conversations with one message of a role, the others' content made by `other`."""
    question, reply = user(other("a")), says(other("b"))
    match role:
        case "system" | "developer":
            yield [{"role": role, "content": content}, question]
        case "user":
            yield [user(content)]
        case "assistant":
            yield [question, says(content)]
            yield [question, says(content), question, reply]
        case _:
            for arguments in ({"city": "x"}, '{"city": "x"}'):
                calls = says(other(""), None, [call("get_weather", arguments, "call00000")])
                yield [question, calls, answer(content, "call00000")]


@functools.cache
def is_read(template: str, role: str, form: str) -> bool:
    """Whether transformers prints, anywhere, the words of a message of this role as words and not as data."""
    content: Any = "seldom words" if form == "string" else text("seldom words")
    for other in (str, text):
        for conversation in small_conversations(role, content, other):
            for tools in (None, TOOLS):
                printed = hugging_face(corpus.templates()[template], conversation, tools) or ""
                if "seldom words" in printed and "'type': 'text'" not in printed and '"type": "text"' not in printed:
                    return True
    return False


def converted(template: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation as a server shows it: in the form that is read, where it is given in one that is not."""
    shown = []
    for message in messages:
        content, role = message.get("content"), message["role"]
        if role in ROLES and content is not None:
            form, other = ("string", "parts") if isinstance(content, str) else ("parts", "string")
            if not is_read(template, role, form) and is_read(template, role, other):
                content = (
                    text(content) if form == "string" else "\n".join(part["text"] for part in content if part["text"])
                )
                message = {**message, "content": content}
        shown.append(message)
    return shown


def as_strings(content: str) -> Any:
    return content


def as_two_parts(content: str) -> Any:
    half = len(content) // 2
    return text(content[:half], content[half:])


@pytest.mark.parametrize("template", corpus.drawn(corpus.templates()))
def test_every_template_prints_the_converted_conversation_as_transformers_does(template: str) -> None:
    source = corpus.templates()[template]
    ours = ConvertingTemplate(ChatTemplate(source, model=template, variables=SPECIAL))
    compared = 0
    for form in (as_strings, as_two_parts):
        for messages, tools in corpus.CONVERSATIONS.values():
            given_so = [
                {**m, "content": form(m["content"])} if isinstance(m.get("content"), str) else m for m in messages
            ]
            checked = without_media(check_messages(given_so))
            expected = hugging_face(source, converted(template, checked), tools)
            if expected is None:
                with pytest.raises(TemplateError):
                    ours.print(checked, tools=tools)
            else:
                assert ours.print(checked, tools=tools).text == expected
                compared += 1
    assert compared > 10


@pytest.mark.slow
def test_the_corpus_holds_templates_of_every_kind() -> None:
    """Against an oracle that finds one kind only, which would agree with a renderer that converts nothing."""
    kinds = {
        (is_read(template, role, "string"), is_read(template, role, "parts"))
        for template in corpus.templates()
        for role in ROLES
    }
    assert kinds == {(True, True), (True, False), (False, True), (False, False)}


@pytest.mark.parametrize(
    ("template", "role", "forms"),
    [
        ("trl/llava_next", "user", {"parts"}),
        ("trl/llava_next", "assistant", {"parts"}),
        ("trl/idefics3", "system", {"parts"}),
        ("trl/smolvlm", "tool", {"parts"}),
        ("trl/qwen3_vl", "user", {"text", "parts"}),
        ("trl/qwen3", "user", {"text"}),
        ("trl/qwen2_5", "tool", {"text"}),  # it would print the list as data
        ("own/glm-4.5v", "user", {"text", "parts"}),
        ("own/glm-4.5v", "tool", {"text"}),
        ("trl/gemma", "system", set()),  # refused in any form
    ],
)
def test_forms_of_each_role(template: str, role: str, forms: set[str]) -> None:
    source = corpus.templates()[template]
    found = ContentForms(ChatTemplate(source, model=template, variables=SPECIAL)).of_role(role)
    assert found == forms


def test_forms_are_found_for_each_role_separately() -> None:
    renderer = loaded(MIXED)
    messages = [system(text("S", "T")), user("a"), says(text("b")), user(text("c", "d"))]
    expected = [system("S\nT"), user(text("a")), says("b"), user(text("c", "d"))]
    decoded = renderer.tokenizer.decode(renderer.render(messages).token_ids)
    assert decoded == hugging_face(MIXED, expected)


# What a template reads of one role in one place and not in another.

# As in Llama 3.2's for images: with tools, the first question is printed by another line than the others.
TOOLS_IN_FIRST = """\
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}
{%- if loop.first and tools %}{{- (tools | tojson) + (m.content | trim) }}
{%- elif m.content is string %}{{- m.content }}
{%- else %}{%- for part in m.content %}{{- '<image>' if part.type == 'image' else part.text }}{%- endfor %}{%- endif %}
{{- '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
# Beside calls, the words of an assistant are a string; else they are parts.
STRING_BESIDE_CALLS = """\
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.tool_calls %}{{- m.content }}{{- m.tool_calls[0].function | tojson }}
{%- else %}{%- for part in m.content %}{{- part.text }}{%- endfor %}{%- endif %}{{- '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
# Parts in what has been said, a string in what was said last.
STRING_AT_THE_END = """\
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}
{%- if loop.last %}{{- m.content }}
{%- else %}{%- for part in m.content %}{{- part.text }}{%- endfor %}{%- endif %}{{- '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


@pytest.mark.parametrize(
    ("source", "tools", "given_so", "shown"),
    [
        (TOOLS_IN_FIRST, None, [user(text("a", "b"))], [user(text("a", "b"))]),
        (TOOLS_IN_FIRST, TOOLS, [user(text("a", "b"))], [user("a\nb")]),
        (
            TOOLS_IN_FIRST,
            TOOLS,
            [user(text("a", "b")), says("c"), user(text("d", "e"))],
            [user("a\nb"), says("c"), user(text("d", "e"))],
        ),
        (
            STRING_BESIDE_CALLS,
            TOOLS,
            [user("a"), says("b", None, [call("run", {})]), answer("c"), says(text("d", "e"))],
            [user(text("a")), says("b", None, [call("run", {})]), answer(text("c")), says(text("d", "e"))],
        ),
        (
            STRING_BESIDE_CALLS,
            TOOLS,
            [user("a"), says(text("b", "c"), None, [call("run", {})])],
            [user(text("a")), says("b\nc", None, [call("run", {})])],
        ),
        (
            STRING_AT_THE_END,
            None,
            [user("a"), says("b"), user(text("c", "d"))],
            [user(text("a")), says(text("b")), user("c\nd")],
        ),
    ],
)
def test_content_is_converted_only_where_its_form_is_not_read(
    source: str, tools: Any, given_so: Any, shown: Any
) -> None:
    ours = ConvertingTemplate(ChatTemplate(source, model="m", variables=SPECIAL))
    for prompt in (False, True):
        printed = ours.print(without_media(check_messages(given_so)), tools=tools, add_generation_prompt=prompt)
        assert printed.text == hugging_face(source, shown, tools, prompt=prompt)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_bridge_equals_the_full_render_where_the_forms_depend_on_the_position(data: st.DataObject) -> None:
    contents = st.sampled_from(["a", text("b"), text("c", "d")])
    tools = data.draw(st.sampled_from([None, TOOLS]))
    history, turn, new = [user(data.draw(contents))], says(data.draw(contents)), [user(data.draw(contents))]
    renderer = loaded(TOOLS_IN_FIRST)
    prompt = renderer.render(history, tools=tools, add_generation_prompt=True).token_ids
    printed = renderer.render([*history, turn], tools=tools)
    stop = [i for i, sampled in enumerate(printed.sampled_mask) if sampled][-1]
    full = renderer.render([*history, turn, *new], tools=tools, add_generation_prompt=True).token_ids
    for previous in (None, history):
        outcome = renderer.try_bridge(
            prompt, printed.token_ids[len(prompt) : stop + 1], new, tools=tools, previous_messages=previous
        )
        assert isinstance(outcome, RenderedTokens)
        assert outcome.token_ids == full


def test_a_message_that_the_template_reads_is_not_converted() -> None:
    forms = ContentForms(ChatTemplate(corpus.templates()["trl/qwen3_vl"], model="m"))
    for message in (user("a"), user(text("a", "b")), says("b"), answer(text("c"))):
        assert forms.converted(message) is message


# What strangers saw.


def test_llava_next_renders_a_second_turn_behind_an_assistant_string() -> None:
    renderer = renderer_of("trl/llava_next")
    rendered = renderer.render([user("Hi"), says("Hello!"), user("And?")])
    assert renderer.tokenizer.decode(rendered.token_ids) == "[INST] Hi [/INST] Hello!</s> [INST] And? [/INST]"


def test_idefics3_prints_a_system_string() -> None:
    renderer = renderer_of("trl/idefics3")
    rendered = renderer.render([system("Be brief."), user("Hi")], add_generation_prompt=True)
    decoded = renderer.tokenizer.decode(rendered.token_ids)
    assert decoded == ("<|begin_of_text|>System: Be brief.<end_of_utterance>\nUser: Hi<end_of_utterance>\nAssistant:")


def test_as_given_prints_the_text_of_transformers_and_logs_lost_text(caplog: pytest.LogCaptureFixture) -> None:
    renderer = load_renderer(
        directory_of("trl/idefics3"),
        config=RendererOptions(content_form="as_given", chat_template=corpus.templates()["trl/idefics3"]),
    )
    messages = [user(text("a")), says("lost"), user(text("b"))]
    with caplog.at_level("WARNING", logger="renderers"):
        rendered = renderer.render(messages)
    assert renderer.tokenizer.decode(rendered.token_ids) == hugging_face(corpus.templates()["trl/idefics3"], messages)
    assert "message 1" in caplog.text
    assert "content_form" in caplog.text


def test_an_unknown_content_form_is_refused() -> None:
    with pytest.raises(ConfigError, match="as_given"):
        RendererOptions(content_form="openai")  # type: ignore[arg-type]


def test_an_image_never_becomes_a_string() -> None:
    """A template of strings shows none; what it says of one is not to be dropped."""
    shown = [{"type": "image", "image": "<media>"}, {"type": "text", "text": "?"}]
    (message,) = check_messages([user(shown)])
    assert ContentForms(ChatTemplate(STRINGS, model="m")).converted(message) is message


# Attribution, bridges and parsing.


@pytest.mark.parametrize("template", ["trl/idefics3", "trl/smolvlm", "trl/llava_next"])
def test_the_tokens_of_a_converted_message_are_those_of_the_parts_that_it_became(template: str) -> None:
    renderer = renderer_of(template)
    strings = [system("S"), user("a b"), says("c"), user("d")]
    parts = [{**message, "content": text(message["content"])} for message in strings]
    rendered, expected = renderer.render(strings), renderer.render(parts)
    assert rendered.token_ids == expected.token_ids
    assert rendered.spans == expected.spans
    body = [
        i for i, (m, c) in enumerate(zip(rendered.message_indices, rendered.is_content, strict=True)) if c and m == 1
    ]
    assert renderer.tokenizer.decode([rendered.token_ids[i] for i in body]).endswith(
        "b"
    )  # "a" and the blank before it may be one token
    assert any(rendered.sampled_mask)


def test_the_texts_that_became_one_string_are_content_with_the_line_break_between_them() -> None:
    renderer = loaded(STRINGS)
    rendered = renderer.render([user(text("a b", "c")), says("d")])
    body = [
        t
        for t, m, c in zip(rendered.token_ids, rendered.message_indices, rendered.is_content, strict=True)
        if c and m == 0
    ]
    assert renderer.tokenizer.decode(body) == "a b\nc"


@pytest.mark.slow
@pytest.mark.parametrize("source", [STRINGS, PARTS, MIXED], ids=["strings", "parts", "mixed"])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_bridge_is_the_full_render_whatever_the_forms_of_the_messages(source: str, data: st.DataObject) -> None:
    words = st.text("ab\n é", max_size=5)
    contents = words | st.lists(words, max_size=3).map(lambda texts: text(*texts))
    asked = st.builds(user, contents)
    history = [*data.draw(st.lists(st.builds(system, contents), max_size=1)), data.draw(asked)]
    turn = says(data.draw(contents))
    new = data.draw(st.lists(asked, min_size=1, max_size=2))
    renderer = loaded(source)
    prompt = renderer.render(history, add_generation_prompt=True).token_ids
    printed = renderer.render([*history, turn])
    stop = [i for i, sampled in enumerate(printed.sampled_mask) if sampled][-1]
    full = renderer.render([*history, turn, *new], add_generation_prompt=True).token_ids
    for previous in (None, history, [*history, turn]):
        outcome = renderer.try_bridge(
            prompt, printed.token_ids[len(prompt) : stop + 1], new, previous_messages=previous
        )
        assert isinstance(outcome, RenderedTokens)
        assert outcome.token_ids == full


@pytest.mark.parametrize("template", ["trl/idefics3", "trl/llava_next"])
def test_a_parsed_turn_goes_back_into_history_and_is_bridged(template: str) -> None:
    renderer = renderer_of(template)
    messages = [system("S"), user("Hi")]
    prompt = renderer.render(messages, add_generation_prompt=True).token_ids
    stop = renderer.get_stop_token_ids()[0]
    completion = [*renderer.tokenizer.encode_scaffold(" Hello!"), stop]
    turn = renderer.parse_response(completion, prompt_ids=prompt).to_message()
    assert turn["content"].strip() == "Hello!"
    conversation = [*messages, turn, user("And?")]
    full = renderer.render(conversation, add_generation_prompt=True)
    outcome = renderer.try_bridge(prompt, completion, conversation[3:], previous_messages=messages)
    assert isinstance(outcome, RenderedTokens)
    assert outcome.token_ids[: len(prompt) + len(completion)] == [*prompt, *completion]
    behind = renderer.tokenizer.decode(outcome.token_ids[len(prompt) + len(completion) :])
    assert renderer.tokenizer.decode(full.token_ids).endswith(behind)
    assert "And?" in behind


def test_the_text_of_a_marker_stays_text_in_a_converted_part() -> None:
    renderer = renderer_of("trl/idefics3")
    rendered = renderer.render([user("an <image> and <end_of_utterance>"), says("b")])
    image, end = (renderer.tokenizer.control_id(token) for token in ("<image>", "<end_of_utterance>"))
    assert rendered.token_ids.count(image or -1) == 0
    assert rendered.token_ids.count(end or -1) == 2


def test_a_training_sample_of_texts_that_became_one_string_trains_the_turn() -> None:
    renderer = loaded(STRINGS)
    sample = build_training_sample(renderer, [user(text("a", "b")), says(text("c", "d"))])
    trained = [t for t, on in zip(sample.token_ids, sample.loss_mask, strict=True) if on]
    assert renderer.tokenizer.decode(trained) == "c\nd<|im_end|>"


def test_a_turn_of_two_texts_parses_back_behind_a_prompt_that_history_prints_differently() -> None:
    renderer = loaded(STRINGS.replace("assistant\\n'", "assistant\\n\\n'"))
    (sample,) = build_training_samples(renderer, [user("a"), says(text("c", "d"))])
    trained = [t for t, on in zip(sample.token_ids, sample.loss_mask, strict=True) if on]
    assert renderer.tokenizer.decode(trained) == "c\nd<|im_end|>"


# Images.

IMAGES = ["llava-next", "idefics3", "pixtral", "gemma3", "qwen2-vl"]


def noise(width: int, height: int) -> Image.Image:
    values = np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


@pytest.mark.parametrize("name", IMAGES)
def test_images_are_placed_as_by_the_models_own_processor_beside_strings(name: str, tmp_path: Path) -> None:
    family = next(family for family in FAMILIES if family.name == name)
    directory = family.save(tmp_path / name)
    own, images = AutoProcessor.from_pretrained(directory), [noise(210, 60), noise(70, 420)]

    def shown(asked: Any, reply: Any, image: Callable[[int], dict[str, Any]]) -> list[dict[str, Any]]:
        return [
            user([image(0), {"type": "text", "text": "What?"}]),
            says(reply),
            user(asked),
            says(reply),
            user([{"type": "text", "text": "And"}, image(1)]),
        ]

    prompt = own.apply_chat_template(
        shown(text("So?"), text("That."), lambda index: {"type": "image"}), add_generation_prompt=True, tokenize=False
    )
    expected = own(images=images, text=prompt, text_kwargs={"return_tensors": None})["input_ids"][0]
    renderer = load_renderer(directory)
    messages = shown("So?", "That.", lambda index: {"type": "image", "image": images[index]})
    rendered = renderer.render(messages, add_generation_prompt=True)
    assert rendered.token_ids == expected
    assert rendered.multi_modal_data is not None
    marks = rendered.message_indices
    places = [where for _, where in rendered.multi_modal_data.items_with_ranges()]
    assert [marks[where.offset] for where in places] == [0, 4]


def test_an_image_for_a_template_that_reads_only_strings_is_refused(tmp_path: Path) -> None:
    family = next(family for family in FAMILIES if family.name == "pixtral")
    directory = family.save(tmp_path / "model")
    renderer = load_renderer(directory, chat_template="{% for m in messages %}{{ m.content }}[INST]{% endfor %}")
    with pytest.raises(PlaceholderCountError, match="does not show image parts"):
        renderer.render([user([{"type": "image", "image": noise(60, 60)}])])
