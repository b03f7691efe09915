"""Supervised samples: what carries loss, and what the model would have seen before it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import corpus
import pytest
from corpus import CONVERSATIONS, answer, call, says, system, text, user
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from spelling import ids_of

from renderers import TemplateRenderer, load_renderer
from renderers.errors import MessageError, RendererError, TemplateError, UnknownRoleError, UnreachableTurnError
from renderers.training_sample import (
    MessageLossMaskError,
    NoTrainedTokensError,
    RenderedTrainingSample,
    build_training_sample,
    build_training_samples,
)
from rollouts.testing import CHAT_TEMPLATE

# Drops reasoning; keeps all; opens reasoning in the prompt; closes a turn with the next role's token; and others.
TEMPLATES = [
    "trl/qwen3",
    "trl/qwen3_training",
    "trl/qwen3_instruct_2507",
    "trl/qwen3_5_think",
    "trl/qwen3_5_nothink",
    "trl/qwen2_5",
    "trl/glm4moe",
    "own/glm-5",
    "own/deepseek-v3.1",
    "own/minimax-m3",
    "own/qwq-32b",
]
QUESTION = user("a")


@functools.cache
def renderer_of(template: str) -> TemplateRenderer:
    tokenizer = corpus.tokenizer_of(template)
    assert tokenizer is not None
    return load_renderer(corpus.model_dir(tokenizer), chat_template=corpus.templates()[template])


def trained_text(renderer: TemplateRenderer, sample: RenderedTrainingSample) -> list[str]:
    return [renderer.tokenizer.decode(sample.token_ids[start:end]) for start, end in sample.loss_ranges]


def trained_ids(sample: RenderedTrainingSample) -> list[int]:
    return [token_id for token_id, trained in zip(sample.token_ids, sample.loss_mask, strict=True) if trained]


# One sample of the whole conversation.


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_tokens_equal_those_of_the_rendering_and_sampled_tokens_carry_loss(name: str) -> None:
    renderer = renderer_of("trl/qwen3")
    messages, tools = CONVERSATIONS[name]
    try:
        rendered = renderer.render(messages, tools=tools)
    except TemplateError:
        pytest.skip("the template refuses this conversation")
    if not any(rendered.sampled_mask):
        with pytest.raises(NoTrainedTokensError):
            build_training_sample(renderer, messages, tools=tools)
        return
    sample = build_training_sample(renderer, messages, tools=tools)
    assert sample.token_ids == rendered.token_ids
    assert sample.loss_mask == rendered.sampled_mask
    assert sample.message_indices == rendered.message_indices
    assert sample.num_trained_tokens == sum(rendered.sampled_mask)
    assert sample.trained_messages == tuple(i for i, m in enumerate(messages) if m["role"] == "assistant")
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
    with pytest.raises(MessageLossMaskError, match=f"{len(mask)} entries for 2 messages"):
        build_training_sample(renderer_of("trl/qwen2_5"), [QUESTION, says("b")], message_loss_mask=mask)


def test_a_mask_of_weights_is_refused_with_its_index() -> None:
    with pytest.raises(MessageLossMaskError, match=r"message_loss_mask\[1\] is 0.5"):
        build_training_sample(renderer_of("trl/qwen2_5"), [QUESTION, says("b")], message_loss_mask=[1, 0.5])  # type: ignore[list-item]


def test_an_unknown_body_role_is_refused() -> None:
    with pytest.raises(UnknownRoleError, match="'tools'"):
        build_training_sample(renderer_of("trl/qwen2_5"), [QUESTION, says("b")], content_sft_roles={"tools"})


@pytest.mark.parametrize("build", [build_training_sample, build_training_samples])
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
def test_an_error_for_a_conversation_without_loss_names_the_reason(
    build: Any, messages: Any, options: Any, reason: str
) -> None:
    with pytest.raises(NoTrainedTokensError, match=reason):
        build(renderer_of("trl/qwen2_5"), messages, **options)


# The last stop.


def test_a_stop_that_the_template_prints_is_not_doubled() -> None:
    renderer = renderer_of("trl/qwen2_5")
    messages = [QUESTION, says("b")]
    assert build_training_sample(renderer, messages, ensure_final_stop=True) == build_training_sample(
        renderer, messages
    )


@pytest.mark.parametrize("build", [build_training_sample, lambda *a, **k: build_training_samples(*a, **k)[-1]])
def test_a_stop_that_the_template_leaves_out_is_added_only_with_the_option(build: Any) -> None:
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


def test_no_stop_is_added_behind_a_last_turn_without_loss() -> None:
    renderer = renderer_of("trl/glm4moe")
    messages = [QUESTION, says("b"), user("c"), says("d")]
    sample = build_training_sample(renderer, messages, ensure_final_stop=True, message_loss_mask=[1, 1, 1, 0])
    assert sample.token_ids == renderer.render_ids(messages)


@pytest.mark.parametrize(
    ("turn", "stop"), [(says("b"), "<|user|>"), (says("", None, [call("run", {})]), "<|observation|>")]
)
def test_the_added_stop_is_the_one_that_the_template_prints_with_the_next_message(
    turn: dict[str, Any], stop: str
) -> None:
    renderer = renderer_of("trl/glm4moe")
    sample = build_training_sample(renderer, [QUESTION, turn], tools=corpus.TOOLS, ensure_final_stop=True)
    assert sample.token_ids[-1] == renderer.tokenizer.control_id(stop)


# Several samples.


def sampled_words(renderer: TemplateRenderer, messages: Sequence[dict[str, Any]], index: int, tools: Any) -> list[int]:
    """What the template marks as sampled of a turn at the end of a conversation."""
    last = renderer.render(messages[: index + 1], tools=tools)
    columns = zip(last.token_ids, last.message_indices, last.sampled_mask, strict=True)
    return [token_id for token_id, owner, sampled in columns if sampled and owner == index]


def turns_of(messages: Sequence[dict[str, Any]]) -> list[int]:
    return [index for index, message in enumerate(messages) if message["role"] == "assistant"]


def check_samples(
    renderer: TemplateRenderer,
    messages: Sequence[dict[str, Any]],
    tools: Any,
    samples: Sequence[RenderedTrainingSample],
) -> None:
    """Each turn is trained in one sample, behind its own prompt, as it is printed last; no sample could be spared."""
    stops = renderer.get_stop_token_ids()
    trained_in: list[int] = []
    for sample in samples:
        assert sample.num_trained_tokens == sum(sample.loss_mask) > 0
        trained_in += sample.trained_messages
        trained_owners = {o for o, trained in zip(sample.message_indices, sample.loss_mask, strict=True) if trained}
        assert trained_owners == set(sample.trained_messages)
        for index in sample.trained_messages:
            prompt = renderer.render_ids(messages[:index], tools=tools, add_generation_prompt=True)
            owners = enumerate(zip(sample.message_indices, sample.loss_mask, strict=True))
            mine = [k for k, (owner, trained) in owners if trained and owner == index]
            assert sample.token_ids[: len(prompt)] == prompt
            assert mine == list(range(len(prompt), mine[-1] + 1))
            check_words(renderer, sample.token_ids[: mine[-1] + 1], len(prompt), messages, index, tools, stops)
    assert sorted(trained_in) == [
        index for index in turns_of(messages) if sampled_words(renderer, messages, index, tools)
    ]
    for one, other in permutations(samples, 2):
        end = one.loss_ranges[-1][1]
        assert one.token_ids[:end] != other.token_ids[:end], "one sample continues the other: they could be one"


def check_words(
    renderer: TemplateRenderer,
    ids: list[int],
    start: int,
    messages: Sequence[dict[str, Any]],
    index: int,
    tools: Any,
    stops: list[int],
) -> None:
    """Behind the prompt stand the printed words; before them what a token of theirs swallowed of it, behind a stop."""
    words = sampled_words(renderer, messages, index, tools)
    if ids[-1] in stops and words[-1] not in stops:
        ids = ids[:-1]
    assert ids[len(ids) - len(words) :] == words
    if len(ids) - len(words) > start:
        printed = renderer.tokenizer.decode(renderer.render_ids(messages[: index + 1], tools=tools))
        assert printed.startswith(renderer.tokenizer.decode(ids))


def samples_or_unreachable(
    renderer: TemplateRenderer, messages: list[dict[str, Any]], tools: Any
) -> list[RenderedTrainingSample] | UnreachableTurnError:
    try:
        return build_training_samples(renderer, messages, tools=tools)
    except NoTrainedTokensError:
        return []
    except UnreachableTurnError as error:
        return error


@pytest.mark.parametrize("template", TEMPLATES)
def test_every_turn_is_trained_once_behind_the_prompt_that_the_model_would_have_seen(template: str) -> None:
    renderer = renderer_of(template)
    checked = 0
    for messages, tools in CONVERSATIONS.values():
        try:
            renderer.render(messages, tools=tools)
        except TemplateError:
            continue
        if not turns_of(messages):
            continue
        samples = samples_or_unreachable(renderer, messages, tools)
        if isinstance(samples, UnreachableTurnError):
            check_unreachable(renderer, messages, tools, samples.message_index)
        else:
            check_samples(renderer, messages, tools, samples)
            checked += 1
    assert checked >= (1 if template == "own/qwq-32b" else 10)


def check_unreachable(renderer: TemplateRenderer, messages: Sequence[dict[str, Any]], tools: Any, index: int) -> None:
    """A turn is refused only where the printed conversation does not continue its prompt."""
    try:
        prompt = renderer.render_ids(messages[:index], tools=tools, add_generation_prompt=True)
    except TemplateError:
        return
    printed = renderer.render_ids(messages[: index + 1], tools=tools)
    assert not renderer.tokenizer.decode(printed).startswith(renderer.tokenizer.decode(prompt))


words = st.sampled_from(["", "b", "\n", " b", "two\nlines\n", "<|im_end|>", "Zürich 👩‍👩‍👧"])
assistant_turns = st.builds(
    lambda content, reasoning, called: says(content, reasoning, [call("run", {"code": "1"})] if called else None),
    words,
    st.none() | words,
    st.booleans(),
)


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Turns with and without reasoning and calls; each call is answered; nobody speaks out of order."""
    messages = [QUESTION]
    for turn in draw(st.lists(assistant_turns, min_size=1, max_size=4)):
        messages.append(turn)
        if turn.get("tool_calls"):
            messages.append(answer(draw(words)))
        else:
            messages.append(user(f"q {draw(words)}"))
    return messages if draw(st.booleans()) else messages[:-1]


