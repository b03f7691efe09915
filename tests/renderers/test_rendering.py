"""Messages -> tokens: the ids of Hugging Face, content that stays content, attribution, placeholders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import AutoTokenizer

from renderers import PlaceholderRange, RenderedTokens, TemplateRenderer
from renderers.errors import MessageError, RendererError

CONTROL_TOKENS = [
    "<|im_start|>",
    "<|im_end|>",
    "<|image_pad|>",
    "<|vision_start|>",
    "<|endoftext|>",
    "<think>",
    "</think>",
]
CONTROL_TOKENS += ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<|video_pad|>"]

benign = st.text(max_size=12).filter(lambda text: "<" not in text)
hostile = st.lists(
    st.sampled_from([*CONTROL_TOKENS, "<|im_", "end|>", "<", "|>", "user\n", " "]) | st.text(max_size=3), max_size=6
).map("".join)


def picture(width: int, height: int, colour: int = 0) -> Image.Image:
    return Image.new("RGB", (width, height), (colour, 10, 200))


def image_part(width: int = 32, height: int = 32, colour: int = 0) -> dict[str, Any]:
    return {"type": "image", "image": picture(width, height, colour)}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def control_id(renderer: TemplateRenderer, token: str) -> int:
    return renderer.tokenizer.require_control_id(token, "a test")


def count(rendered: RenderedTokens, token_id: int) -> int:
    return rendered.token_ids.count(token_id)


def content_of(renderer: TemplateRenderer, rendered: RenderedTokens, message: int) -> str:
    """The text of the body tokens of a message."""
    ids = [
        token_id
        for token_id, owner, body in zip(rendered.token_ids, rendered.message_indices, rendered.is_content, strict=True)
        if owner == message and body
    ]
    return renderer.tokenizer.decode(ids)


@pytest.fixture(scope="module")
def hf_tokenizer(tiny_model_dir: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_model_dir)


def hf_ids(hf_tokenizer: Any, messages: list[dict[str, Any]], **options: Any) -> list[int]:
    return list(hf_tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **options))


parts = st.lists(benign.map(text_part), max_size=3)


def test_ids_are_a_new_list_that_the_caller_may_change(renderer: TemplateRenderer) -> None:
    messages = [{"role": "user", "content": "x"}]
    first = renderer.render(messages)
    assert type(first.token_ids) is list
    assert {type(token_id) for token_id in first.token_ids} == {int}
    length = len(first)
    first.token_ids.append(0)
    assert len(renderer.render(messages)) == length


# Content is data.


@pytest.mark.slow
@settings(max_examples=80)
@given(role=st.sampled_from(["user", "system", "tool"]), text=hostile, as_part=st.booleans())
def test_content_never_adds_a_control_token_and_decodes_to_itself(
    renderer: TemplateRenderer, role: str, text: str, as_part: bool
) -> None:
    content = [text_part(text)] if as_part else text
    rendered = renderer.render([{"role": role, "content": content}])
    harmless = renderer.render([{"role": role, "content": "x"}])
    for token in CONTROL_TOKENS:
        token_id = control_id(renderer, token)
        assert count(rendered, token_id) == count(harmless, token_id), token
    assert content_of(renderer, rendered, 0) == text


def test_the_control_token_check_finds_a_planted_fault(tiny_model_dir: Path) -> None:
    from renderers import RendererOptions, load_renderer

    forging = load_renderer(tiny_model_dir, config=RendererOptions(body_policies={"user": "parse"}))
    rendered = forging.render([{"role": "user", "content": "<|im_end|>"}])
    assert count(rendered, control_id(forging, "<|im_end|>")) == 2


def test_content_cannot_complete_a_control_token_that_the_template_began(tiny_model_dir: Path) -> None:
    from renderers import load_renderer

    source = "{% for m in messages %}<|im_start|>{{ m.role }}\n<|im_{{ m.content }}<|im_end|>{% endfor %}"
    broken = load_renderer(tiny_model_dir, chat_template=source)
    rendered = broken.render([{"role": "user", "content": "end|>"}])
    assert count(rendered, control_id(broken, "<|im_end|>")) == 1


def test_text_of_tool_specifications_cannot_become_a_control_token(renderer: TemplateRenderer) -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": "<|im_end|><|image_pad|>"}}]
    rendered = renderer.render([{"role": "user", "content": "x"}], tools=tools)
    assert count(rendered, control_id(renderer, "<|im_end|>")) == 2
    assert count(rendered, control_id(renderer, "<|image_pad|>")) == 0


def test_the_error_policy_names_the_message(renderer: TemplateRenderer) -> None:
    strict = TemplateRenderer(renderer.template, renderer.tokenizer, renderer.format, body_policies={"user": "error"})
    fine = [{"role": "system", "content": "<|im_end|>"}, {"role": "user", "content": "x"}]
    assert strict.render_ids(fine) == renderer.render_ids(fine)
    with pytest.raises(MessageError, match=r"message 1: content holds .*<\|im_end\|>") as caught:
        strict.render([{"role": "system", "content": "x"}, {"role": "user", "content": "a<|im_end|>"}])
    assert caught.value.message_index == 1
    assert isinstance(caught.value, RendererError)


# Attribution.


def column(layout: list[tuple[str, int, bool, bool]], renderer: TemplateRenderer) -> list[tuple[int, bool, bool]]:
    """Per token: owner, sampled, content. Control tokens are one token, other text one token per byte."""
    rows = []
    for text, owner, sampled, content in layout:
        single = renderer.tokenizer.control_id(text) is not None
        rows += [(owner, sampled, content)] * (1 if single else len(text.encode()))
    return rows


def test_columns_of_a_literal_conversation(renderer: TemplateRenderer) -> None:
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "é<"},
        {"role": "assistant", "content": "ok<think>"},
        {"role": "tool", "content": "T"},
    ]
    layout = [
        # The template prints a leading system message before its loop: only the body is owned.
        ("<|im_start|>", -1, False, False),
        ("system\n", -1, False, False),
        ("S", 0, False, True),
        ("<|im_end|>", -1, False, False),
        ("\n", -1, False, False),
        ("<|im_start|>", 1, False, False),
        ("user\n", 1, False, False),
        ("é<", 1, False, True),
        ("<|im_end|>", 1, False, False),
        ("\n", 1, False, False),
        ("<|im_start|>", 2, False, False),
        ("assistant\n", 2, False, False),
        ("ok", 2, True, True),
        ("<think>", 2, True, True),
        ("<|im_end|>", 2, True, True),
        ("\n", 2, False, False),
        ("<|im_start|>", 3, False, False),
        ("user\n", 3, False, False),
        ("<tool_response>", 3, False, False),
        ("\n", 3, False, False),
        ("T", 3, False, True),
        ("\n", 3, False, False),
        ("</tool_response>", 3, False, False),
        ("<|im_end|>", 3, False, False),
        ("\n", 3, False, False),
        ("<|im_start|>", -1, False, False),
        ("assistant\n", -1, False, False),
    ]
    rendered = renderer.render(messages, add_generation_prompt=True)
    assert renderer.tokenizer.decode(rendered.token_ids) == "".join(text for text, *_ in layout)
    columns = zip(rendered.message_indices, rendered.sampled_mask, rendered.is_content, strict=True)
    assert list(columns) == column(layout, renderer)
    assert rendered.message_roles == ["system", "user", "assistant", "tool"]


def test_tool_calls_of_an_assistant_are_sampled_up_to_and_including_the_stop_token(renderer: TemplateRenderer) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "hm", "tool_calls": [call, call]},
        {"role": "user", "content": "y"},
    ]
    rendered = renderer.render(messages)
    sampled = [t for t, chosen in zip(rendered.token_ids, rendered.sampled_mask, strict=True) if chosen]
    block = '\n<tool_call>\n{"name": "look", "arguments": {"a": 1}}\n</tool_call>'
    assert renderer.tokenizer.decode(sampled) == f"hm{block}{block}<|im_end|>"


def check_spans(rendered: RenderedTokens) -> None:
    """Spans partition the tokens."""
    position = 0
    for span in rendered.spans:
        assert span.start == position < span.end
        position = span.end
    assert position == len(rendered.token_ids)


# Media.


def check_placeholders(renderer: TemplateRenderer, rendered: RenderedTokens) -> None:
    """Each range covers as many placeholder tokens as its grid has merged patches; none is left uncovered."""
    assert rendered.multi_modal_data is not None
    pad = control_id(renderer, "<|image_pad|>")
    covered = 0
    for item, where in rendered.multi_modal_data.items_with_ranges():
        grid = item["image_grid_thw"]
        assert where.length == int(np.prod(grid)) // 4 == item.num_tokens
        assert rendered.token_ids[where.offset : where.end] == [pad] * where.length
        assert rendered.token_ids[where.offset - 1] == control_id(renderer, "<|vision_start|>")
        assert rendered.token_ids[where.end] == control_id(renderer, "<|vision_end|>")
        assert item["pixel_values"].shape == (int(np.prod(grid)), 3 * 2 * 8 * 8)
        covered += where.length
    assert covered == count(rendered, pad)
    check_spans(rendered)


def logical(rendered: RenderedTokens) -> list[int]:
    """Ids with one placeholder token per image."""
    ids = list(rendered.token_ids)
    assert rendered.multi_modal_data is not None
    for _, where in reversed(rendered.multi_modal_data.items_with_ranges()):
        del ids[where.offset + 1 : where.end]
    return ids


IMAGE_CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], list[int]]] = {
    "one": ([{"role": "user", "content": [text_part("a"), image_part(), text_part("b")]}], [4]),
    "only an image": ([{"role": "user", "content": [image_part(64, 48)]}], [12]),
    "adjacent": ([{"role": "user", "content": [image_part(), image_part(64, 48), image_part(48, 32)]}], [4, 12, 6]),
    "the same twice": ([{"role": "user", "content": [image_part(), text_part("and"), image_part()]}], [4, 4]),
    "in a tool message": (
        [{"role": "user", "content": "x"}, {"role": "tool", "content": [text_part("shot"), image_part()]}],
        [4],
    ),
    "in several messages": (
        [
            {"role": "system", "content": [image_part(colour=1)]},
            {"role": "user", "content": [image_part(colour=2)]},
            {"role": "assistant", "content": "ok"},
            {"role": "user", "content": [text_part("x"), image_part(64, 48, 3)]},
        ],
        [4, 4, 12],
    ),
    "none": ([{"role": "user", "content": "x"}], []),
}


@pytest.mark.parametrize("name", IMAGE_CONVERSATIONS)
def test_each_image_becomes_as_many_placeholders_as_its_merged_patches(
    renderer: TemplateRenderer, hf_tokenizer: Any, name: str
) -> None:
    messages, lengths = IMAGE_CONVERSATIONS[name]
    rendered = renderer.render(messages, add_generation_prompt=True)
    check_placeholders(renderer, rendered)
    assert rendered.multi_modal_data is not None
    assert [where.length for _, where in rendered.multi_modal_data.items_with_ranges()] == lengths
    shown = [
        {**message, "content": [{"type": part["type"], "text": part.get("text")} for part in message["content"]]}
        if isinstance(message["content"], list)
        else message
        for message in messages
    ]
    assert logical(rendered) == hf_ids(hf_tokenizer, shown, add_generation_prompt=True)


def test_the_placeholder_check_finds_planted_faults(renderer: TemplateRenderer) -> None:
    rendered = renderer.render([{"role": "user", "content": [image_part()]}])
    assert rendered.multi_modal_data is not None
    where = rendered.multi_modal_data.mm_placeholders["image"][0]
    for wrong in (where.shifted(1), PlaceholderRange(where.offset, where.length - 1)):
        rendered.multi_modal_data.mm_placeholders["image"][0] = wrong
        with pytest.raises(AssertionError):
            check_placeholders(renderer, rendered)


@settings(max_examples=30)
@given(text=hostile, images=st.integers(0, 2))
def test_the_text_of_a_placeholder_in_content_is_not_an_image(
    renderer: TemplateRenderer, text: str, images: int
) -> None:
    parts = [text_part(f"<|image_pad|>{text}<|vision_start|><|image_pad|>"), *[image_part()] * images]
    rendered = renderer.render([{"role": "user", "content": parts}])
    check_placeholders(renderer, rendered)
    assert rendered.multi_modal_data is not None
    assert len(rendered.multi_modal_data) == images


def test_text_that_is_not_unicode_is_a_renderer_error(renderer: TemplateRenderer) -> None:
    with pytest.raises(RendererError):
        renderer.render([{"role": "user", "content": "\ud800"}])
