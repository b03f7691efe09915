"""Tinker: `ModelInput` and `Datum` of samples, and samples of a `Datum`.

A Tinker service takes images as files, not as pixels, and processes them itself. An image is a chunk of its own, which
takes the place of its placeholder tokens; with `expected_tokens` the service refuses an image that becomes another
number of tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from renderers import MediaItem, PlaceholderRange, TemplateRenderer
from renderers.errors import MediaError
from renderers.media.reference import load_source
from renderers.placement import PlacedItem
from rollouts.training.adapters.arguments import (
    AdapterError,
    checked_samples,
    image_file,
    refuse_parts,
    trained_values,
    trainer_module,
)
from rollouts.training.samples import TrainingSample
from rollouts.trajectory.media_reference import processor_for
from rollouts.values import check_choice

TinkerLoss = Literal["policy", "cross_entropy"]

_DATUM, _INPUT = "Tinker Datum", "Tinker ModelInput"


def tinker_datum(
    sample: TrainingSample,
    *,
    loss: TinkerLoss = "policy",
    omit: Collection[str] = (),
) -> Any:
    """A `tinker.Datum` of a sample with n tokens: its input is the first n - 1, `target_tokens` int64 the last n - 1.

    `policy` (Tinker's importance_sampling, ppo and cispo): `loss_fn_inputs` also has `logprobs`, `advantages` and
    `mask`, float32 (n - 1,), 0 where a token is not trained. The service takes no `mask`: remove it before
    `forward_backward`, as Tinker's cookbook does. `cross_entropy`: `weights` float32 (n - 1,) are the advantages, 1 for
    a supervised sample. Targets that are placeholder tokens are 0 (the service makes image tokens itself).

    A `Datum` has no field for weight versions and routed experts, and with `cross_entropy` none for log-probabilities:
    `omit` names the parts to leave out. Raises `AdapterError` for what cannot be expressed, as
    `tinker_model_input` does.
    """
    tinker = trainer_module("tinker")
    check_choice("loss", loss, TinkerLoss)
    (sample,) = checked_samples([sample])
    row = f"sample {sample.name}"
    lacking = ("weight_spans", "routed_experts", "top_logprobs", *(() if loss == "policy" else ("logprobs",)))
    refuse_parts(_DATUM, sample, lacking, omit)
    count = len(sample) - 1
    if count < 1:
        raise AdapterError(
            _DATUM, row, "token_ids", f"it has {len(sample)} tokens, and a target needs two. Leave it out"
        )
    if sample.media and sample.media[-1][1].end > count:
        raise AdapterError(
            _DATUM, row, "media", "its last token belongs to an image, which cannot be cut. Leave it out"
        )
    targets = sample.token_ids.astype(np.int64)
    for _, placeholder in sample.media:
        targets[placeholder.offset : placeholder.end] = 0
    advantages = trained_values(sample, "advantages")[1:]
    columns: dict[str, np.ndarray] = {"target_tokens": targets[1:]}
    if loss == "cross_entropy":
        columns["weights"] = advantages
    else:
        mask = sample.loss_mask[1:].astype(np.float32)
        columns |= {"logprobs": trained_values(sample, "logprobs")[1:], "advantages": advantages, "mask": mask}
    return tinker.Datum(
        model_input=_model_input(tinker, sample.token_ids[:count], sample.media, row), loss_fn_inputs=columns
    )


def tinker_model_input(token_ids: Sequence[int] | np.ndarray, media: Sequence[PlacedItem] = ()) -> Any:
    """A `tinker.ModelInput` of token ids and the images in them, such as a prompt to sample from.

    `media` are items with their ranges, in order (`rendered.multi_modal_data.items_with_ranges()`). A PNG or JPEG is
    sent as it is if it is plain RGB or grey and not turned by EXIF data; all other sources become a PNG of the RGB
    pixels that the renderer saw. Raises `AdapterError` for videos, and for images whose range has
    text between feature tokens.
    """
    return _model_input(trainer_module("tinker"), np.asarray(token_ids), media, "the prompt")


def tokens_from_tinker(model_input: Any, renderer: TemplateRenderer) -> tuple[np.ndarray, tuple[PlacedItem, ...]]:
    """The way back from `tinker_model_input`: ids int32 (n,) and the images with their ranges, processed by `renderer`.

    An image that a chunk names by its path or URL is read as far as the renderer's media policy allows. Raises
    `AdapterError` for chunks of another kind, for an image that cannot be read, one that the renderer makes another
    number of tokens of than `expected_tokens`, and one that it surrounds with text.
    """
    ids: list[np.ndarray] = []
    media: list[PlacedItem] = []
    length = 0
    image_token = next((token for token, kind in renderer.mm_token_type_id_map.items() if kind == 1), -1)
    for index, chunk in enumerate(model_input.chunks):
        if chunk.type == "encoded_text":
            tokens = np.asarray(chunk.tokens, dtype=np.int32)
        else:
            item = _item(chunk, f"chunks[{index}]", renderer)
            tokens = np.full(item.num_tokens, image_token, dtype=np.int32)
            media.append((item, PlaceholderRange(length, item.num_tokens)))
        ids.append(tokens)
        length += len(tokens)
    return np.concatenate([np.empty(0, dtype=np.int32), *ids]), tuple(media)


def sample_from_tinker_datum(datum: Any, renderer: TemplateRenderer, *, name: str = "") -> TrainingSample:
    """The way back from `tinker_datum`, for a `Datum` with `mask` or with `weights`; it has no weight versions.

    Raises `AdapterError` for a `Datum` with neither, for targets that are not the next tokens of the input, and as
    `tokens_from_tinker` does.
    """
    row = f"datum {name}"
    head, media = tokens_from_tinker(datum.model_input, renderer)
    if not len(head):
        raise AdapterError(_DATUM, row, "model_input", "it has no tokens. Leave it out")
    columns = {key: value.to_numpy() for key, value in datum.loss_fn_inputs.items()}
    targets = _column(columns, "target_tokens", len(head), row)
    is_text = np.ones(len(head), dtype=bool)
    for _, placeholder in media:
        is_text[placeholder.offset : placeholder.end] = False
    wrong = np.flatnonzero((targets[:-1] != head[1:]) & is_text[1:])
    if len(wrong):
        raise AdapterError(
            _DATUM,
            row,
            "target_tokens",
            f"target {int(wrong[0])} is {int(targets[wrong[0]])}, and the next token of the input is "
            f"{int(head[wrong[0] + 1])}. "
            "A TrainingSample trains the tokens that follow; other targets have no place in it",
        )
    zeros = np.zeros(len(head), dtype=np.float32)
    if "mask" in columns:
        mask = _column(columns, "mask", len(head), row)
        logprobs, advantages = (_column(columns, key, len(head), row) for key in ("logprobs", "advantages"))
    elif "weights" in columns:
        mask = advantages = _column(columns, "weights", len(head), row)
        logprobs = zeros
    else:
        raise AdapterError(_DATUM, row, "mask", "neither mask nor weights says what is trained. Pass it with its mask")
    loss_mask = mask != 0
    return TrainingSample(
        token_ids=np.append(head, targets[-1]).astype(np.int32),
        loss_mask=np.append(False, loss_mask),
        logprobs=np.append(zeros[:1], np.where(loss_mask, logprobs, 0)).astype(np.float32),
        advantages=np.append(zeros[:1], np.where(loss_mask, advantages, 0)).astype(np.float32),
        media=media,
        name=name,
    )


def _model_input(tinker: Any, token_ids: np.ndarray, media: Sequence[PlacedItem], row: str) -> Any:
    chunks: list[Any] = []
    position = 0
    for item, placeholder in media:
        if placeholder.offset > position:
            chunks.append(tinker.EncodedTextChunk(tokens=token_ids[position : placeholder.offset].tolist()))
        chunks.append(_image_chunk(tinker, item, placeholder, row))
        position = placeholder.end
    if position < len(token_ids):
        chunks.append(tinker.EncodedTextChunk(tokens=token_ids[position:].tolist()))
    return tinker.ModelInput(chunks=chunks)


def _image_chunk(tinker: Any, item: MediaItem, placeholder: PlaceholderRange, row: str) -> Any:
    if item.modality != "image":
        raise AdapterError(
            _INPUT,
            row,
            "media",
            f"{item.modality} {item.mm_hash[:12]}: it has chunks of images only. "
            "Leave it out, or give the frames as images",
        )
    if placeholder.num_embeds != placeholder.length:
        raise AdapterError(
            _INPUT,
            row,
            "media",
            f"image {item.mm_hash[:12]} has text among its {placeholder.length} placeholder tokens, which the service "
            "would write by itself. "
            "Leave it out",
        )
    data, image_format = image_file(item.source)
    return tinker.types.ImageChunk(data=data, format=image_format, expected_tokens=placeholder.length)


def _item(chunk: Any, place: str, renderer: TemplateRenderer) -> MediaItem:
    field = {"image": "data", "image_asset_pointer": "location"}.get(chunk.type)
    if field is None:
        raise AdapterError(_INPUT, place, "chunks", f"a chunk of type {chunk.type}. Pass text and images")
    processor = processor_for(renderer.processors, "image")
    try:
        source = load_source({"type": "image", "image": getattr(chunk, field)}, processor.policy, processor.store)
        item = processor.process(source)
    except MediaError as error:
        raise AdapterError(
            _INPUT, place, field, f"{error.reason}. Pass an image that this renderer can read"
        ) from error
    if chunk.expected_tokens is not None and chunk.expected_tokens != item.num_tokens:
        raise AdapterError(
            _INPUT,
            place,
            "expected_tokens",
            f"it expects {chunk.expected_tokens} tokens, and this renderer makes {item.num_tokens} of the image. "
            "Use the renderer of the model that the chunk was made for",
        )
    if item.expansion is not None and any(not piece.embed for piece in item.expansion):
        raise AdapterError(_INPUT, place, "chunks", "this renderer puts text around the image's tokens. Leave it out")
    return item


def _column(columns: Mapping[str, np.ndarray], key: str, count: int, row: str) -> np.ndarray:
    values = columns.get(key)
    if values is None or values.shape != (count,):
        found = "absent" if values is None else f"of shape {values.shape}"
        raise AdapterError(_DATUM, row, key, f"it is {found}; its input has {count} tokens. Pass {key} of ({count},)")
    return values