@pytest.mark.parametrize("template", ["trl/qwen3", "trl/qwen3_5_think", "trl/glm4moe"])
@settings(max_examples=40, deadline=None)
@given(messages=conversations())
def test_any_conversation_is_split_exactly(template: str, messages: list[dict[str, Any]]) -> None:
    renderer = renderer_of(template)
    samples = samples_or_unreachable(renderer, messages, None)
    if isinstance(samples, UnreachableTurnError):
        check_unreachable(renderer, messages, None, samples.message_index)
    else:
        check_samples(renderer, messages, None, samples)


def test_a_template_that_drops_reasoning_gives_the_two_samples_of_the_documentation() -> None:
    renderer = renderer_of("trl/qwen3")
    samples = build_training_samples(renderer, [QUESTION, says("b", "r"), user("c"), says("d", "s")])
    asked = ["<|im_start|>", "user\na", "<|im_end|>", "\n", "<|im_start|>", "assistant\n"]
    asked_again = ["<|im_start|>", "user\nc", "<|im_end|>", "\n", "<|im_start|>", "assistant\n"]
    first = ["<think>", "\nr\n", "</think>", "\n\nb", "<|im_end|>"]
    second = ["<think>", "\ns\n", "</think>", "\n\nd", "<|im_end|>"]
    assert samples[0].token_ids == ids_of(renderer, *asked, *first)
    assert samples[1].token_ids == ids_of(renderer, *asked, "b", "<|im_end|>", "\n", *asked_again, *second, "\n")
    assert [trained_ids(sample) for sample in samples] == [ids_of(renderer, *first), ids_of(renderer, *second)]
    assert [sample.trained_messages for sample in samples] == [(1,), (3,)]


