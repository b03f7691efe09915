"""Input that a template does not read: logged once per renderer and role, and listed in the result."""

from typing import Any

import corpus
import pytest
from corpus import TOOLS, answer, call, says, system, text, user
from grafted import graft
from loaded import directory_of, renderer_of

from renderers import TemplateRenderer, load_renderer
from renderers.errors import TemplateError
from renderers.template.chat_template import ChatTemplate

UNTOLD, UNPARSED = "does not print tools", "has no tool calls"
START, END = "<|im_start|>", "<|im_end|>"
PROMPT = f"{{%- if add_generation_prompt %}}{{{{- '{START}assistant\\n' }}}}{{%- endif %}}"
CALLS = [call("get_weather", {"city": "Rome"}, "call00000")]


def developer(content: Any) -> dict[str, Any]:
    return {"role": "developer", "content": content}


def loaded(template: str, **options: Any) -> TemplateRenderer:
    """A new renderer, which has logged nothing."""
    return load_renderer(directory_of(template), chat_template=corpus.templates()[template], **options)


def with_template(body: str) -> TemplateRenderer:
    """A renderer of a template that prints `body` for each message `m`."""
    source = (
        f"{{%- for m in messages %}}{{{{- '{START}' + m.role + '\\n' }}}}{body}{{{{- '{END}\\n' }}}}{{%- endfor %}}"
    )
    return load_renderer(graft("unread", source + PROMPT), chat_template=source + PROMPT)


def of_unconverted_contents(source: str) -> TemplateRenderer:
    """A renderer whose messages go to the template as they are."""
    made = load_renderer(graft("unread", source), chat_template=source)
    return TemplateRenderer(ChatTemplate(source, model="m"), made.tokenizer, made.format)


def places(rendered: Any) -> list[tuple[int, str]]:
    return [(field.message_index, field.field) for field in rendered.unprinted]


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level("WARNING", logger="renderers")
    return caplog


# Messages.


def test_a_role_that_the_template_does_not_print_is_logged_once_with_a_role_that_it_prints(
    logged: pytest.LogCaptureFixture,
) -> None:
    renderer = of_unconverted_contents(corpus.templates()["trl/qwen3"])
    for question in ("Hi", "Hello"):
        rendered = renderer.render([developer("Be brief."), user(question), developer("Now.")])
        assert places(rendered) == [(0, "content"), (2, "content")]
    prompt = renderer.render([user("a")], add_generation_prompt=True).token_ids
    completion = renderer.tokenizer.encode_scaffold("b<|im_end|>")
    bridged = renderer.bridge_to_next_turn(prompt, completion, [user("c"), developer("Be brief.")])
    assert places(bridged) == [(1, "content")]
    (message,) = logged.messages
    for part in ("message 0", "developer", "Send the message as system or user"):
        assert part in message


WORDS = {
    "system": "sapphire",
    "developer": "dandelion",
    "user": "umbrella",
    "assistant": "aardvark",
    "tool": "tangerine",
}
CONVERSATIONS = {
    "developer": [developer(WORDS["developer"]), user("q")],
    "later system": [user("q"), says("a"), system(WORDS["system"]), user("q")],
    "system and developer": [system(WORDS["system"]), developer(WORDS["developer"]), user("q")],
    "two users": [user("q"), user(WORDS["user"])],
    "answer": [user("q"), says(WORDS["assistant"]), user("q")],
    "result": [user("q"), says("", None, CALLS), answer(WORDS["tool"], "call00000")],
    "result and answer": [user("q"), says("", None, CALLS), answer(WORDS["tool"], "call00000"), says("a")],
}


@pytest.mark.parametrize("template", corpus.templates())
def test_a_content_is_listed_exactly_where_its_word_is_not_in_the_prompt(template: str) -> None:
    try:
        renderer = renderer_of(template)
    except Exception as error:  # noqa: BLE001
        pytest.skip(str(error))
    compared = 0
    for messages in CONVERSATIONS.values():
        try:
            rendered = renderer.render(messages, tools=TOOLS, add_generation_prompt=messages[-1]["role"] != "assistant")
        except TemplateError:
            continue
        decoded = renderer.tokenizer.decode(rendered.token_ids)
        expected = [i for i, m in enumerate(messages) if m["content"] in WORDS.values() and m["content"] not in decoded]
        found = [i for i, field in places(rendered) if field == "content" and messages[i]["content"] in WORDS.values()]
        assert found == expected
        lost_calls = [i for i, m in enumerate(messages) if "tool_calls" in m and "Rome" not in decoded]
        assert [i for i, field in places(rendered) if field == "tool_calls"] == lost_calls
        compared += 1
    assert compared


# Parts and tool calls.


@pytest.mark.parametrize("printed", ["m | tojson", "m.content | tojson", "m.content | string", "m.values() | list"])
def test_what_is_printed_as_data_is_not_listed(printed: str, logged: pytest.LogCaptureFixture) -> None:
    """Of data the first origin alone is known."""
    renderer = with_template(
        f"{{%- if m.content is string %}}{{{{- m.content }}}}{{%- else %}}{{{{- {printed} }}}}{{%- endif %}}"
    )
    unconverted = of_unconverted_contents(renderer.template.source)
    assert places(unconverted.render([user(text("one", "two"))])) == []
    assert "prints nothing" not in logged.text


# Names, reasoning, content beside calls.


def test_reasoning_that_a_template_prints_in_some_turn_is_dropped_from_earlier_ones_by_design(
    logged: pytest.LogCaptureFixture,
) -> None:
    renderer = loaded("trl/qwen3")
    messages = [user("a"), says("b", "thought"), user("c"), says("d", "thought again")]
    assert renderer.tokenizer.decode(renderer.render_ids(messages)).count("thought") == 1
    renderer.render(messages[:3], add_generation_prompt=True)
    renderer.render([user("a"), says("<think>thought</think>"), user("b")])
    assert not logged.records


# Tools.


def warnings_of(template: str, caplog: pytest.LogCaptureFixture) -> list[str]:
    """What is logged for two prompts with tools, and one without."""
    renderer = load_renderer(directory_of(template), chat_template=corpus.templates()[template])
    caplog.clear()
    with caplog.at_level("WARNING", logger="renderers"):
        renderer.render([user("Hi")], add_generation_prompt=True)
        assert not caplog.records
        for question in ("Hi", "Hello"):
            renderer.render([user(question)], tools=TOOLS, add_generation_prompt=True)
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("trl/qwen2_5_vl", [UNTOLD, UNPARSED]),
        ("own/deepseek-v3.1", [UNTOLD]),
        ("trl/lfm2", [UNPARSED]),
        ("trl/qwen3_vl", []),
    ],
)
def test_tools_of_which_the_model_is_not_told_are_logged_once(
    template: str, expected: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    logged = warnings_of(template, caplog)
    assert len(logged) == len(expected)
    for message, part in zip(logged, expected, strict=True):
        assert part in message
        assert "chat_template=" in message
