"""What went wrong in systems that keep a model's tokens over many turns, shown on real templates not to happen here.

Only what no other file of this folder states: refusals, stop tokens, harmony and GLM are in `test_bridge` and
`test_corpus_bridge`, injection in `test_template_parity`, threads and pools in `test_pool`.
"""

from typing import Any

import corpus
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loaded import renderer_of
from spelling import ids_of
from test_bridge import bridged

from renderers import (
    TemplateRenderer,
)

QUESTION = [corpus.user("Q")]
FLAG_TOOL = {
    "type": "function",
    "function": {
        "name": "set",
        "description": "Set a flag",
        "parameters": {"type": "object", "properties": {"flag": {"type": "boolean"}}, "required": ["flag"]},
    },
}


def ask(renderer: TemplateRenderer, messages: list[dict[str, Any]] = QUESTION, **options: Any) -> list[int]:
    return renderer.render_ids(messages, add_generation_prompt=True, **options)


# Sampled tokens are never printed anew.


@pytest.mark.slow
def test_a_boolean_that_was_sampled_as_json_is_not_printed_as_python_in_the_next_prompt() -> None:
    """The model writes `false`, the client reads a bool, the template prints `False`."""
    renderer = renderer_of("trl/qwen3_5_think")
    prompt = ask(renderer, tools=[FLAG_TOOL])
    arguments = "<function=set>\n<parameter=flag>\nfalse\n</parameter>\n</function>"
    sampled = ids_of(
        renderer, "why\n", "</think>", "\n\n", "<tool_call>", f"\n{arguments}\n", "</tool_call>", "<|im_end|>"
    )
    message = renderer.parse_response(sampled, tools=[FLAG_TOOL], prompt_ids=prompt).to_message()
    assert message["tool_calls"][0]["function"]["arguments"] == {"flag": False}
    answers = [corpus.answer("done", message["tool_calls"][0]["id"])]

    anew = renderer.tokenizer.decode(ask(renderer, [*QUESTION, dict(message), *answers], tools=[FLAG_TOOL]))
    assert "\nFalse\n" in anew, "the template no longer has the fault that this test is about"
    following = bridged(renderer.try_bridge(prompt, sampled, answers, tools=[FLAG_TOOL]))
    assert following.token_ids[: len(prompt) + len(sampled)] == prompt + sampled
    # But for that one word both say the same.
    assert renderer.tokenizer.decode(following.token_ids) == anew.replace("\nFalse\n", "\nfalse\n")


@pytest.mark.parametrize("template", ["trl/qwen2_5", "own/glm-4.5v", "own/deepseek-v3.1"])
@settings(max_examples=40, deadline=None)
@given(pieces=st.lists(st.text(st.characters(codec="utf-8", exclude_characters="<"), min_size=1, max_size=6)))
def test_the_extension_does_not_depend_on_the_tokenisation_of_the_turn_before_it(
    template: str, pieces: list[str]
) -> None:
    renderer = renderer_of(template)
    prompt, stop = ask(renderer), renderer.get_stop_token_ids()[0]
    whole = [*renderer.tokenizer.encode_run("".join(pieces)).ids, stop]
    in_pieces = [*(token_id for piece in pieces for token_id in renderer.tokenizer.encode_run(piece).ids), stop]
    following = [bridged(renderer.try_bridge(prompt, sampled, QUESTION)).token_ids for sampled in (whole, in_pieces)]
    for sampled, ids in zip((whole, in_pieces), following, strict=True):
        assert ids[: len(prompt) + len(sampled)] == prompt + sampled
    assert following[0][len(prompt) + len(whole) :] == following[1][len(prompt) + len(in_pieces) :]


def test_the_line_break_that_ends_an_open_think_is_not_merged_with_the_one_that_is_sampled() -> None:
    """The prompt ends in `<think>\\n`; printed with what was sampled, its line break becomes half of one token."""
    loaded = renderer_of("trl/qwen3_5_think")
    renderer = TemplateRenderer(loaded.template, loaded.tokenizer, loaded.format, thinking_retention="all")
    prompt = ask(renderer)
    assert prompt[-2:] == ids_of(renderer, "<think>", "\n")
    sampled = ids_of(renderer, "\n", "</think>", "\n\nA", "<|im_end|>")
    printed = renderer.render_ids([*QUESTION, corpus.says("A")])
    assert renderer.tokenizer.decode(printed[: len(prompt) + 2]).startswith(renderer.tokenizer.decode(prompt))
    assert printed[: len(prompt)] != prompt, "this tokenizer no longer merges the two line breaks"
    assert renderer.parse_response(sampled, prompt_ids=prompt).content == "A"
    for new in (corpus.user("R"), corpus.answer("22")):
        following = bridged(renderer.try_bridge(prompt, sampled, [new])).token_ids
        assert following[: len(prompt) + len(sampled)] == prompt + sampled


# Histories that are told again.

CALL = corpus.call("run", {"code": "x", "env": {"a": "1", "b": "2"}})
REORDERED = corpus.call("run", {"env": {"b": "2", "a": "1"}, "code": "x"})
RETOLD = [
    corpus.says("", None, [CALL]),
    corpus.says(None, None, [CALL]),
    {"role": "assistant", "tool_calls": [CALL]},
    corpus.says(" \n", None, [CALL]),
    corpus.says([], None, [CALL]),
    corpus.says("", "", [CALL]),
    corpus.says("", None, [REORDERED]),
]


@pytest.mark.parametrize("template", ["trl/qwen3", "own/glm-4.5v", "own/minimax-m3", "trl/gemma4"])
def test_a_history_resent_with_other_white_space_or_argument_order_is_continued_as_it_was_sampled(
    template: str,
) -> None:
    """A turn is found again by its tokens; `""` against None, or a stripped blank, cannot hide it."""
    renderer = renderer_of(template)
    prompt = ask(renderer, tools=corpus.TOOLS)
    printed = renderer.render([*QUESTION, RETOLD[0], corpus.answer("22")], tools=corpus.TOOLS)
    (turn,) = [span for span in printed.spans if span.sampled]
    sampled = printed.token_ids[turn.start : turn.end]
    outcomes = [
        renderer.try_bridge(
            prompt, sampled, [corpus.answer("22")], tools=corpus.TOOLS, previous_messages=[*QUESTION, told]
        )
        for told in RETOLD
    ]
    following = [bridged(outcome).token_ids for outcome in outcomes]
    assert following[0][: len(prompt) + len(sampled)] == prompt + sampled
    assert all(ids == following[0] for ids in following)
