# ruff: noqa: RUF001  (DeepSeek spells its tokens with a fullwidth bar)
"""What went wrong in systems that keep a model's tokens over many turns, shown on real templates not to happen here.

Only what no other file of this folder states: refusals, stop tokens, harmony and GLM are in `test_bridge` and
`test_corpus_bridge`, injection in `test_template_parity`, threads and pools in `test_pool`.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import corpus
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loaded import directory_of, renderer_of
from PIL import Image
from spelling import ids_of
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from renderers import (
    BridgeRefusal,
    MultiModalData,
    RenderedTokens,
    RendererOptions,
    TemplateRenderer,
    is_multimodal,
    load_renderer,
)
from renderers.media.item import MediaItem
from renderers.rendered import PlaceholderRange
from rollouts.engines.protocol import Completion, FinishReason
from rollouts.trajectory.tree import Trajectory

QUESTION = [corpus.user("Q")]
IMAGES = [Image.new("RGB", (32 + 32 * index, 64), (80 * index, 0, 0)) for index in range(3)]
FLAG_TOOL = {
    "type": "function",
    "function": {
        "name": "set",
        "description": "Set a flag",
        "parameters": {"type": "object", "properties": {"flag": {"type": "boolean"}}, "required": ["flag"]},
    },
}


def image(index: int = 0) -> dict[str, Any]:
    return {"type": "image", "image": IMAGES[index]}


def bridged(outcome: RenderedTokens | BridgeRefusal) -> RenderedTokens:
    assert isinstance(outcome, RenderedTokens), outcome
    return outcome


def ask(renderer: TemplateRenderer, messages: list[dict[str, Any]] = QUESTION, **options: Any) -> list[int]:
    return renderer.render_ids(messages, add_generation_prompt=True, **options)


def placed(rendered: RenderedTokens) -> list[tuple[MediaItem, PlaceholderRange]]:
    assert rendered.multi_modal_data is not None
    return rendered.multi_modal_data.items_with_ranges()


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


@pytest.mark.slow
def test_text_sampled_in_other_tokens_than_the_tokenizer_would_choose_keeps_its_ids() -> None:
    """`jsonp` + `enderer` and `json` + `p` + `enderer` are one text."""
    renderer = renderer_of("trl/qwen2_5")
    prompt = ask(renderer)
    spellings = [ids_of(renderer, *pieces, "<|im_end|>") for pieces in (("jsonp", "enderer"), ("json", "p", "enderer"))]
    assert spellings[0] != spellings[1]
    assert len({renderer.parse_response(ids, prompt_ids=prompt).content for ids in spellings}) == 1
    for sampled in spellings:
        following = bridged(renderer.try_bridge(prompt, sampled, QUESTION)).token_ids
        assert following[: len(prompt) + len(sampled)] == prompt + sampled


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


#: template -> how its prompts begin, the token that ends a turn, what is appended behind it for the user message "R"
APPENDED = {
    "trl/qwen2_5": (
        "<|im_start|>system\nYou are",
        "<|im_end|>",
        "\n<|im_start|>user\nR<|im_end|>\n<|im_start|>assistant\n",
    ),
    "trl/llama3_1": (
        "<s><|start_header_id|>system",
        "<|eot_id|>",
        "<|start_header_id|>user<|end_header_id|>\n\nR<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "trl/gptoss": (
        "<|start|>system<|message|>You are ChatGPT",
        "<|return|>",
        "<|start|>user<|message|>R<|end|><|start|>assistant",
    ),
    "own/glm-4.5v": ("[gMASK]<sop>", "<|user|>", "\nR<|assistant|>\n"),
    "own/minimax-m3": ("]~!b[]~b]system", "[e~[", "\n]~b]user\nR[e~[\n]~b]ai\n"),
    "own/deepseek-v3.1": ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>R<｜Assistant｜></think>"),
}


@pytest.mark.parametrize("template", APPENDED)
def test_new_messages_are_never_encoded_as_a_conversation_of_their_own(template: str) -> None:
    """Alone they come with a second beginning (BOS, the date, a default system message) and without the close."""
    renderer, (beginning, stop, appended) = renderer_of(template), APPENDED[template]
    prompt, new = ask(renderer), [corpus.user("R")]
    words = "<|channel|>final<|message|>A" if template == "trl/gptoss" else "A"
    sampled = [*renderer.tokenizer.encode_scaffold(words), *ids_of(renderer, stop)]
    following = bridged(renderer.try_bridge(prompt, sampled, new)).token_ids
    assert following[: len(prompt) + len(sampled)] == prompt + sampled
    assert following[len(prompt) + len(sampled) :] == renderer.tokenizer.encode_scaffold(appended)
    assert renderer.tokenizer.decode(ask(renderer, new)).startswith(beginning)


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


def completion_of(token_ids: list[int]) -> Completion:
    return Completion(0, np.array(token_ids, np.int32), np.zeros(len(token_ids), np.float32), FinishReason.STOP)


def test_other_reasoning_or_another_printed_order_of_arguments_starts_another_branch() -> None:
    """What decides is what the model was shown, never whether two messages compare equal."""
    renderer = renderer_of("trl/qwen3")
    told = [corpus.says("", "why", [CALL]), corpus.says("", "how", [CALL]), corpus.says("", "why", [REORDERED])]
    prompts = [ask(renderer, [*QUESTION, turn, corpus.answer("22")], tools=corpus.TOOLS) for turn in told]
    trajectory = Trajectory("episode")
    for prompt in (*prompts, prompts[0]):
        trajectory.add_turn(RenderedTokens(prompt), completion_of([1]), {"role": "assistant", "content": ""})
    parents = [trajectory.nodes[turn.node].parent for turn in trajectory.turns]
    assert len(set(parents)) == 3
    assert parents[3] == parents[0]


# Images.


IMAGE_SETTINGS = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "size": {"shortest_edge": 1024, "longest_edge": 65536},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "rescale_factor": 1 / 255,
    "do_rescale": True,
    "do_normalize": True,
}


def finetune(template: str, made_in: Path) -> Path:
    """A model directory under a name that nobody knows: a real tokenizer and template, and an image processor."""
    directory = made_in / "somebodys-finetune"
    directory.mkdir()
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (directory / file).symlink_to(directory_of(template) / file)
    (directory / "preprocessor_config.json").write_text(json.dumps(IMAGE_SETTINGS), encoding="utf-8")
    (directory / "chat_template.jinja").write_text(corpus.templates()[template], encoding="utf-8")
    return directory


@functools.cache
def plain_tokenizer() -> PreTrainedTokenizerFast:
    """Any tokenizer of transformers: only its templating is used."""
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))


def shown_images(renderer: TemplateRenderer, rendered: RenderedTokens) -> tuple[list[str], list[int]]:
    """The hash of each image, and the ids with one placeholder each; checks that every range covers placeholders."""
    (pad,) = renderer.mm_token_type_id_map
    logical = list(rendered.token_ids)
    for item, where in reversed(placed(rendered)):
        assert logical[where.offset : where.end] == [pad] * item.num_tokens
        logical[where.offset : where.end] = [pad]
    hashes = [item.mm_hash for item, _ in placed(rendered)]
    assert logical.count(pad) == len(hashes)
    return hashes, logical


BESIDE_IMAGES = [
    [image(0), *corpus.text("  \n\n")],
    [*corpus.text(" \n"), image(1)],
    [*corpus.text(" a "), image(0), *corpus.text(" "), image(2), *corpus.text(" b\n")],
    [image(1), image(1)],
]


@pytest.fixture(scope="module", params=["trl/qwen3_vl", "trl/qwen3_5_think"])
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TemplateRenderer:
    directory = finetune(request.param, tmp_path_factory.mktemp("models"))
    return load_renderer(directory, config=RendererOptions(thinking_retention="all"))


@pytest.mark.slow
@pytest.mark.parametrize("parts", BESIDE_IMAGES)
def test_a_finetune_of_an_unknown_name_renders_images_and_trims_text_beside_them_as_its_template_does(
    seeing: TemplateRenderer, parts: list[dict[str, Any]]
) -> None:
    """Qwen3.5 trims the content as a whole: blanks at the end of the last text go, even behind an image."""
    assert is_multimodal(seeing)
    messages = [corpus.user(parts)]
    hashes, logical = shown_images(seeing, seeing.render(messages, add_generation_prompt=True))
    assert len(hashes) == sum(part["type"] == "image" for part in parts)
    printed = plain_tokenizer().apply_chat_template(
        messages, chat_template=seeing.template.source, add_generation_prompt=True, tokenize=False
    )
    assert logical == seeing.tokenizer.encode_scaffold(printed)


@pytest.mark.parametrize("parts", BESIDE_IMAGES)
def test_a_bridge_trims_beside_images_as_a_rendering_does(
    seeing: TemplateRenderer, parts: list[dict[str, Any]]
) -> None:
    prompt = ask(seeing)
    thought = ids_of(seeing, "hm", "</think>") if prompt[-2:-1] == ids_of(seeing, "<think>") else []
    sampled = [*thought, *ids_of(seeing, "A", "<|im_end|>")]
    new = [corpus.user(parts)]
    following = bridged(seeing.try_bridge(prompt, sampled, new, previous_multi_modal_data=MultiModalData()))
    whole = seeing.render([*QUESTION, corpus.says("A"), *new], add_generation_prompt=True)
    appended = len(following) - len(prompt) - len(sampled)
    assert following.token_ids[-appended:] == whole.token_ids[-appended:]
    hashes, _ = shown_images(seeing, following)
    assert hashes == shown_images(seeing, whole)[0]


@pytest.mark.slow
def test_the_numbers_of_images_continue_after_a_bridge(tmp_path: Path) -> None:
    config = RendererOptions(chat_template_kwargs={"add_vision_id": True})
    numbering = load_renderer(finetune("trl/qwen3_vl", tmp_path), config=config)
    messages = [corpus.user([image(0), image(1)]), corpus.says("A"), corpus.user([image(2)])]
    prompt = numbering.render(messages[:1], add_generation_prompt=True)
    sampled = ids_of(numbering, "A", "<|im_end|>")
    arguments = (prompt.token_ids, sampled, messages[2:])
    media = prompt.multi_modal_data
    # Without a history, the media that come along say how many images there were.
    for history in (None, messages[:1], messages[:2]):
        following = bridged(
            numbering.try_bridge(*arguments, previous_messages=history, previous_multi_modal_data=media)
        )
        assert following.token_ids == numbering.render_ids(messages, add_generation_prompt=True)
        text = numbering.tokenizer.decode(shown_images(numbering, following)[1])
        assert [text.count(f"Picture {number}: ") for number in range(1, 5)] == [1, 1, 1, 0]
