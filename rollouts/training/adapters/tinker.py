"""Tinker: `ModelInput` and `Datum` of samples.

A Tinker service takes images as files, not as pixels, and processes them itself. An image is a chunk of its
own, which takes the place of its placeholder tokens; with `expected_tokens` the service refuses an image that
becomes another number of tokens.
"""

from collections.abc import Collection, Sequence
from typing import Any, Literal

import numpy as np

from renderers.placement import PlacedItem
from rollouts.training.adapters.arrays import token_arrays
from rollouts.training.adapters.checks import AdapterError, Violations, check_samples, trainer_module, without_parts
from rollouts.training.adapters.image_file import image_file
from rollouts.training.samples import TrainingSample
from rollouts.values import check_choice

#: The types, as errors name them.
DATUM, INPUT = "Tinker Datum", "Tinker ModelInput"

TinkerLoss = Literal["policy", "cross_entropy"]


def tinker_datum(sample: TrainingSample, *, loss: TinkerLoss = "policy", omit: Collection[str] = ()) -> Any:
    """A `tinker.Datum` of a sample with n tokens: its input is the first n - 1, `target_tokens` int64 the last n - 1.

    `policy` (Tinker's importance_sampling, ppo and cispo): `loss_fn_inputs` also has `logprobs`, `advantages`
    and `mask`, float32 (n - 1,), 0 where a token is not trained. The service takes no `mask`: remove it
    before `forward_backward`, as Tinker's cookbook does. `cross_entropy`: `weights` float32 (n - 1,) are the
    advantages, 1 for a supervised sample. Targets that are placeholder tokens are 0 (the service makes image
    tokens itself).

    A `Datum` has no field for weight versions and routed experts, and with `cross_entropy` none for
    log-probabilities: `omit` names the parts to leave out. Raises `AdapterError` for what cannot be
    expressed, as `tinker_model_input` does.
    """
    tinker = trainer_module("tinker")
    check_choice("loss", loss, TinkerLoss)
    lacking = ("weight_spans", "routed_experts", "top_logprobs", *(() if loss == "policy" else ("logprobs",)))
    # The service places images by chunk: a sampled placeholder token is text there.
    check_samples(DATUM, [sample], without_parts(lacking, omit), _has_target, media_by_id=False)
    rows = token_arrays([sample])
    columns = {name: column[0, 1:].numpy() for name, column in rows._asdict().items()}
    targets = columns["token_ids"]
    for _, placeholder in sample.media:
        targets[max(placeholder.offset - 1, 0) : placeholder.end - 1] = 0
    inputs = {"target_tokens": targets}
    if loss == "cross_entropy":
        inputs["weights"] = columns["advantages"]
    else:
        inputs |= {name: columns[name] for name in ("logprobs", "advantages")}
        inputs["mask"] = columns["loss_mask"].astype(np.float32)
    model_input = _model_input(tinker, sample.token_ids[:-1], sample.media, f"sample {sample.name}")
    return tinker.Datum(model_input=model_input, loss_fn_inputs=inputs)


def tinker_model_input(token_ids: Sequence[int] | np.ndarray, media: Sequence[PlacedItem] = ()) -> Any:
    """A `tinker.ModelInput` of token ids and the images in them, such as a prompt to sample from.

    `media` are items with their ranges, in order (`rendered.multi_modal_data.items_with_ranges()`). A PNG or
    JPEG is sent as it is if it is plain RGB or grey and not turned by EXIF data; all other sources become a
    PNG of the RGB pixels that the renderer saw. Raises `AdapterError` for videos, and for images whose range
    has text between feature tokens.
    """
    return _model_input(trainer_module("tinker"), np.asarray(token_ids), media, "the prompt")


def _has_target(sample: TrainingSample) -> Violations:
    if len(sample) < 2:
        yield "token_ids", f"it has {len(sample)} tokens, and a target needs two. Leave it out"
    elif sample.media and sample.media[-1][1].end == len(sample):
        yield "media", "its last token belongs to an image, which cannot be cut. Leave it out"


def _model_input(tinker: Any, token_ids: np.ndarray, media: Sequence[PlacedItem], row: str) -> Any:
    chunks: list[Any] = []
    position = 0
    for item, placeholder in media:
        name, problem = f"{item.modality} {item.mm_hash[:12]}", None
        if item.modality != "image":
            problem = "there are chunks of images only. Leave it out, or give the frames as images"
        elif placeholder.num_embeds != placeholder.length:
            problem = "it has text among its placeholder tokens, which the service would write by itself. Leave it out"
        if problem:
            raise AdapterError(INPUT, row, "media", f"{name}: {problem}")
        if placeholder.offset > position:
            chunks.append(tinker.EncodedTextChunk(tokens=token_ids[position : placeholder.offset].tolist()))
        data, file_format = image_file(item.source)
        chunks.append(tinker.types.ImageChunk(data=data, format=file_format, expected_tokens=placeholder.length))
        position = placeholder.end
    if position < len(token_ids):
        chunks.append(tinker.EncodedTextChunk(tokens=token_ids[position:].tolist()))
    return tinker.ModelInput(chunks=chunks)
