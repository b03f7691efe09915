"""Content is shown to a template in the form that it reads, and printed as by transformers once it is converted."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import corpus
import pytest
from corpus import TOOLS, answer, call, says, text, user
from grafted import graft
from hf_families import FAMILIES
from hypothesis import given, settings
from hypothesis import strategies as st
from processor_outputs import noise
from tokenizers import Tokenizer, models
from transformers import AutoProcessor, PreTrainedTokenizerFast

from renderers import (
    RenderedTokens,
    TemplateRenderer,
    load_renderer,
)
from renderers.errors import MessageError, TemplateError
from renderers.messages import check_messages, without_media
from renderers.template.chat_template import ChatTemplate, ConvertedTemplate
from renderers.template.content_forms import ContentForms

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
ROLES = ("system", "developer", "user", "assistant", "tool")
PARTS = """\
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}
{%- for part in m.content %}{{- '<image>' if part.type == 'image' else part.text }}{%- endfor %}
{{- '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


def converting_contents(source: str, model: str) -> ConvertedTemplate:
    """A template whose contents are converted, and no tool calls."""
    template = ChatTemplate(source, model=model, variables=SPECIAL)
    return ConvertedTemplate(template, ContentForms(template).convert)


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
    """The conversation as a server shows it: in the form that is read, where it is given in one that is not.

    A developer message is a system message where only those are read.
    """
    shown = []
    for message in messages:
        content, role = message.get("content"), message["role"]
        reads_role = {name: any(is_read(template, name, form) for form in ("string", "parts")) for name in ROLES[:2]}
        if role == "developer" and reads_role == {"system": True, "developer": False}:
            role = "system"
            message = {**message, "role": role}
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
    ours = converting_contents(source, template)
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
    ],
)
def test_content_is_converted_only_where_its_form_is_not_read(
    source: str, tools: Any, given_so: Any, shown: Any
) -> None:
    ours = converting_contents(source, "m")
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


# Images.

IMAGES = ["llava-next", "idefics3", "pixtral", "gemma3", "qwen2-vl"]


@pytest.mark.slow
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
    with pytest.raises(MessageError, match="does not show image parts"):
        renderer.render([user([{"type": "image", "image": noise(60, 60)}])])
