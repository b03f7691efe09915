"""What stands in the place of a media marker: ids and ranges, against the expanded text tokenised as a whole."""

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import corpus
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loaded import directory_of
from tokenizers import Tokenizer

from renderers import (
    MediaPolicy,
    MediaSource,
    MediaStore,
    RenderedTokens,
    RendererOptions,
    TemplateRenderer,
    load_renderer,
)
from renderers.errors import LoadError, RendererError
from renderers.media.item import ExpansionPiece, MediaItem
from renderers.messages import Modality
from renderers.vision.media_loader import MediaLoader

MARKERS: dict[Modality, str] = {"image": "<|image_pad|>", "video": "<|video_pad|>"}
START, END = "<|vision_start|>", "<|vision_end|>"

Pieces = tuple[ExpansionPiece, ...]


def frames(pad: str, times: Sequence[str], tokens: int) -> Pieces:
    """A video of Qwen3-VL."""
    pieces: list[ExpansionPiece] = []
    for time in times:
        pieces += [ExpansionPiece(f"<{time} seconds>"), ExpansionPiece(START)]
        pieces += [ExpansionPiece(pad, tokens, True), ExpansionPiece(END)]
    return tuple(pieces)


DENSE: Pieces = (ExpansionPiece("", 3, True),)
FRAMED: Pieces = (ExpansionPiece(START), ExpansionPiece("<|fim_pad|>", 5, True), ExpansionPiece(END))
SPACED: Pieces = (ExpansionPiece("\n\n"), *FRAMED, ExpansionPiece("\n\n"))
TILED: Pieces = (
    ExpansionPiece("<|fim_prefix|>"),
    ExpansionPiece("row one"),
    ExpansionPiece("<|fim_pad|>", 2, True),
    ExpansionPiece("\n"),
    ExpansionPiece("row two"),
    ExpansionPiece("<|fim_pad|>", 1, True),
    ExpansionPiece("<|fim_suffix|>"),
)
IMAGES = {b"dense": DENSE, b"framed": FRAMED, b"spaced": SPACED, b"tiled": TILED}
VIDEOS = {b"stamped": frames(MARKERS["video"], ["0.2", "1.2", "10.0"], 4), b"one": frames("<|fim_pad|>", ["0.0"], 1)}


@dataclass
class Scripted:
    """A processor that knows for each source what it expands to."""

    modality: Modality
    expansions: Mapping[bytes, Pieces]
    embed_token: str = "<|fim_pad|>"
    fingerprint: str = "scripted"
    policy: MediaPolicy = field(default_factory=MediaPolicy)
    store: MediaStore = field(default_factory=MediaStore)

    @property
    def marker(self) -> str:
        return MARKERS[self.modality]

    def mm_hash(self, source: MediaSource) -> str:
        return f"{source.digest}-{self.fingerprint}"

    def process(self, source: MediaSource) -> MediaItem:
        pieces = self.expansions[bytes(source.data)]
        count = sum(piece.times for piece in pieces if piece.embed)
        expansion = None if pieces == DENSE else pieces
        return MediaItem(self.modality, self.mm_hash(source), source, {}, count, None, expansion=expansion)


TEMPLATE = "trl/qwen3_vl"
BARE = "bare"
"""The same, but nothing stands between text and a marker."""


def source_of(template: str) -> str:
    if template != BARE:
        return corpus.templates()[template]
    source = corpus.templates()[TEMPLATE]
    for marker in MARKERS.values():
        source = source.replace(f"{START}{marker}{END}", marker)
    return source


def tokenizer_dir(template: str) -> Path:
    return directory_of(TEMPLATE if template == BARE else template)


@functools.cache
def renderer_of(template: str, **variables: Any) -> TemplateRenderer:
    config = RendererOptions(chat_template_kwargs=variables)
    plain = load_renderer(tokenizer_dir(template), chat_template=source_of(template), config=config)
    processors = {"image": Scripted("image", IMAGES), "video": Scripted("video", VIDEOS)}
    media = MediaLoader(processors, model="scripted")
    return TemplateRenderer(plain.template, plain.tokenizer, plain.format, media=media)


@functools.cache
def whole_tokenizer(template: str) -> Tokenizer:
    return Tokenizer.from_file(str(tokenizer_dir(template) / "tokenizer.json"))


def spelled(pieces: Pieces, marker: str) -> str:
    return "".join((piece.text or marker) * piece.times for piece in pieces)


