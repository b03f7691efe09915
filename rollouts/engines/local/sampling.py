"""Samples tokens so that a completion with a seed does not depend on the other rows of its batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rollouts.engines.protocol import SamplingParams

# Uniform numbers are generated for this many steps at a time: a completion may end long before its `max_tokens`.
_STEPS = 64


class RowSampler:
    """Samples one token a row and step. Row i uses `params[i]` and its own stream of uniform numbers.

    Every row has a generator of its own (Philox keyed by seed and sample index), so a token depends on the row's logits
    and seed alone. Steps are sampled in order, from 0.
    """

    def __init__(self, params: Sequence[SamplingParams], indices: Sequence[int], device: torch.device) -> None:
        self._generators = [_generator(p.seed, index) for p, index in zip(params, indices, strict=True)]
        self._uniforms = torch.empty((len(params), 0), dtype=torch.float64, device=device)
        self._first = 0  # the step that the first column of `_uniforms` is for
        self._temperature = torch.tensor([p.temperature for p in params], dtype=torch.float64, device=device)
        self._top_k = torch.tensor([p.top_k for p in params], device=device)
        self._top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device)
        self._filters = bool((self._top_k > 0).any() or (self._top_p < 1).any())

    def sample(self, logits: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits (rows, vocabulary) -> ids int64 (rows,) and their raw log-probabilities float32 (rows,)."""
        if step >= self._first + self._uniforms.shape[1]:
            uniforms = np.stack([generator.random(_STEPS) for generator in self._generators])
            self._uniforms, self._first = torch.from_numpy(uniforms).to(logits.device), step
        logprobs = torch.log_softmax(logits.float(), dim=-1)
        greedy = self._temperature == 0
        scaled = logits.double() / torch.where(greedy, 1.0, self._temperature)[:, None]
        if self._filters:
            scaled = self._filter(scaled)
        cumulative = torch.softmax(scaled, dim=-1).cumsum(-1)
        # Scaled by the total so that rounding can never push the draw past the last token of positive probability.
        draws = self._uniforms[:, step - self._first, None] * cumulative[:, -1:]
        drawn = torch.searchsorted(cumulative, draws, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)
        ids = torch.where(greedy, logits.argmax(-1), drawn)
        return ids, logprobs.gather(-1, ids[:, None])[:, 0]

    def keep(self, rows: torch.Tensor) -> None:
        """Drop every row except these."""
        self._generators = [self._generators[row] for row in rows.tolist()]
        self._uniforms, self._temperature = self._uniforms[rows], self._temperature[rows]
        self._top_k, self._top_p = self._top_k[rows], self._top_p[rows]

    def _filter(self, scaled: torch.Tensor) -> torch.Tensor:
        """Minus infinity outside the top k and outside the smallest set that holds probability top_p."""
        ordered, order = scaled.sort(dim=-1, descending=True)
        rank = torch.arange(scaled.shape[-1], device=scaled.device)
        kept = (self._top_k[:, None] == 0) | (rank < self._top_k[:, None])
        probabilities = torch.softmax(ordered.masked_fill(~kept, -torch.inf), dim=-1)
        before = probabilities.cumsum(-1) - probabilities
        # top_p 1 must keep everything, though rounding can bring the sum before the last tokens to 1.
        kept &= (before < self._top_p[:, None]) | (self._top_p[:, None] >= 1)
        kept[:, 0] = True
        return scaled.masked_fill(~torch.zeros_like(kept).scatter(-1, order, kept), -torch.inf)


def _generator(seed: int | None, index: int) -> np.random.Generator:
    if seed is None:
        return np.random.default_rng()
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, index])))
