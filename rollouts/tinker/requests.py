"""What requests ask and results hold, in arrays: the form between the wire and the trainer or a sampler."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from renderers.placement import PlacedItem
from rollouts.engines.protocol import TopLogprobs


class TextChunk(NamedTuple):
    """Tokens: int32 (n,)."""

    token_ids: np.ndarray


class ImageChunk(NamedTuple):
    """An image file. `expected_tokens`: how many tokens the client counts for it, None if it does not say."""

    data: bytes
    format: str
    expected_tokens: int | None


class ImagePointerChunk(NamedTuple):
    """An image at a URL."""

    location: str
    format: str
    expected_tokens: int | None


Chunk = TextChunk | ImageChunk | ImagePointerChunk


class ModelInput(NamedTuple):
    """Token ids int64 (n,) with expanded placeholders, and the media at them."""

    token_ids: np.ndarray
    media: Sequence[PlacedItem]


class PromptTargets(NamedTuple):
    """Tokens to score: `ids[i]` in the place of the prompt's token `rows[i] + 1`, int64 (c,) both; an id of -1: none.

    `height`: how many rows there are, one for each token of the prompt but the first.
    """

    height: int
    rows: np.ndarray
    ids: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class SampleRequest:
    """One prompt and how to continue it.

    `stop`: texts or token ids that end a sequence, beside the model's own end tokens; None: those alone; ():
    nothing ends it but `max_tokens`, where None means as many as the model has place for. `topk_prompt` and
    `topk_sample`: how many of the likeliest tokens to report at each token, 0: none. `targets`: tokens to
    score in places of the prompt; `alternatives`: how many tokens to draw, at `temperature`, in the place of
    each of its tokens but the first.
    """

    prompt: ModelInput
    num_samples: int = 1
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] | tuple[int, ...] | None = None
    prompt_logprobs: bool = False
    topk_prompt: int = 0
    topk_sample: int = 0
    targets: PromptTargets | None = None
    alternatives: int = 0

    @property
    def scores_prompt(self) -> bool:
        """Whether anything is asked of the places of the prompt."""
        return self.prompt_logprobs or self.topk_prompt > 0 or self.scores_others

    @property
    def scores_others(self) -> bool:
        """Whether tokens are asked for in the places of the prompt that are neither its own nor the likeliest."""
        return self.targets is not None or self.alternatives > 0


@dataclass(frozen=True, slots=True, eq=False)
class SampledSequence:
    """Ids int32 (n,), the stop token included, and their log-probabilities float32 (n,) under the raw distribution.

    `stopped`: it ended at a stop token or text; otherwise it has `max_tokens` tokens.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    stopped: bool
    topk: TopLogprobs | None = None


@dataclass(frozen=True, slots=True, eq=False)
class SampleResult:
    """`prompt_logprobs`: float32 (prompt,), NaN for the first token; `topk_prompt` has a row for each prompt
    token, the first of them empty (id 0, log-probability -99999); `target_logprobs`: float32 (c,), 0 where
    the id is -1; `alternatives`: ids int64 (prompt - 1, k) and their log-probabilities float32 (prompt - 1,
    k)."""

    sequences: Sequence[SampledSequence]
    prompt_logprobs: np.ndarray | None = None
    topk_prompt: TopLogprobs | None = None
    target_logprobs: np.ndarray | None = None
    alternatives: tuple[np.ndarray, np.ndarray] | None = None