def expected_text(renderer: TemplateRenderer, messages: list[dict[str, Any]], **options: Any) -> str:
    """The template's own text with every marker replaced, by a plain search from left to right."""
    shown = [
        {
            **message,
            "content": message["content"]
            if isinstance(message["content"], str)
            else [p if p["type"] == "text" else {"type": p["type"], p["type"]: "."} for p in message["content"]],
        }
        for message in messages
    ]
    text = renderer.template.print(shown, **options).text
    queues: dict[str, list[str]] = {marker: [] for marker in MARKERS.values()}
    for message in messages:
        for part in message["content"] if isinstance(message["content"], list) else []:
            if part["type"] != "text":
                known = IMAGES if part["type"] == "image" else VIDEOS
                marker = MARKERS[part["type"]]
                queues[marker].append(spelled(known[bytes(part[part["type"]].data)], marker))
    pattern = "|".join(re.escape(marker) for marker in queues)
    return re.sub(pattern, lambda found: queues[found.group()].pop(0), text)


def image(name: str) -> dict[str, Any]:
    return {"type": "image", "image": MediaSource.of(name.encode())}


def video(name: str) -> dict[str, Any]:
    return {"type": "video", "video": MediaSource.of(name.encode())}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def check_ranges(rendered: RenderedTokens, renderer: TemplateRenderer) -> None:
    """Every range holds its item's features and nothing else's, in the order of the prompt."""
    assert rendered.multi_modal_data is not None
    kinds = np.zeros(len(rendered), dtype=int)
    end = 0
    for item, where in rendered.multi_modal_data.items_with_ranges():
        assert where.offset >= end
        end = where.end
        assert where.num_embeds == item.num_tokens
        pieces = item.expansion or DENSE
        embed = next(piece.text for piece in pieces if piece.embed) or MARKERS[item.modality]
        held = {renderer.tokenizer.control_token(rendered.token_ids[i]) for run in where.runs for i in range(*run)}
        assert held == {embed}
        for start, stop in where.runs:
            kinds[start:stop] = {"image": 1, "video": 2}[item.modality]
        mask = where.is_embed
        if mask is not None:
            at = where.offset + np.flatnonzero(mask)
            assert at.tolist() == [i for run in where.runs for i in range(*run)]
    assert rendered.mm_token_type_ids == kinds.tolist()


words = st.sampled_from(["", " ", "\n", "\n\n", "a", "Look:\n\n", "row", "<|image_pad|>", " x", "é\n"])
parts = st.one_of(
    words.map(text), st.sampled_from(sorted(IMAGES)).map(lambda n: image(n.decode())), st.just(video("stamped"))
)
conversations = st.lists(st.lists(parts, min_size=1, max_size=5), min_size=1, max_size=3)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(conversations, st.booleans(), st.sampled_from([TEMPLATE, BARE]))
def test_ids_are_those_of_the_expanded_text_tokenised_as_a_whole(turns: list[Any], prompt: bool, template: str) -> None:
    renderer = renderer_of(template)
    messages: list[dict[str, Any]] = []
    for content in turns:
        messages += [{"role": "user", "content": content}, {"role": "assistant", "content": "Yes."}]
    if prompt:
        messages.pop()
    rendered = renderer.render(messages, add_generation_prompt=prompt)
    if not any(part == text("<|image_pad|>") for content in turns for part in content):
        whole = expected_text(renderer, messages, add_generation_prompt=prompt)
        assert rendered.token_ids == whole_tokenizer(TEMPLATE).encode(whole, add_special_tokens=False).ids
    check_ranges(rendered, renderer)
    covered = [i for span in rendered.spans for i in range(span.start, span.end)]
    assert covered == list(range(len(rendered)))


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(conversations, st.sampled_from([TEMPLATE, BARE]))
def test_logical_ids_have_one_marker_an_item_and_map_both_ways(turns: list[Any], template: str) -> None:
    renderer = renderer_of(template)
    # Text at the edge of these may merge with what is beside it.
    edgy = [image("spaced"), *([video("stamped")] if template == BARE else [])]
    messages = [{"role": "user", "content": [part for part in content if part not in edgy]} for content in turns]
    rendered = renderer.render(messages, add_generation_prompt=True)
    shown = [
        {"role": "user", "content": [p if p["type"] == "text" else image("dense") for p in m["content"]]}
        for m in messages
    ]
    plain = renderer.render(shown, add_generation_prompt=True)
    logical = rendered.logical_ids
    # The same conversation with videos swapped for images differs in the kind of marker only.
    swap = {renderer.tokenizer.control_id(MARKERS["video"]): renderer.tokenizer.control_id(MARKERS["image"])}
    assert [swap.get(i, i) for i in logical] == plain.logical_ids
    positions = rendered.expanded_positions
    assert len(positions) == len(logical) + 1
    assert positions[-1] == len(rendered)
    markers = set(renderer.mm_token_type_id_map)
    starts = {where.offset for _, where in rendered.multi_modal_data.items_with_ranges()}  # type: ignore[union-attr]
    for token, start, end in zip(logical, positions[:-1].tolist(), positions[1:].tolist(), strict=True):
        if start in starts:
            assert token in markers
        else:
            assert rendered.token_ids[start:end] == [token]


