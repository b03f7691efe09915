"""Tinker: token ids and images of a `ModelInput`, and a sample of a `Datum`."""

from __future__ import annotations

from typing import Any

import numpy as np

from renderers import MediaItem, PlaceholderRange, TemplateRenderer
from renderers.errors import MediaError
from renderers.media.reference import load_source
from renderers.placement import PlacedItem
from rollouts.training.adapters.checks import AdapterError
from rollouts.training.adapters.tinker import DATUM, INPUT
from rollouts.training.samples import TrainingSample
from rollouts.trajectory.media_reference import processor_for


def tokens_from_tinker(model_input: Any, renderer: TemplateRenderer) -> tuple[np.ndarray, tuple[PlacedItem, ...]]:
    """The way back from `tinker_model_input`: ids int32 (n,) and the images with their ranges, processed by `renderer`.

    An image that a chunk names by its path or URL is read as far as the renderer's media policy allows.
    Raises `AdapterError` for chunks of another kind, for an image that cannot be read, one that the renderer
    makes another number of tokens of than `expected_tokens`, and one that it surrounds with text.
    """
    ids: list[int] = []
    media: list[PlacedItem] = []
    image_token = next((token for token, kind in renderer.mm_token_type_id_map.items() if kind == 1), -1)
    for index, chunk in enumerate(model_input.chunks):
        if chunk.type == "encoded_text":
            ids += chunk.tokens
            continue
        item = _item(chunk, f"chunks[{index}]", renderer)
        media.append((item, PlaceholderRange(len(ids), item.num_tokens)))
        ids += [image_token] * item.num_tokens
    return np.array(ids, dtype=np.int32), tuple(media)


def sample_from_tinker_datum(datum: Any, renderer: TemplateRenderer, *, name: str = "") -> TrainingSample:
    """The way back from `tinker_datum`, for a `Datum` with `mask` or with `weights`; it has no weight versions.

    Raises `AdapterError` for a `Datum` with neither, for targets that are not the next tokens of the input,
    and as `tokens_from_tinker` does.
    """
    head, media = tokens_from_tinker(datum.model_input, renderer)
    columns = {key: value.to_numpy() for key, value in datum.loss_fn_inputs.items()}
    if "mask" not in columns and "weights" in columns:
        columns |= {"mask": columns["weights"], "advantages": columns["weights"], "logprobs": np.zeros(len(head))}
    for key in ("target_tokens", "mask", "logprobs", "advantages"):
        if (found := columns.get(key, np.zeros(0)).shape) != (len(head),) or not len(head):
            reason = f"it is absent or of shape {found}; its input has {len(head)} tokens. Pass {key} for each of them"
            raise AdapterError(DATUM, f"datum {name}", key, f"{reason}, with mask or weights")
    targets, trained = columns["target_tokens"], columns["mask"] != 0
    is_text = np.ones(len(head), dtype=bool)
    for _, placeholder in media:
        is_text[placeholder.offset : placeholder.end] = False
    wrong = np.flatnonzero((targets[:-1] != head[1:]) & is_text[1:])
    if len(wrong):
        found = f"target {wrong[0]} is {targets[wrong[0]]}, and the next token of the input is {head[wrong[0] + 1]}"
        rule = "A TrainingSample trains the tokens that follow; other targets have no place in it"
        raise AdapterError(DATUM, f"datum {name}", "target_tokens", f"{found}. {rule}")
    return TrainingSample(
        token_ids=np.append(head, targets[-1]).astype(np.int32),
        loss_mask=np.append(False, trained),
        logprobs=np.append(0, np.where(trained, columns["logprobs"], 0)).astype(np.float32),
        advantages=np.append(0, np.where(trained, columns["advantages"], 0)).astype(np.float32),
        media=media,
        name=name,
    )


def _item(chunk: Any, place: str, renderer: TemplateRenderer) -> MediaItem:
    field = {"image": "data", "image_asset_pointer": "location"}.get(chunk.type)
    if field is None:
        raise AdapterError(INPUT, place, "chunks", f"a chunk of type {chunk.type}. Pass text and images")
    processor = processor_for(renderer.processors, "image")
    try:
        source = load_source({"type": "image", "image": getattr(chunk, field)}, processor.policy, processor.store)
        item = processor.process(source)
    except MediaError as error:
        reason = f"{error.reason}. Pass an image that this renderer can read"
        raise AdapterError(INPUT, place, field, reason) from error
    if chunk.expected_tokens not in (None, item.num_tokens):
        found = f"it expects {chunk.expected_tokens} tokens, and this renderer makes {item.num_tokens} of the image"
        cure = "Use the renderer of the model that the chunk was made for"
        raise AdapterError(INPUT, place, "expected_tokens", f"{found}. {cure}")
    if item.expansion is not None and not all(piece.embed for piece in item.expansion):
        raise AdapterError(INPUT, place, "chunks", "this renderer puts text around the image's tokens. Leave it out")
    return item
