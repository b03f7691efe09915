"""Messages -> tokens: content that stays content, and attribution."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from renderers import RenderedTokens, TemplateRenderer
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

hostile = st.lists(
    st.sampled_from([*CONTROL_TOKENS, "<|im_", "end|>", "<", "|>", "user\n", " "]) | st.text(max_size=3), max_size=6
).map("".join)


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


def test_text_that_is_not_unicode_is_a_renderer_error(renderer: TemplateRenderer) -> None:
    with pytest.raises(RendererError):
        renderer.render([{"role": "user", "content": "\ud800"}])


@pytest.mark.parametrize("text", ["x", "Hello, world", " 12\n", "é😀"])
def test_sampled_tokens_start_directly_behind_the_generation_prompt(renderer: TemplateRenderer, text: str) -> None:
    question = {"role": "user", "content": "x"}
    prompt = renderer.render([question], add_generation_prompt=True)
    rendered = renderer.render([question, {"role": "assistant", "content": text}])
    first = rendered.sampled_mask.index(True)
    assert rendered.token_ids[:first] == prompt.token_ids
    last = len(rendered) - 1 - rendered.sampled_mask[::-1].index(True)
    assert rendered.token_ids[last] == renderer.get_stop_token_ids()[0] == control_id(renderer, "<|im_end|>")
    assert all(rendered.sampled_mask[first : last + 1])
    assert rendered.message_token_spans()[1] == (
        first - len(prompt.token_ids) + len(renderer.render([question])),
        len(rendered),
    )
