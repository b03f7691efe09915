"""Several supervised samples of one conversation: each turn is trained once, behind the prompt of that turn."""

from collections.abc import Sequence
from itertools import permutations
from typing import Any

import pytest
from corpus import CONVERSATIONS, answer, call, says, user
from hypothesis import given, settings
from hypothesis import strategies as st
from loaded import renderer_of
from spelling import ids_of
from training_conversations import QUESTION

from renderers import TemplateRenderer
from renderers.errors import MessageError, RendererError, TemplateError
from renderers.training_sample import RenderedTrainingSample, build_training_samples

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


def trained_ids(sample: RenderedTrainingSample) -> list[int]:
    return [token_id for token_id, trained in zip(sample.token_ids, sample.loss_mask, strict=True) if trained]


def sampled_ids(renderer: TemplateRenderer, messages: Sequence[dict[str, Any]], index: int, tools: Any) -> list[int]:
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
        assert sample.loss_ranges
        trained_in += sample.trained_messages
        trained_owners = {o for o, trained in zip(sample.message_indices, sample.loss_mask, strict=True) if trained}
        assert trained_owners == set(sample.trained_messages)
        for index in sample.trained_messages:
            prompt = renderer.render_ids(messages[:index], tools=tools, add_generation_prompt=True)
            owners = enumerate(zip(sample.message_indices, sample.loss_mask, strict=True))
            mine = [k for k, (owner, trained) in owners if trained and owner == index]
            assert sample.token_ids[: len(prompt)] == prompt
            assert mine == list(range(len(prompt), mine[-1] + 1))
            check_sampled_ids(renderer, sample.token_ids[: mine[-1] + 1], len(prompt), messages, index, tools, stops)
    assert sorted(trained_in) == [
        index for index in turns_of(messages) if sampled_ids(renderer, messages, index, tools)
    ]
    for one, other in permutations(samples, 2):
        end = one.loss_ranges[-1][1]
        assert one.token_ids[:end] != other.token_ids[:end], "one sample continues the other: they could be one"


def check_sampled_ids(
    renderer: TemplateRenderer,
    ids: list[int],
    start: int,
    messages: Sequence[dict[str, Any]],
    index: int,
    tools: Any,
    stops: list[int],
) -> None:
    """Behind the prompt stand the printed words; before them what a token of theirs swallowed of it, behind a stop."""
    words = sampled_ids(renderer, messages, index, tools)
    if ids[-1] in stops and words[-1] not in stops:
        ids = ids[:-1]
    assert ids[len(ids) - len(words) :] == words
    if len(ids) - len(words) > start:
        printed = renderer.tokenizer.decode(renderer.render_ids(messages[: index + 1], tools=tools))
        assert printed.startswith(renderer.tokenizer.decode(ids))


def samples_or_unreachable(
    renderer: TemplateRenderer, messages: list[dict[str, Any]], tools: Any
) -> list[RenderedTrainingSample] | MessageError:
    try:
        return build_training_samples(renderer, messages, tools=tools)
    except MessageError as error:
        return error
    except RendererError as error:
        if "no token of this conversation carries loss" not in str(error):
            raise
        return []


@pytest.mark.parametrize("template", TEMPLATES)
def test_every_turn_is_trained_once_after_the_prompt_of_that_turn(template: str) -> None:
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
        if isinstance(samples, MessageError):
            check_unreachable(renderer, messages, tools, samples.message_index)
        else:
            check_samples(renderer, messages, tools, samples)
            checked += 1
    assert checked >= (1 if template == "own/qwq-32b" else 10)


def check_unreachable(renderer: TemplateRenderer, messages: Sequence[dict[str, Any]], tools: Any, index: int) -> None:
    """A turn is refused only where the printed conversation does not continue its prompt, or lacks its reasoning."""
    try:
        prompt = renderer.render_ids(messages[:index], tools=tools, add_generation_prompt=True)
    except TemplateError:
        return
    printed = renderer.tokenizer.decode(renderer.render_ids(messages[: index + 1], tools=tools))
    text = f"{messages[index].get('reasoning_content', '')} {messages[index]['content']}".replace("think>", " ")
    has_words = all(word.strip("</") in printed for word in text.split())
    assert not (has_words and printed.startswith(renderer.tokenizer.decode(prompt)))


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


@pytest.mark.slow
@pytest.mark.parametrize("template", ["trl/qwen3", "trl/qwen3_5_think", "trl/glm4moe"])
@settings(max_examples=40, deadline=None)
@given(messages=conversations())
def test_every_turn_of_a_generated_conversation_is_trained_once(template: str, messages: list[dict[str, Any]]) -> None:
    renderer = renderer_of(template)
    samples = samples_or_unreachable(renderer, messages, None)
    if isinstance(samples, MessageError):
        check_unreachable(renderer, messages, None, samples.message_index)
    else:
        check_samples(renderer, messages, None, samples)


@pytest.mark.slow
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
    with pytest.raises(MessageError, match=reason) as caught:
        build_training_samples(renderer_of(template), messages)
    assert caught.value.message_index == index
    assert "message_loss_mask" in str(caught.value)
    assert isinstance(caught.value, RendererError)
