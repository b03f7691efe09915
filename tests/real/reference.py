"""Log-probabilities by transformers in float32 of tokens that a server sampled, for the same ids and media."""

import inspect
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForImageTextToText

from renderers import MediaItem, RenderedTokens
from renderers.vision.batching import batch_tensors
from renderers.vision.patches import normalised


class Reference:
    """The model of a checkpoint. `causal`: attention within images is causal, not bidirectional.

    vLLM's attention for the CPU has no bidirectional ranges, which Gemma 3 was trained with (`supports_mm_prefix` of
    its backends), and serves it causally without a word.
    """

    def __init__(self, directory: Path, *, causal: bool = False) -> None:
        self._model = AutoModelForImageTextToText.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self._causal = causal

    def logprobs(self, rendered: RenderedTokens, sampled: Sequence[int]) -> np.ndarray:
        """float32 (sampled,): the log-probability of each sampled token after the prompt."""
        ids = torch.tensor([[*rendered.token_ids, *map(int, sampled)]])
        types = torch.tensor([[*rendered.mm_token_type_ids, *[0] * len(sampled)]])
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **self._media(rendered)}
        takes = inspect.signature(self._model.forward).parameters
        if "token_type_ids" in takes:
            inputs["token_type_ids"] = torch.zeros_like(types) if self._causal else types
        if "mm_token_type_ids" in takes:
            inputs["mm_token_type_ids"] = types
        with torch.no_grad():
            logits = self._model(**inputs).logits[0, len(rendered.token_ids) - 1 : -1]
        chosen = torch.log_softmax(logits.float(), -1).gather(1, torch.tensor([[int(token)] for token in sampled]))
        return np.asarray(chosen[:, 0].numpy())

    def _media(self, rendered: RenderedTokens) -> dict[str, torch.Tensor]:
        media = rendered.multi_modal_data
        assert media is not None
        tensors = {}
        for items in media.media_items.values():
            tensors |= batch_tensors([_as_floats(item) for item in items])
        return {name: torch.from_numpy(np.array(array)) for name, array in tensors.items()}


def _as_floats(item: MediaItem) -> MediaItem:
    tensors = {name: normalised(item, name) if name.startswith("pixel_values") else item[name] for name in item}
    return replace(item, tensors=tensors, scale=None)