def test_turns_of_one_tool_cycle_share_a_sample_and_a_new_question_starts_another() -> None:
    renderer = renderer_of("trl/qwen3")
    messages, tools = CONVERSATIONS["two tool cycles"]
    samples = build_training_samples(renderer, messages, tools=tools)
    assert [sample.trained_messages for sample in samples] == [(1, 3, 5)]
    assert samples[0].token_ids == renderer.render_ids(messages[:5], tools=tools, add_generation_prompt=True) + (
        sampled_words(renderer, messages, 5, tools)
    )


@pytest.mark.parametrize("template", ["trl/qwen2_5", "trl/qwen3_training", "own/deepseek-v3.1", "own/minimax-m3"])
def test_a_template_that_keeps_history_gives_the_one_sample_of_the_whole_conversation(template: str) -> None:
    renderer = renderer_of(template)
    messages, _ = CONVERSATIONS["long"]
    assert build_training_samples(renderer, messages) == [build_training_sample(renderer, messages)]


def test_a_turn_without_loss_has_no_sample_of_its_own() -> None:
    renderer = renderer_of("trl/qwen3")
    messages = [QUESTION, says("b", "r"), user("c"), says("d", "s")]
    (sample,) = build_training_samples(renderer, messages, message_loss_mask=[1, 0, 1, 1])
    assert sample.trained_messages == (3,)
    assert trained_text(renderer, sample) == ["<think>\ns\n</think>\n\nd<|im_end|>"]


