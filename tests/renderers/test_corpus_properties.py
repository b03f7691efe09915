# ruff: noqa: RUF001  (DeepSeek spells its tokens with a fullwidth bar)
"""What holds of every renderer, on real templates: attribution, caches, threads, loading, parsing piece by piece."""

import itertools
import json
import threading
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import corpus
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loaded import TODAY, directory_of, renderer_of
from test_bridge import check_spans
from transformers import PreTrainedTokenizerFast

from renderers import RenderedTokens, RendererOptions, TemplateRenderer, create_renderer

TEMPLATES = [
    "own/deepseek-v3.1",
    "own/glm-4.5v",
    "own/minimax-m3",
    "trl/gemma4",
    "trl/gptoss",
    "trl/llama3_1",
    "trl/qwen3",
    "trl/qwen3_5_think",
]


def uncached(renderer: TemplateRenderer) -> TemplateRenderer:
    """The same renderer, without the cache of conversations that were laid out before."""
    return TemplateRenderer(renderer.template, renderer.tokenizer, renderer.format, cache_bytes=0)


# Conversations.

#: What templates and tokenizers may stumble over, between any other text.
NASTY = [
    "<|im_end|>",
    "<|user|>",
    "[e~[",
    "<｜User｜>",
    "<|end|>",
    "<turn|>",
    "</think>",
    "\n\n",
    " \n",
    "{{ x }}",
    "jsonp",
]
texts = st.lists(st.sampled_from(NASTY) | st.text(max_size=4), max_size=4).map("".join)
Conversation = tuple[list[dict[str, Any]], list[dict[str, Any]] | None]


@st.composite
def conversations(draw: st.DrawFn, arguments_form: str) -> Conversation:
    """Questions, answers and tool cycles in the order that every template accepts.

    Every body begins and ends with a digit that is its own: digits never share a token with what templates print around
    them, and are not stripped.
    """
    bodies = (f"{index % 10}{draw(texts)}{index % 10}" for index in itertools.count())
    arguments: Any = {"code": draw(texts)}
    called = corpus.call("run", arguments if arguments_form == "object" else json.dumps(arguments))
    messages = [corpus.system(next(bodies))] if draw(st.booleans()) else []
    has_tools = draw(st.booleans())
    for _ in range(draw(st.integers(1, 3))):
        messages.append(corpus.user(next(bodies)))
        if has_tools and draw(st.booleans()):
            messages += [corpus.says("", None, [called]), corpus.answer(next(bodies), name="run")]
        if draw(st.booleans()):
            messages.append(corpus.says(f"A {draw(texts)}", draw(st.none() | st.just("because"))))
        else:
            messages.append(corpus.says("A"))
    return messages[: len(messages) - draw(st.integers(0, 1))], corpus.TOOLS if has_tools else None


def drawn(data: st.DataObject, template: str) -> tuple[TemplateRenderer, Conversation]:
    renderer = renderer_of(template)
    return renderer, data.draw(conversations(renderer.format.arguments))


over_templates = pytest.mark.parametrize("template", TEMPLATES)
a_few = settings(max_examples=15, deadline=None)


# Attribution.


def check_distinct_spans(rendered: RenderedTokens) -> None:
    """Spans partition the tokens, and no two neighbours are alike."""
    check_spans(rendered)
    assert all(one[2:] != other[2:] for one, other in itertools.pairwise(rendered.spans))


def check_sampled(rendered: RenderedTokens, messages: list[dict[str, Any]]) -> None:
    """Only assistants sample; what they sample is what they say."""
    for span in rendered.spans:
        is_assistant = span.message_index >= 0 and messages[span.message_index]["role"] == "assistant"
        assert is_assistant or not span.sampled
        assert span.sampled == span.content or not is_assistant


def check_bodies(renderer: TemplateRenderer, rendered: RenderedTokens, messages: list[dict[str, Any]]) -> int:
    """Every body that the template prints as it is reads back from its tokens; returns how many there were.

    Also where it is printed inside another message's turn (Gemma's results of tools): it belongs to who says it.
    """
    printed = nfc(renderer.tokenizer.decode(rendered.token_ids))
    bodies = [(i, nfc(m["content"])) for i, m in enumerate(messages) if m["role"] != "assistant"]
    verbatim = [(index, body) for index, body in bodies if body and body in printed]
    for index, body in verbatim:
        assert body in [nfc(renderer.tokenizer.decode(run)) for run in content_runs(rendered, index)]
    return len(verbatim)


