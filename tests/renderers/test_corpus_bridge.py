"""The oracle of bridging, for every real template: a bridge equals the full render, or it is refused with a reason."""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import corpus
import pytest
from loaded import renderer_of

from renderers import BridgeRefusal, RenderedTokens, TemplateRenderer
from renderers.errors import RendererError

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
