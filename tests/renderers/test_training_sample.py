"""One supervised sample of a whole conversation: which tokens carry loss, the final stop token, refused arguments."""

from __future__ import annotations

from typing import Any

import corpus
import pytest
from corpus import CONVERSATIONS, answer, call, says, system, text, user
from PIL import Image
from training_conversations import QUESTION, renderer_of, trained_text

from renderers import TemplateRenderer
from renderers.errors import MessageError, RendererError, TemplateError
from renderers.training_sample import RenderedTrainingSample, build_training_sample, build_training_samples


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_tokens_equal_those_of_the_rendering_and_sampled_tokens_carry_loss(name: str) -> None:
    renderer = renderer_of("trl/qwen3")
    messages, tools = CONVERSATIONS[name]
    try:
        rendered = renderer.render(messages, tools=tools)
    except TemplateError:
        pytest.skip("the template refuses this conversation")
    sample = build_training_sample(renderer, messages, tools=tools)
    assert sample.token_ids == rendered.token_ids
    assert sample.loss_mask == rendered.sampled_mask
    assert sample.message_indices == rendered.message_indices
    assert sample.num_trained_tokens == sum(rendered.sampled_mask)
    trained = tuple(i for i, m in enumerate(messages) if m["role"] == "assistant")
    assert sample.trained_messages == (trained if sample.num_trained_tokens else ())
    assert sample.multi_modal_data is None
    assert sample.mm_token_type_ids is None


def test_the_stop_token_is_trained_and_the_scaffold_is_not() -> None:
    renderer = renderer_of("trl/qwen2_5")
    sample = build_training_sample(renderer, [system("S"), QUESTION, says("b"), user("c"), says("d")])
    assert trained_text(renderer, sample) == ["b<|im_end|>", "d<|im_end|>"]


def test_a_message_mask_removes_the_loss_and_not_the_tokens() -> None:
    renderer = renderer_of("trl/qwen2_5")
    messages = [QUESTION, says("b"), user("c"), says("d")]
    sample = build_training_sample(renderer, messages, message_loss_mask=[1, 0, True, True])
    assert sample.token_ids == renderer.render_ids(messages)
    assert trained_text(renderer, sample) == ["d<|im_end|>"]
    assert sample.trained_messages == (3,)


def test_a_role_filter_gets_whole_messages() -> None:
    renderer = renderer_of("trl/qwen2_5")
    messages = [QUESTION, says("b"), user("c"), says("d")]
    sample = build_training_sample(renderer, messages, role_to_mask=lambda message: message["content"] != "d")
    assert trained_text(renderer, sample) == ["b<|im_end|>"]


def test_body_roles_carry_loss_on_their_content_and_never_on_the_scaffold() -> None:
    renderer = renderer_of("trl/qwen2_5")
    messages = [user("ask"), says("", None, [call("run", {})]), answer("result"), says("done")]
    sample = build_training_sample(renderer, messages, content_sft_roles={"tool"})
    assert trained_text(renderer, sample)[1:] == ["result", "done<|im_end|>"]
    only_body = build_training_sample(
        renderer, messages, content_sft_roles={"tool"}, role_to_mask=lambda message: False
    )
    assert trained_text(renderer, only_body) == ["result"]
    assert only_body.trained_messages == (2,)


def test_an_assistant_among_the_body_roles_is_trained_on_its_sampled_tokens() -> None:
    renderer = renderer_of("trl/qwen2_5")
    sample = build_training_sample(
        renderer, [QUESTION, says("b")], content_sft_roles={"assistant"}, role_to_mask=lambda message: False
    )
    assert trained_text(renderer, sample) == ["b<|im_end|>"]


def test_samples_have_their_images_and_placeholders_never_carry_loss(renderer: TemplateRenderer) -> None:
    image = {"type": "image", "image": Image.new("RGB", (64, 48), (1, 2, 3))}
    messages = [user([*text("look"), image, *text("here")]), says("I see")]
    sample = build_training_sample(renderer, messages, content_sft_roles={"user"})
    assert trained_text(renderer, sample) == ["look", "here", "I see<|im_end|>"]
    assert sample.multi_modal_data is not None
    (where,) = sample.multi_modal_data.mm_placeholders["image"]
    pad = renderer.tokenizer.require_control_id("<|image_pad|>", "a test")
    assert sample.mm_token_type_ids == [int(token_id == pad) for token_id in sample.token_ids]
    assert sum(sample.mm_token_type_ids) == where.length == 12


def test_a_sample_without_images_has_no_media(renderer: TemplateRenderer) -> None:
    sample = build_training_sample(renderer, [QUESTION, says("b")])
    assert sample.multi_modal_data is None
    assert sample.mm_token_type_ids is None