def content_runs(rendered: RenderedTokens, message: int) -> list[list[int]]:
    """The content tokens of a message, as runs without anything between: its body, and in some templates a name."""
    columns = zip(rendered.token_ids, rendered.message_indices, rendered.is_content, strict=True)
    runs = itertools.groupby(columns, key=lambda column: column[1] == message and column[2])
    return [[token_id for token_id, _, _ in run] for is_body, run in runs if is_body]


def nfc(text: str) -> str:
    """Some of the tokenizers compose characters before they encode."""
    return unicodedata.normalize("NFC", text)


@pytest.mark.slow
@over_templates
@a_few
@given(data=st.data(), prompt=st.booleans())
def test_spans_partition_the_tokens_and_only_assistants_sample(
    template: str, data: st.DataObject, prompt: bool
) -> None:
    renderer, (messages, tools) = drawn(data, template)
    rendered = renderer.render(messages, tools=tools, add_generation_prompt=prompt)
    check_distinct_spans(rendered)
    check_sampled(rendered, messages)
    assert set(rendered.message_indices) <= {-1, *range(len(messages))}


@pytest.mark.slow
@over_templates
@a_few
@given(data=st.data())
def test_content_tokens_decode_to_the_body_of_their_message_and_the_header_belongs_to_the_message_too(
    template: str, data: st.DataObject
) -> None:
    renderer, (messages, tools) = drawn(data, template)
    rendered = renderer.render(messages, tools=tools, add_generation_prompt=True)
    found = check_bodies(renderer, rendered, messages)
    users = [index for index, message in enumerate(messages) if message["role"] == "user"]
    assert found >= len(users), "every one of these templates prints as it is what users say"
    if tools is None:  # Llama 3.1 shows its tools in the first question, before it comes to the messages
        for index in users:
            first = next(span.start for span in rendered.spans if span.content and span.message_index == index)
            assert rendered.message_indices[first - 1] == index


# Caches and threads.


@pytest.mark.slow
@over_templates
@a_few
@given(data=st.data(), prompt=st.booleans())
def test_a_conversation_rendered_from_the_cache_equals_the_first_rendering(
    template: str, data: st.DataObject, prompt: bool
) -> None:
    renderer, (messages, tools) = drawn(data, template)
    first = uncached(renderer).render(messages, tools=tools, add_generation_prompt=prompt)
    for _ in range(2):
        again = renderer.render(messages, tools=tools, add_generation_prompt=prompt)
        assert (again.token_ids, again.spans, again.message_roles) == (
            first.token_ids,
            first.spans,
            first.message_roles,
        )
        again.token_ids.clear()  # what a caller does to a rendering reaches no other
        again.message_roles.clear()


@over_templates
def test_many_threads_render_the_same_as_one(template: str) -> None:
    renderer = renderer_of(template)
    asked = [
        (messages, tools)
        for name in ("system, two turns", "reasoning", "unicode", "tools offered", "long", "looks like markup")
        for messages, tools in (corpus.CONVERSATIONS[name],)
    ] * 2
    expected = [uncached(renderer).render(messages, tools=tools) for messages, tools in asked]
    # No text is known yet: the threads meet in the tokenizer, not in its cache.
    shared = TemplateRenderer(renderer.template, renderer.tokenizer, renderer.format)
    together = threading.Barrier(8)

    def work(offset: int) -> list[RenderedTokens]:
        together.wait()
        turned = [*asked[offset:], *asked[:offset]]
        rendered = [shared.render(messages, tools=tools) for messages, tools in turned]
        return [*rendered[len(asked) - offset :], *rendered[: len(asked) - offset]]

    with ThreadPoolExecutor(8) as threads:
        for got in threads.map(work, range(8)):
            assert [(one.token_ids, one.spans) for one in got] == [(one.token_ids, one.spans) for one in expected]


# Loading.


@pytest.mark.slow
@pytest.mark.parametrize("template", ["own/deepseek-v3", "trl/gemma4", "trl/gptoss", "own/qwen3-235b-a22b-mlx-4bit"])
def test_a_renderer_made_from_a_loaded_tokenizer_gives_the_ids_of_one_loaded_from_the_directory(template: str) -> None:
    from_directory = renderer_of(template)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(directory_of(template)))
    tokenizer.chat_template = corpus.templates()[template]
    from_tokenizer = create_renderer(tokenizer, RendererOptions(), now=lambda: TODAY)
    assert from_tokenizer.format == from_directory.format
    assert from_tokenizer.get_stop_token_ids() == from_directory.get_stop_token_ids()
    for name in ("system, two turns", "unicode", "tools offered", "white space", "looks like markup"):
        messages, tools = corpus.CONVERSATIONS[name]
        ids = [
            renderer.render_ids(messages, tools=tools, add_generation_prompt=True)
            for renderer in (from_directory, from_tokenizer)
        ]
        assert ids[0] == ids[1], name
