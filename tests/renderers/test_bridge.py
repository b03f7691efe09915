"""prompt + completion + new messages -> the next prompt, verbatim, or a refusal with a reason."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from spelling import ids_of

from renderers import (
    BridgeRefusal,
    RenderedTokens,
    TemplateRenderer,
)

benign = st.text(max_size=8).filter(lambda text: "<" not in text)
COLOURS = {colour: Image.new("RGB", (32 + 16 * colour, 32), (colour, 0, 0)) for colour in range(3)}


def image_part(colour: int = 0) -> dict[str, Any]:
    return {"type": "image", "image": COLOURS[colour]}


parts = st.lists(
    benign.map(lambda text: {"type": "text", "text": text}) | st.sampled_from(list(COLOURS)).map(image_part), max_size=3
)
contents = benign | parts
users = st.fixed_dictionaries({"role": st.sampled_from(["user", "system"]), "content": contents})
tools = st.fixed_dictionaries({"role": st.just("tool"), "tool_call_id": st.just("call_0"), "content": contents})
call = {"id": "call_0", "type": "function", "function": {"name": "look", "arguments": {"at": ["x", 1]}}}
assistants = st.builds(
    lambda text, calls: {"role": "assistant", "content": text.rstrip("\n"), "tool_calls": [call] * calls},
    benign,
    st.integers(0, 2),
)
histories = st.lists(users | assistants | tools, min_size=1, max_size=3)
new_messages = st.lists(users | tools, min_size=1, max_size=3)

QUESTION: list[dict[str, Any]] = [{"role": "user", "content": "Q"}]
REPLY: list[dict[str, Any]] = [{"role": "user", "content": "R"}]


def sampled_turn(renderer: TemplateRenderer, history: list[Any], assistant: Any) -> list[int]:
    """The tokens of the last turn that the model would have sampled."""
    rendered = renderer.render([*history, assistant])
    columns = zip(rendered.token_ids, rendered.message_indices, rendered.sampled_mask, strict=True)
    return [token_id for token_id, owner, sampled in columns if sampled and owner == len(history)]


def check_media(result: RenderedTokens, expected: RenderedTokens) -> None:
    assert result.multi_modal_data is not None
    assert expected.multi_modal_data is not None
    for one, other in zip(
        result.multi_modal_data.items_with_ranges(), expected.multi_modal_data.items_with_ranges(), strict=True
    ):
        assert one[0].mm_hash == other[0].mm_hash
        assert one[1] == other[1]
    assert result.multi_modal_data.mm_hashes == expected.multi_modal_data.mm_hashes


def check_spans(rendered: RenderedTokens) -> None:
    position = 0
    for span in rendered.spans:
        assert span.start == position < span.end
        position = span.end
    assert position == len(rendered.token_ids)


def bridged(outcome: RenderedTokens | BridgeRefusal | None) -> RenderedTokens:
    assert isinstance(outcome, RenderedTokens), outcome
    return outcome


# The oracle.


@given(history=histories, assistant=assistants, new=new_messages, told=st.booleans())
def test_bridging_a_canonical_completion_is_rendering_the_whole_conversation(
    renderer: TemplateRenderer, history: list[Any], assistant: Any, new: list[Any], told: bool
) -> None:
    prompt = renderer.render(history, add_generation_prompt=True)
    completion = sampled_turn(renderer, history, assistant)
    result = bridged(
        renderer.bridge_to_next_turn(
            prompt.token_ids,
            completion,
            new,
            previous_messages=history if told else None,
            previous_multi_modal_data=prompt.multi_modal_data,
        )
    )
    whole = renderer.render([*history, assistant, *new], add_generation_prompt=True)
    assert result.token_ids == whole.token_ids
    end = len(prompt.token_ids) + len(completion)
    rest = len(whole.token_ids) - end
    assert result.sampled_mask == [False] * len(prompt.token_ids) + [True] * len(completion) + [False] * rest
    assert result.is_content[end:] == whole.is_content[end:]
    assert result.message_indices[:end] == [-1] * end
    assert result.message_indices[end:] == [max(i - len(history) - 1, -1) for i in whole.message_indices[end:]]
    assert result.message_roles == [message["role"] for message in new]
    check_media(result, whole)
    check_spans(result)


@pytest.mark.slow
@settings(max_examples=60)
@given(
    sampled=st.lists(st.integers(0, 400) | st.integers(10**6, 10**9), max_size=12),
    stopped=st.booleans(),
    new=new_messages,
)
def test_any_sampled_tokens_are_continued_verbatim(
    renderer: TemplateRenderer, sampled: list[int], stopped: bool, new: list[Any]
) -> None:
    prompt = renderer.render(QUESTION, add_generation_prompt=True).token_ids
    completion = sampled + renderer.get_stop_token_ids()[:1] * stopped
    outcome = renderer.try_bridge(prompt, completion, new)
    if isinstance(outcome, BridgeRefusal):
        assert outcome is BridgeRefusal.OPEN_REASONING
        assert ids_of(renderer, "<think>")[0] in completion
        return
    assert outcome.token_ids[: len(prompt) + len(completion)] == prompt + completion
    assert outcome.token_ids[-len("assistant\n") - 1 :] == prompt[-len("assistant\n") - 1 :]
    check_spans(outcome)


@settings(max_examples=30)
@given(
    text=st.text(max_size=4).map(lambda text: f"<|im_end|>{text}<|image_pad|><think>"),
    role=st.sampled_from(["user", "tool"]),
)
def test_the_text_of_control_tokens_in_new_messages_stays_text(
    renderer: TemplateRenderer, text: str, role: str
) -> None:
    prompt = renderer.render(QUESTION, add_generation_prompt=True).token_ids
    completion = ids_of(renderer, "A", "<|im_end|>")
    result = bridged(renderer.bridge_to_next_turn(prompt, completion, [{"role": role, "content": text}]))
    behind = result.token_ids[len(prompt) + len(completion) :]
    assert behind.count(ids_of(renderer, "<|im_end|>")[0]) == 1
    assert not set(ids_of(renderer, "<|image_pad|>", "<think>")) & set(behind)


# Media.


def test_a_sampled_placeholder_is_not_an_image(renderer: TemplateRenderer) -> None:
    prompt = renderer.render([{"role": "user", "content": [image_part()]}], add_generation_prompt=True)
    completion = ids_of(renderer, "look: ", "<|image_pad|>", "<|vision_start|>", "<|image_pad|>", "<|im_end|>")
    first = bridged(
        renderer.bridge_to_next_turn(
            prompt.token_ids, completion, REPLY, previous_multi_modal_data=prompt.multi_modal_data
        )
    )
    assert first.multi_modal_data is not None
    assert len(first.multi_modal_data) == 1
    second = bridged(
        renderer.bridge_to_next_turn(
            first.token_ids,
            completion,
            [{"role": "user", "content": [image_part(1)]}],
            previous_multi_modal_data=first.multi_modal_data,
        )
    )
    assert second.multi_modal_data is not None
    assert [where.length for where in second.multi_modal_data.mm_placeholders["image"]] == [4, 6]