def test_a_line_break_that_merges_with_the_prompts_own_is_trained_as_the_token_that_is_sampled() -> None:
    """The prompt ends in `<think>\\n`; without reasoning the template prints `<think>\\n\\n</think>`, one token."""
    renderer = renderer_of("trl/qwen3_5_think")
    (sample,) = build_training_samples(renderer, [QUESTION, says("b")])
    prompt = renderer.render_ids([QUESTION], add_generation_prompt=True)
    assert sample.token_ids == prompt + ids_of(renderer, "\n", "</think>", "\n\nb", "<|im_end|>")
    assert trained_ids(sample) == sample.token_ids[len(prompt) :]
    assert ids_of(renderer, "\n\n")[0] in renderer.render_ids([QUESTION, says("b")])


@pytest.mark.parametrize(
    ("template", "messages", "index", "reason"),
    [
        ("own/qwq-32b", [QUESTION, says("b")], 1, "never ends reasoning"),
        ("trl/qwen3_5_nothink", [QUESTION, says("b", "because")], 1, "because"),
        ("trl/qwen2_5", [says("b"), user("c"), says("d")], 0, "refuses to print the prompt"),
    ],
)
def test_a_turn_that_cannot_be_sampled_is_named_with_the_reason(
    template: str, messages: list[dict[str, Any]], index: int, reason: str
) -> None:
    with pytest.raises(UnreachableTurnError, match=reason) as caught:
        build_training_samples(renderer_of(template), messages)
    assert caught.value.message_index == index
    assert "message_loss_mask" in str(caught.value)
    assert isinstance(caught.value, RendererError)


def test_the_cure_in_the_error_works() -> None:
    samples = build_training_samples(
        renderer_of("trl/qwen2_5"), [says("b"), user("c"), says("d")], message_loss_mask=[0, 1, 1]
    )
    assert [sample.trained_messages for sample in samples] == [(2,)]