@pytest.mark.slow
def test_text_at_the_edge_of_an_expansion_merges_with_its_neighbours_and_stays_outside_the_range() -> None:
    renderer = renderer_of(BARE)
    rendered = renderer.render([{"role": "user", "content": [image("spaced"), text("\n\nWhat is it?")]}])
    assert rendered.multi_modal_data is not None
    ((_, where),) = rendered.multi_modal_data.items_with_ranges()
    shown = whole_tokenizer(BARE).decode(rendered.token_ids[where.offset : where.end], skip_special_tokens=False)
    assert shown == spelled(FRAMED, "")
    behind = whole_tokenizer(BARE).decode([rendered.token_ids[where.end]])
    assert behind == "\n\n\n\n"
    with pytest.raises(RendererError, match="send the features"):
        _ = rendered.logical_ids


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(conversations, st.lists(parts, min_size=1, max_size=4), st.sampled_from([TEMPLATE, BARE]))
def test_a_bridge_with_any_expansion_is_the_full_render(turns: list[Any], new: list[Any], template: str) -> None:
    renderer = renderer_of(template)
    history: list[dict[str, Any]] = []
    for content in turns:
        history += [{"role": "user", "content": content}, {"role": "assistant", "content": "Yes."}]
    history.pop()
    prompt = renderer.render(history, add_generation_prompt=True)
    completion = [*renderer.tokenizer.encode_run("Yes.").ids, renderer.get_stop_token_ids()[0]]
    message = {"role": "user", "content": new}
    bridged = renderer.try_bridge(
        prompt.token_ids, completion, [message], previous_multi_modal_data=prompt.multi_modal_data
    )
    assert isinstance(bridged, RenderedTokens), bridged
    full = renderer.render([*history, {"role": "assistant", "content": "Yes."}, message], add_generation_prompt=True)
    assert bridged.token_ids == full.token_ids
    assert bridged.mm_token_type_ids == full.mm_token_type_ids
    assert bridged.multi_modal_data is not None
    assert full.multi_modal_data is not None
    assert bridged.multi_modal_data.mm_placeholders == full.multi_modal_data.mm_placeholders
    assert bridged.multi_modal_data.mm_hashes == full.multi_modal_data.mm_hashes


@pytest.mark.parametrize("give_history", [True, False])
@pytest.mark.parametrize("template", ["trl/qwen3_vl", "trl/qwen2_5_vl"])
def test_numbers_of_images_and_videos_go_on_behind_a_bridge(template: str, give_history: bool) -> None:
    renderer = renderer_of(template, add_vision_id=True)
    history = [
        {"role": "user", "content": [image("dense"), image("dense"), text("Two.")]},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": [video("stamped"), image("framed"), text("More.")]},
    ]
    prompt = renderer.render(history, add_generation_prompt=True)
    completion = [*renderer.tokenizer.encode_run("Yes.").ids, renderer.get_stop_token_ids()[0]]
    message = {"role": "user", "content": [image("dense"), video("one"), text("Which is image 4?")]}
    bridged = renderer.try_bridge(
        prompt.token_ids,
        completion,
        [message],
        previous_messages=history if give_history else None,
        previous_multi_modal_data=prompt.multi_modal_data,
    )
    full = renderer.render([*history, {"role": "assistant", "content": "Yes."}, message], add_generation_prompt=True)
    assert "Picture 4: " in renderer.tokenizer.body.decode(full.token_ids, skip_special_tokens=False)
    assert isinstance(bridged, RenderedTokens), bridged
    assert bridged.token_ids == full.token_ids


def test_a_placeholder_that_the_tokenizer_lacks_is_named() -> None:
    plain = renderer_of(TEMPLATE)
    odd = {b"odd": (ExpansionPiece("<no-such-token>", 2, True),)}
    media = MediaLoader({"image": Scripted("image", odd)}, model="m")
    renderer = TemplateRenderer(plain.template, plain.tokenizer, plain.format, media=media)
    with pytest.raises(LoadError, match="no-such-token"):
        renderer.render([{"role": "user", "content": [image("odd")]}])
