"""The model of a directory, run by transformers in float32, scoring tokens that a server has sampled."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from renderers import MediaItem, PlaceholderRange, RenderedTokens
from renderers.vision.batching import combine
from renderers.vision.normalise import normalised
from rollouts.cli.doctor.normalisation import Normalisation, renormalised
from rollouts.cli.doctor.target import SampledTokens, Target
from rollouts.engines.vllm.wire.tensors import tensor_dtype

_TOKEN_TYPES = {"image": 1, "video": 2}


class ScoredPrompt(NamedTuple):
    """A prompt of one `kind` ("text" or "image"), and the completion that the server sampled for it."""

    kind: str
    rendered: RenderedTokens
    completion: SampledTokens

    @property
    def ids(self) -> np.ndarray:
        """Prompt and completion, int32 (n,)."""
        return np.concatenate([np.array(self.rendered.token_ids, dtype=np.int32), self.completion.token_ids])

    @property
    def media(self) -> Sequence[tuple[MediaItem, PlaceholderRange]]:
        media = self.rendered.multi_modal_data
        return () if media is None else media.items_with_ranges()


def load_reference(target: Target) -> Any:
    """The model in float32, on the CPU."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    model_class = AutoModelForImageTextToText if "vision_config" in target.config else AutoModelForCausalLM
    with _without_progress_bars():
        return model_class.from_pretrained(
            str(target.directory), dtype=torch.float32, trust_remote_code=False, local_files_only=True
        ).eval()


def logprob_differences(
    model: Any,
    prompt: ScoredPrompt,
    *,
    renormalise: tuple[Normalisation, Normalisation] | None = None,
    causal: bool = False,
) -> np.ndarray:
    """float32 (scored,): |log p(server) - log p(transformers)| of the sampled tokens.

    `renormalise`: the normalisation that the renderer's pixels have, and the one to give them instead.
    `causal`: the tokens of an image attend only to those before them, in models whose images attend to all of it.
    transformers finds images by token id, so the tokens of a completion are scored up to the first sampled placeholder.
    """
    import torch

    ids, prompt_length = prompt.ids, len(prompt.rendered.token_ids)
    placeholder_ids = [int(ids[start]) for _, placeholder in prompt.media for start, _ in placeholder.runs]
    sampled_placeholders = np.flatnonzero(np.isin(ids[prompt_length:], [*placeholder_ids, *_placeholder_ids(model)]))
    end = prompt_length + int(sampled_placeholders[0]) if len(sampled_placeholders) else len(ids)
    row = torch.from_numpy(ids[:end].astype(np.int64))[None]
    inputs = {"input_ids": row, "attention_mask": torch.ones_like(row), **_media_inputs(prompt.media, renormalise)}
    types = torch.zeros_like(row)
    for item, placeholder in prompt.media:
        for start, stop in placeholder.runs:
            types[0, start:stop] = _TOKEN_TYPES[item.modality]
    accepted = inspect.signature(model.forward).parameters
    inputs |= {name: types for name in ("mm_token_type_ids", "token_type_ids") if name in accepted}
    if causal:
        inputs["token_type_ids"] = torch.zeros_like(row)
    with torch.inference_mode():
        logits = model(**inputs).logits[0, prompt_length - 1 : -1].float()
    scored = torch.log_softmax(logits, dim=-1).gather(-1, row[0, prompt_length:, None])[:, 0].numpy()
    differences: np.ndarray = np.abs(scored - prompt.completion.logprobs[: end - prompt_length])
    return differences


def has_bidirectional_images(model: Any) -> bool:
    """Whether the tokens of an image attend to the whole of it (Gemma 3)."""
    return "token_type_ids" in inspect.signature(model.forward).parameters


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    from transformers.utils import logging

    if not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()


def _placeholder_ids(model: Any) -> list[int]:
    names = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")
    return [value for name in names if isinstance(value := getattr(model.config, name, None), int)]


def _media_inputs(
    media: Sequence[tuple[MediaItem, PlaceholderRange]], renormalise: tuple[Normalisation, Normalisation] | None
) -> dict[str, Any]:
    """The tensors that the model takes for the images of one prompt, as its processor would return them."""
    import torch

    items = [item for item, _ in media]
    inputs = {}
    for name, field in {name: field for item in items for name, field in item.fields.items()}.items():
        arrays = [_model_input(item, name) for item in items if name in item]
        if renormalise is not None and name.startswith("pixel_values"):
            arrays = [renormalised(array, *renormalise) for array in arrays]
        inputs[name] = torch.from_numpy(np.array(combine(arrays, field)))
    return inputs


def _model_input(item: MediaItem, name: str) -> np.ndarray:
    """A tensor as the model takes it: uint8 pixels are normalised, other tensors are left as they are."""
    raw = item.scale is not None and tensor_dtype(item.tensors[name]) == "uint8"
    return normalised(item, name) if raw else item[name]
