"""One supervised sample of a whole conversation: which tokens carry loss, the final stop token, refused arguments."""

from typing import Any

import corpus
import loaded
import pytest
from corpus import answer, call, says, text, user
from PIL import Image
from training_conversations import QUESTION, renderer_of, trained_text

from renderers import TemplateRenderer
from renderers.errors import ConfigError, MessageError, RendererError
from renderers.training_sample import RenderedTrainingSample, build_training_sample, build_training_samples


def test_a_message_mask_removes_the_loss_and_not_the_tokens() -> None:
    renderer = renderer_of("trl/qwen2_5")
    messages = [QUESTION, says("b"), user("c"), says("d")]
    sample = build_training_sample(renderer, messages, message_loss_mask=[1, 0, True, True])
    assert sample.token_ids == renderer.render_ids(messages)
    assert trained_text(renderer, sample) == ["d<|im_end|>"]
    assert sample.trained_messages == (3,)


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


def test_content_that_gemma_4_prints_behind_the_results_of_its_calls_carries_no_loss() -> None:
    renderer = loaded.renderer_of("trl/gemma4")
    messages = [user("ask"), says("Looking.", None, [call("run", {})]), answer("result"), says("done")]
    sample = build_training_sample(renderer, messages)
    calls, done = trained_text(renderer, sample)
    assert "call:run" in calls
    assert done.startswith("done")
    printed = renderer.tokenizer.decode(sample.token_ids)
    assert printed.index("result") < printed.index("Looking.") < printed.rindex("done")


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


@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        ([True], r"message_loss_mask is \[True\]; it can be a list of 2 values, True or False for each message"),
        ([True] * 3, "it can be a list of 2 values"),
        ([], r"message_loss_mask is \[\]; it can be a list of 2 values"),
        ([True, 0.5], r"message_loss_mask\[1\] is 0.5; it can be True, False"),
        ([True, 1.0], r"message_loss_mask\[1\] is 1.0; it can be True, False"),
    ],
)
def test_a_mask_that_is_not_one_bool_for_each_message_is_refused(mask: list[Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        build_training_sample(renderer_of("trl/qwen2_5"), [QUESTION, says("b")], message_loss_mask=mask)


@pytest.mark.parametrize(
    ("messages", "options", "reason"),
    [
        ([QUESTION], {}, r"no assistant message \(its roles: user\).*content_sft_roles"),
        ([QUESTION, says("b")], {"message_loss_mask": [True, False]}, r"exclude all assistant messages, \[1\]"),
        ([QUESTION, says("b")], {"role_to_mask": lambda message: False}, r"exclude all assistant messages, \[1\]"),
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


@pytest.mark.parametrize("empty", [{}, {"tool_calls": []}, {"tool_calls": None}, {"reasoning_content": ""}], ids=str)
@pytest.mark.parametrize("build", [build_training_sample, build_training_samples])
def test_a_trained_turn_without_content_and_calls_is_refused_and_an_empty_text_is_not(build: Any, empty: Any) -> None:
    renderer, without = renderer_of("trl/qwen2_5"), {"role": "assistant", "content": None, **empty}
    with pytest.raises(MessageError, match=r"its content is None, and it has no tool_calls.*for message 1") as caught:
        build(renderer, [QUESTION, without])
    assert caught.value.message_index == 1
    for turn in (says(""), {**without, "tool_calls": [call("run", {})]}):
        build(renderer, [QUESTION, turn])
    build(renderer, [QUESTION, says("b"), QUESTION, {**without, "content": ""}], message_loss_mask=[1, 1, 1, 0])


def test_a_sample_of_columns_reads_back_as_these_columns() -> None:
    sample = RenderedTrainingSample(token_ids=[5, 6, 7, 8], loss_mask=[False, True, True, False])
    assert (sample.token_ids, sample.loss_mask) == ([5, 6, 7, 8], [False, True, True, False])
    assert sample.loss_ranges == ((1, 3),)
    assert (sample.multi_modal_data, sample.mm_token_type_ids) == (None, None)
    typed = RenderedTrainingSample(token_ids=[5], loss_mask=[True], mm_token_type_ids=[1])
    assert typed.mm_token_type_ids == [1]


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


def test_a_mask_does_not_remove_the_added_stop_token_but_its_loss() -> None:
    renderer, messages = renderer_of("trl/glm4moe"), [QUESTION, says("a"), QUESTION, says("b")]
    whole = build_training_sample(renderer, messages, ensure_final_stop=True)
    masked = build_training_sample(renderer, messages, message_loss_mask=[1, 1, 1, 0], ensure_final_stop=True)
    assert masked.token_ids == whole.token_ids
    assert (whole.loss_mask[-1], masked.loss_mask[-1]) == (True, False)


@pytest.mark.parametrize(
    ("turn", "stop"), [(says("b"), "<|user|>"), (says("", None, [call("run", {})]), "<|observation|>")]
)
def test_the_added_stop_token_is_the_one_that_the_template_prints_before_the_next_message(
    turn: dict[str, Any], stop: str
) -> None:
    renderer = renderer_of("trl/glm4moe")
    sample = build_training_sample(renderer, [QUESTION, turn], tools=corpus.TOOLS, ensure_final_stop=True)
    assert sample.token_ids[-1] == renderer.tokenizer.control_id(stop)


def test_arguments_that_are_nested_too_deeply_to_be_written_are_refused_by_their_place() -> None:
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"a": deep}
    deep_call = {"type": "function", "function": {"name": "f", "arguments": deep}}
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "tool_calls": [deep_call]}]
    with pytest.raises(MessageError, match=r"tool_calls\[0\].*recursion"):
        build_training_sample(renderer_of("trl/qwen2_5"), messages)