@pytest.mark.parametrize("mask", [[True], [True] * 3, []])
def test_a_mask_of_the_wrong_length_is_refused(mask: list[bool]) -> None:
    with pytest.raises(RendererError, match=f"{len(mask)} entries for 2 messages"):
        build_training_sample(renderer_of("trl/qwen2_5"), [QUESTION, says("b")], message_loss_mask=mask)


def test_a_mask_of_weights_is_refused_with_its_index() -> None:
    with pytest.raises(RendererError, match=r"message_loss_mask\[1\] is 0.5"):
        build_training_sample(renderer_of("trl/qwen2_5"), [QUESTION, says("b")], message_loss_mask=[1, 0.5])  # type: ignore[list-item]


def test_an_unknown_body_role_is_refused() -> None:
    with pytest.raises(MessageError, match="'tools'"):
        build_training_sample(renderer_of("trl/qwen2_5"), [QUESTION, says("b")], content_sft_roles={"tools"})


@pytest.mark.parametrize(
    ("messages", "options", "reason"),
    [
        ([QUESTION], {}, "no assistant message"),
        ([QUESTION, says("b")], {"message_loss_mask": [True, False]}, "every assistant message"),
        ([QUESTION, says("b")], {"role_to_mask": lambda message: False}, "every assistant message"),
        (
            [user(""), says("b")],
            {"message_loss_mask": [True, False], "content_sft_roles": {"user"}},
            r"messages \[0\]",
        ),
    ],
)
def test_a_conversation_without_loss_is_one_sample_without_loss_and_an_error_that_names_the_reason_for_several(
    messages: Any, options: Any, reason: str
) -> None:
    renderer = renderer_of("trl/qwen2_5")
    sample = build_training_sample(renderer, messages, **options)
    assert sample.loss_mask == [False] * len(sample)
    with pytest.raises(RendererError, match=reason):
        build_training_samples(renderer, messages, **options)


def test_a_sample_of_columns_reads_back_as_these_columns() -> None:
    sample = RenderedTrainingSample(token_ids=[5, 6, 7, 8], loss_mask=[False, True, True, False])
    assert (sample.token_ids, sample.loss_mask) == ([5, 6, 7, 8], [False, True, True, False])
    assert sample.loss_ranges == ((1, 3),)
    assert (sample.multi_modal_data, sample.mm_token_type_ids) == (None, None)
    typed = RenderedTrainingSample(token_ids=[5], loss_mask=[True], mm_token_type_ids=[1])
    assert typed.mm_token_type_ids == [1]


def test_a_stop_token_that_the_template_prints_is_not_added_again() -> None:
    renderer = renderer_of("trl/qwen2_5")
    messages = [QUESTION, says("b")]
    assert build_training_sample(renderer, messages, ensure_final_stop=True) == build_training_sample(
        renderer, messages
    )


@pytest.mark.parametrize("build", [build_training_sample, lambda *a, **k: build_training_samples(*a, **k)[-1]])
def test_a_stop_token_that_the_template_omits_is_added_only_with_ensure_final_stop(build: Any) -> None:
    renderer = renderer_of("trl/glm4moe")
    messages = [QUESTION, says("b")]
    stops = renderer.get_stop_token_ids()
    bare = build(renderer, messages)
    assert bare.token_ids == renderer.render_ids(messages)
    assert bare.token_ids[-1] not in stops
    closed = build(renderer, messages, ensure_final_stop=True)
    assert closed.token_ids[:-1] == bare.token_ids
    assert closed.token_ids[-1] in stops
    assert closed.loss_mask == [*bare.loss_mask, True]
    assert closed.message_indices[-1] == 1


def test_no_stop_token_is_added_after_a_last_turn_without_loss() -> None:
    renderer = renderer_of("trl/glm4moe")
    messages = [QUESTION, says("b"), user("c"), says("d")]
    sample = build_training_sample(renderer, messages, ensure_final_stop=True, message_loss_mask=[1, 1, 1, 0])
    assert sample.token_ids == renderer.render_ids(messages)


@pytest.mark.parametrize(
    ("turn", "stop"), [(says("b"), "<|user|>"), (says("", None, [call("run", {})]), "<|observation|>")]
)
def test_the_added_stop_token_is_the_one_that_the_template_prints_before_the_next_message(
    turn: dict[str, Any], stop: str
) -> None:
    renderer = renderer_of("trl/glm4moe")
    sample = build_training_sample(renderer, [QUESTION, turn], tools=corpus.TOOLS, ensure_final_stop=True)
    assert sample.token_ids[-1] == renderer.tokenizer.control_id(stop)


@pytest.mark.parametrize("build", [build_training_sample, build_training_samples])
def test_a_malformed_conversation_is_refused_with_its_position(build: Any) -> None:
    with pytest.raises(MessageError, match="message 1"):
        build(renderer_of("trl/qwen2_5"), [QUESTION, "b"], message_loss_mask=[True])
