"""The model of a directory, run by transformers in float32, scoring tokens that a server has sampled."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from renderers import MediaItem, PlaceholderRange, RenderedTokens
from renderers.vision.batching import combine
from renderers.vision.normalise import normalised
from rollouts.cli.doctor.normalisation import Normalisation, renormalised
from rollouts.cli.doctor.target import Target, images_of
from rollouts.engines.protocol import Completion
from rollouts.engines.vllm.wire.tensors import tensor_type

_TOKEN_TYPES = {"image": 1, "video": 2}


class ScoredPrompt(NamedTuple):
    """A prompt, and the completion that the server sampled for it."""

    rendered: RenderedTokens
    completion: Completion


def load_reference(target: Target) -> Any:
    """The model in float32, on the CPU."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.utils import logging

    logging.disable_progress_bar()
    model_class = AutoModelForImageTextToText if "vision_config" in target.config else AutoModelForCausalLM
    return model_class.from_pretrained(
        str(target.directory), dtype=torch.float32, trust_remote_code=False, local_files_only=True
    ).eval()


def completion_logits(
    model: Any,
    prompt: ScoredPrompt,
    *,
    renormalise: tuple[Normalisation, Normalisation] | None = None,
    causal: bool = False,
) -> Any:
    """The model's logits for the sampled tokens: float32 torch tensor (scored, vocabulary).

    `renormalise`: the normalisation that the renderer's pixels have, and the one to give them instead.
    `causal`: the tokens of an image attend only to those before them, in models whose images attend to all of it.
    transformers finds images by token id, so the tokens of a completion are scored up to the first sampled placeholder.
    """
    import torch

    prompt_ids, sampled_ids = prompt.rendered.token_ids, prompt.completion.token_ids.tolist()
    media = images_of(prompt.rendered)
    placeholder_ids: set[int | None] = {prompt_ids[start] for _, each in media for start, _ in each.runs}
    for name in ("image_token_id", "image_token_index", "video_token_id", "video_token_index"):
        placeholder_ids.add(getattr(model.config, name, None))
    count = next((at for at, token in enumerate(sampled_ids) if token in placeholder_ids), len(sampled_ids))
    row = torch.tensor([[*prompt_ids, *sampled_ids[:count]]])
    inputs = {"input_ids": row, "attention_mask": torch.ones_like(row), **_media_inputs(media, renormalise)}
    types = torch.zeros_like(row)
    for item, placeholder in media:
        for start, stop in placeholder.runs:
            types[0, start:stop] = _TOKEN_TYPES[item.modality]
    accepted = inspect.signature(model.forward).parameters
    inputs |= {name: types for name in ("mm_token_type_ids", "token_type_ids") if name in accepted}
    if causal:
        inputs["token_type_ids"] = torch.zeros_like(row)
    with torch.inference_mode():
        return model(**inputs).logits[0, len(prompt_ids) - 1 : -1].float()


def logprob_differences(logits: Any, prompt: ScoredPrompt) -> np.ndarray:
    """float32 (scored,): |log p(server) - log p| of the sampled tokens, given the logits of `completion_logits`."""
    import torch

    count = len(logits)
    sampled = torch.tensor(prompt.completion.token_ids[:count].tolist(), dtype=torch.int64)
    with torch.inference_mode():
        scored = torch.log_softmax(logits, dim=-1).gather(-1, sampled[:, None])[:, 0].numpy()
    differences: np.ndarray = np.abs(scored - prompt.completion.logprobs[:count])
    return differences


def has_bidirectional_images(model: Any) -> bool:
    """Whether the tokens of an image attend to the whole of it (Gemma 3)."""
    return "token_type_ids" in inspect.signature(model.forward).parameters


def _media_inputs(
    media: Sequence[tuple[MediaItem, PlaceholderRange]], renormalise: tuple[Normalisation, Normalisation] | None
) -> dict[str, Any]:
    """The tensors that the model takes for the images of one prompt, as its processor would return them."""
    import torch

    items = [item for item, _ in media]
    inputs = {}
    for name, field in {name: field for item in items for name, field in item.fields.items()}.items():
        # uint8 pixels are normalised; other tensors are the model's inputs.
        arrays = [
            normalised(item, name) if tensor_type(item.tensors[name]).dtype == "uint8" else item[name]
            for item in items
            if name in item
        ]
        if renormalise is not None and name.startswith("pixel_values"):
            arrays = [renormalised(array, *renormalise) for array in arrays]
        inputs[name] = torch.from_numpy(np.array(combine(arrays, field)))
    return inputs
