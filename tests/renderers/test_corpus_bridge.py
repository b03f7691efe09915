"""The oracle of bridging, for every real template: a bridge equals the full render, or it is refused with a reason."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import corpus
import pytest
from loaded import directory_of, renderer_of

from renderers import BridgeRefusal, RenderedTokens, RendererOptions, TemplateRenderer, load_renderer
from renderers.errors import LoadError, RendererError

# Its tokenizer lacks a token that the template prints: refused at load, which is what should happen.
TEMPLATES = [name for name in corpus.templates() if name != "own/deepseek-vl2-small"]
# Harmony ends an answer with <|return|> when it is sampled and with <|end|> once it is history.
REPLACES_THE_STOP = ("trl/gptoss", "trl/gptoss_training")


class Step(NamedTuple):
    """One turn of a conversation: what was prompted, what a model would have sampled, what came next."""

    name: str
    prompt: list[int]
    completion: list[int]
    history: list[dict[str, Any]]
    new: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    full: RenderedTokens


def steps(renderer: TemplateRenderer) -> Iterator[Step]:
    """Every turn of the corpus whose canonical completion the template itself prints behind its own prompt."""
    for name, (messages, tools) in corpus.CONVERSATIONS.items():
        for turn, end in turns(messages):
            try:
                prompt = renderer.render(messages[:turn], tools=tools, add_generation_prompt=True).token_ids
                last = renderer.render(messages[: turn + 1], tools=tools)
                full = renderer.render(messages[:end], tools=tools, add_generation_prompt=True)
            except RendererError:
                continue  # the template refuses this conversation
            completion = canonical(renderer, prompt, last, full, turn)
            if completion is not None:
                yield Step(name, prompt, completion, messages[: turn + 1], messages[turn + 1 : end], tools, full)


def turns(messages: list[dict[str, Any]]) -> Iterator[tuple[int, int]]:
    """(index of an assistant, index of the next one or the end) where something stands between."""
    assistants = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    for turn, end in itertools.pairwise([*assistants, len(messages)]):
        if end > turn + 1:
            yield turn, end


def canonical(
    renderer: TemplateRenderer, prompt: list[int], last: RenderedTokens, full: RenderedTokens, turn: int
) -> list[int] | None:
    """The tokens that the template prints for the turn, with a stop token; None if they do not follow the prompt."""
    mine = [i for i, (m, s) in enumerate(zip(last.message_indices, last.sampled_mask, strict=True)) if s and m == turn]
    if last.token_ids[: len(prompt)] != prompt or mine != list(range(len(prompt), len(prompt) + len(mine))) or not mine:
        return None
    completion = last.token_ids[len(prompt) : mine[-1] + 1]
    stops = renderer.get_stop_token_ids()
    if completion[-1] in stops:
        return completion
    sampled = [*prompt, *completion]
    follows = full.token_ids[len(sampled) : len(sampled) + 1] if full.token_ids[: len(sampled)] == sampled else []
    return [*completion, *(follows if follows and follows[0] in stops else stops[:1])]


@pytest.mark.slow
@pytest.mark.parametrize("template", corpus.drawn(TEMPLATES))
def test_the_bridge_of_a_canonical_completion_is_the_full_render_or_a_refusal(template: str) -> None:
    renderer = renderer_of(template)
    for step in steps(renderer):
        sampled = [*step.prompt, *step.completion]
        for previous in (None, step.history, step.history[:-1]):
            outcome = renderer.try_bridge(
                step.prompt, step.completion, step.new, tools=step.tools, previous_messages=previous
            )
            if isinstance(outcome, RenderedTokens):
                assert outcome.token_ids[: len(sampled)] == sampled
                if template not in REPLACES_THE_STOP:
                    assert outcome.token_ids == step.full.token_ids, step.name
            elif not step.prompt:
                assert outcome is BridgeRefusal.NO_PROMPT
            elif step.full.token_ids[: len(sampled)] == sampled:
                # The template does go on from here: only what only the history can tell may stand in the way.
                assert outcome is BridgeRefusal.NEEDS_HISTORY, step.name
                assert previous != step.history, step.name


@pytest.mark.slow
@pytest.mark.parametrize("template", ["trl/qwen2_5", "trl/qwen3_training", "trl/llama3_1", "own/glm-4.5v", "trl/phi3"])
def test_a_history_that_the_template_keeps_is_bridged(template: str) -> None:
    """Against a bridge that refuses everything, which would pass the test above."""
    renderer = renderer_of(template)
    found = [renderer.try_bridge(s.prompt, s.completion, s.new, tools=s.tools) for s in steps(renderer)]
    assert sum(isinstance(outcome, RenderedTokens) for outcome in found) > 20


@pytest.mark.parametrize("template", ["trl/qwen3", "own/glm-5.2", "trl/nemotron_3_nano", "own/minimax"])
def test_with_retention_all_reasoning_is_kept_and_only_the_new_text_is_added(template: str) -> None:
    config = RendererOptions(thinking_retention="all", chat_template=corpus.templates()[template])
    keeping = load_renderer(directory_of(template), config=config)
    messages = [corpus.user("a"), corpus.says("b", "because"), corpus.user("c")]
    prompt = keeping.render(messages[:1], add_generation_prompt=True).token_ids
    full = keeping.render(messages[:2]).token_ids
    completion = full[len(prompt) :]
    stops = [i for i, token_id in enumerate(completion) if token_id in keeping.get_stop_token_ids()]
    completion = completion[: stops[-1] + 1] if stops else completion
    refused = renderer_of(template).try_bridge(prompt, completion, messages[2:])
    assert refused is BridgeRefusal.DROPS_REASONING
    kept = keeping.try_bridge(prompt, completion, messages[2:])
    assert isinstance(kept, RenderedTokens)
    assert kept.token_ids[: len(prompt) + len(completion)] == prompt + completion
    assert "because" in keeping.tokenizer.decode(kept.token_ids)


def glm(template: str = "own/glm-4.5v") -> tuple[TemplateRenderer, list[int], list[int]]:
    renderer = renderer_of(template)
    prompt = renderer.render([corpus.user("a")], add_generation_prompt=True).token_ids
    return renderer, prompt, [*renderer.tokenizer.encode_run("\nb").ids]


@pytest.mark.slow
@pytest.mark.parametrize("stop", ["<|user|>", "<|observation|>", "<|endoftext|>"])
@pytest.mark.parametrize("new", [corpus.user("c"), corpus.answer("22")])
def test_glm_stops_at_any_role_token_and_the_bridge_prints_the_role_that_follows(
    stop: str, new: dict[str, Any]
) -> None:
    """The model may sample <|user|> where a tool message follows."""
    renderer, prompt, words = glm()
    stop_id = renderer.tokenizer.require_control_id(stop, "a test")
    outcome = renderer.try_bridge(prompt, [*words, stop_id], [new])
    assert isinstance(outcome, RenderedTokens)
    behind = outcome.token_ids[len(prompt) + len(words) + 1 :]
    role = "<|user|>" if new["role"] == "user" else "<|observation|>"
    role_id = renderer.tokenizer.require_control_id(role, "a test")
    assert (behind[0] == role_id) == (stop != role)
    assert behind.count(role_id) == (stop != role)


def test_a_turn_of_glm_cut_off_by_a_length_limit_is_closed_by_the_next_role() -> None:
    renderer, prompt, words = glm()
    outcome = renderer.try_bridge(prompt, words, [corpus.user("c")])
    assert isinstance(outcome, RenderedTokens)
    behind = outcome.token_ids[len(prompt) + len(words) :]
    assert behind[0] == renderer.tokenizer.control_id("<|user|>")
    assert not any(outcome.sampled_mask[len(prompt) + len(words) :])


def test_equal_messages_of_glm_are_continued_in_two_ways_after_a_stop_token_and_after_a_cut_off_turn() -> None:
    """Both extensions are cached, by the last token of the turn too."""
    renderer, prompt, words = glm()
    user_id = renderer.tokenizer.require_control_id("<|user|>", "a test")
    for completion in ([*words, user_id], words, [*words, user_id], words):
        outcome = renderer.try_bridge(prompt, completion, [corpus.user("c")])
        assert isinstance(outcome, RenderedTokens)
        assert outcome.token_ids[len(prompt) :].count(user_id) == 1


def test_the_stop_token_of_glm_belongs_to_the_assistant_that_samples_it() -> None:
    renderer, _, _ = glm()
    rendered = renderer.render([corpus.user("a"), corpus.says("b"), corpus.user("c")])
    user_id = renderer.tokenizer.control_id("<|user|>")
    second = [index for index, token_id in enumerate(rendered.token_ids) if token_id == user_id][1]
    assert rendered.message_indices[second] == 1
    assert rendered.sampled_mask[second]
    assert rendered.is_content[second]
    assert rendered.message_indices[second + 1] == 2


def test_harmony_keeps_a_sampled_return_token_and_prints_end_in_history() -> None:
    renderer = renderer_of("trl/gptoss")
    ids = renderer.tokenizer.require_control_id
    conversation = [corpus.user("a"), corpus.says("b"), corpus.user("c")]
    prompt = renderer.render(conversation[:1], add_generation_prompt=True).token_ids
    completion = renderer.tokenizer.encode_scaffold("<|channel|>final<|message|>b<|return|>")
    outcome = renderer.try_bridge(prompt, completion, conversation[2:])
    full = renderer.render(conversation, add_generation_prompt=True).token_ids
    assert isinstance(outcome, RenderedTokens)
    assert outcome.token_ids[len(prompt) + len(completion) - 1] == ids("<|return|>", "a test")
    swapped = [
        ids("<|end|>", "a test") if index == len(prompt) + len(completion) - 1 else token_id
        for index, token_id in enumerate(outcome.token_ids)
    ]
    assert swapped == full


def test_user_and_tool_messages_are_appended_in_the_context_that_each_needs() -> None:
    renderer = renderer_of("trl/gemma4")
    prompt = renderer.render([corpus.user("a")], tools=corpus.TOOLS, add_generation_prompt=True).token_ids
    call = renderer.tokenizer.encode_scaffold("<|tool_call>call:run{}<tool_call|><|tool_response>")
    answered = renderer.try_bridge(prompt, call, [corpus.answer("22")], tools=corpus.TOOLS)
    words = renderer.tokenizer.encode_scaffold("b<turn|>")
    asked = renderer.try_bridge(prompt, words, [corpus.user("c")], tools=corpus.TOOLS)
    assert isinstance(answered, RenderedTokens)
    assert isinstance(asked, RenderedTokens)
    # A tool's answer stands inside the model's turn, which goes on behind it; a user's opens a new one.
    assert "<|turn>" not in renderer.tokenizer.decode(answered.token_ids[len(prompt) + len(call) :])
    assert renderer.tokenizer.decode(asked.token_ids[len(prompt) + len(words) :]).count("<|turn>") == 2


def test_a_tokenizer_without_a_token_that_the_template_prints_is_named_at_load() -> None:
    with pytest.raises(LoadError, match=r"<\|EOT\|>"):
        load_renderer(
            corpus.model_dir("deepseek-vl2-small"), chat_template=corpus.templates()["own/deepseek-vl2-small"]
        )


CALLED = [corpus.user("a"), corpus.says("", None, [corpus.call("run", {})]), corpus.answer("4321")]


def test_a_tool_result_that_gemma_prints_inside_an_assistant_turn_belongs_to_the_tool_message() -> None:
    renderer = renderer_of("trl/gemma4")
    rendered = renderer.render(CALLED)
    (span,) = [span for span in rendered.spans if span.message_index == 2]
    assert span.content
    assert not span.sampled
    assert renderer.tokenizer.decode(rendered.token_ids[span.start : span.end]) == "4321"


def test_the_name_of_a_tool_in_a_header_is_not_content() -> None:
    renderer = renderer_of("trl/gptoss")
    rendered = renderer.render(CALLED)
    columns = zip(rendered.token_ids, rendered.message_indices, rendered.is_content, strict=True)
    body = [token_id for token_id, message, is_body in columns if is_body and message == 2]
    assert "run" not in renderer.tokenizer.decode(body)
    assert "4321" in renderer.tokenizer.decode(body)