def test_a_body_is_trained_once_although_several_samples_hold_it() -> None:
    renderer = renderer_of("trl/qwen3")
    messages = [QUESTION, says("b", "r"), user("c"), says("d", "s"), user("e")]
    samples = build_training_samples(renderer, messages, content_sft_roles={"user"})
    assert sorted(index for sample in samples for index in sample.trained_messages) == [0, 1, 2, 3, 4]
    assert [text for sample in samples for text in trained_text(renderer, sample)] == [
        "a",
        "<think>\nr\n</think>\n\nb<|im_end|>",
        "c",
        "<think>\ns\n</think>\n\nd<|im_end|>",
        "e",
    ]


def test_each_sample_has_the_images_of_its_messages(tiny_model_dir: Path) -> None:
    forgetful = load_renderer(
        tiny_model_dir,
        chat_template=CHAT_TEMPLATE.replace(
            "message.role + '\\n' + show", "message.role + '\\n' + ('latest ' if loop.last else '') + show"
        ),
    )
    images = [{"type": "image", "image": Image.new("RGB", (32, 32), (shade, 2, 3))} for shade in (1, 200)]
    messages = [user([images[0]]), says("b"), user([images[1], images[0]]), says("d")]
    first, second = build_training_samples(forgetful, messages)
    pad = forgetful.tokenizer.require_control_id("<|image_pad|>", "a test")
    for sample, prompt in ((first, messages[:1]), (second, messages[:3])):
        rendered = forgetful.render(prompt, add_generation_prompt=True)
        assert sample.multi_modal_data == rendered.multi_modal_data
        assert sample.mm_token_type_ids == [int(token_id == pad) for token_id in sample.token_ids]
    assert (sum(first.mm_token_type_ids or []), sum(second.mm_token_type_ids or [])) == (4, 12)
    assert trained_text(forgetful, first) + trained_text(forgetful, second) == ["b<|im_end|>", "d<|im_end|>"]


def test_a_change_of_history_with_equal_length_is_found(tiny_model_dir: Path) -> None:
    renderer = load_renderer(
        tiny_model_dir,
        chat_template=CHAT_TEMPLATE.replace(
            "message.role + '\\n' + show", "message.role + '\\n' + ('new ' if loop.last else 'old ') + show"
        ),
    )
    first, second = build_training_samples(renderer, [QUESTION, says("b"), user("c"), says("d")])
    asked = ["<|im_start|>", "assistant\n", "b", "<|im_end|>"]
    assert first.token_ids == ids_of(renderer, "<|im_start|>", "user\nnew a", "<|im_end|>", "\n", *asked)
    assert second.token_ids[: len(first)] == ids_of(renderer, "<|im_start|>", "user\nold a", "<|im_end|>", "\n", *asked)


@pytest.mark.parametrize("build", [build_training_sample, build_training_samples])
def test_a_malformed_conversation_is_refused_with_its_position(build: Any) -> None:
    with pytest.raises(MessageError, match="message 1"):
        build(renderer_of("trl/qwen2_5"), [QUESTION, "b"], message_loss_mask=[True])


def test_a_trained_turn_with_an_image_is_refused(renderer: TemplateRenderer) -> None:
    image = {"type": "image", "image": Image.new("RGB", (32, 32))}
    with pytest.raises(UnreachableTurnError, match="image"):
        build_training_samples(renderer, [QUESTION, says([image])])


def test_the_check_of_samples_finds_planted_faults() -> None:
    renderer = renderer_of("trl/qwen3")
    messages = [QUESTION, says("b", "r"), user("c"), says("d", "s")]
    first, second = build_training_samples(renderer, messages)
    check_samples(renderer, messages, None, [first, second])
    whole = build_training_sample(renderer, messages)
    start, end = first.loss_ranges[0]
    faults: list[list[RenderedTrainingSample]] = [
        [whole],  # trains a turn behind which the template had dropped its reasoning
        [first],
        [first, second, second],
        [first, first, second],
        [replace(first, loss_ranges=((start + 1, end),)), second],
        [replace(first, loss_ranges=((start, end - 1),)), second],
        [replace(first, loss_ranges=((start - 1, end),)), second],
    ]
    for faulty in faults:
        with pytest.raises(AssertionError):
            check_samples(renderer, messages, None, faulty)
