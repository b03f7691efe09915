"""Samples the completions of several requests together: one prefill of the distinct prompts, one decoding loop."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import DynamicCache

from rollouts.engines.kept_ids import with_kept_ids
from rollouts.engines.local.request_queue import PromptObserver, RunningRequest
from rollouts.engines.protocol import (
    Completion,
    FinishReason,
    GenerateResult,
    SamplingParams,
    TokenDelta,
    TopLogprobs,
    WeightSpan,
)
from rollouts.models.forward_pass import ForwardPass
from rollouts.models.item_features import FeatureCache
from rollouts.models.placed_rows import TokenRow, placed_rows


class SampledTokens(NamedTuple):
    """Of one step: ids int64 (rows,) and their raw log-probabilities float32 (rows,); the likeliest ids int32
    (rows, k) and theirs float32 (rows, k), for the largest k that a row asks for."""

    ids: torch.Tensor
    logprobs: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor


class RowSampler:
    """Samples one token a row and step, from a generator of each row (Philox: seed, sample index)."""

    def __init__(self, params: Sequence[SamplingParams], indices: Sequence[int], device: torch.device) -> None:
        self._generators = [_generator(p.seed, index) for p, index in zip(params, indices, strict=True)]
        self._uniforms = torch.empty((len(params), 0), dtype=torch.float64, device=device)
        self._first = 0  # the step that the first column of `_uniforms` is for
        self._temperature = torch.tensor([p.temperature for p in params], dtype=torch.float64, device=device)
        self._top_k = torch.tensor([p.top_k for p in params], device=device)
        self._top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device)
        self._filters = bool((self._top_k > 0).any() or (self._top_p < 1).any())
        self._most = max(p.top_logprobs for p in params)

    def sample(self, logits: torch.Tensor, step: int) -> SampledTokens:
        """One token a row, from logits (rows, vocabulary)."""
        if step >= self._first + self._uniforms.shape[1]:
            # Uniform numbers are generated for this many steps at a time: a completion may end long before
            # its `max_tokens`.
            uniforms = np.stack([generator.random(64) for generator in self._generators])
            self._uniforms, self._first = torch.from_numpy(uniforms).to(logits.device), step
        logprobs = torch.log_softmax(logits.float(), dim=-1)
        # Of the raw logits above: log-probabilities are those before temperature, top-k and top-p.
        greedy = self._temperature == 0
        # In float64: a cumulative sum over a vocabulary loses digits in float32. 1 stands for a temperature
        # of 0.
        scaled = logits.double() / torch.where(greedy, 1.0, self._temperature)[:, None]
        if self._filters:
            scaled = self._filter(scaled)
        of_row = drawn(scaled, self._uniforms[:, step - self._first, None])[:, 0]
        ids = torch.where(greedy, logits.argmax(-1), of_row)
        return SampledTokens(ids, logprobs.gather(-1, ids[:, None])[:, 0], *_likeliest(logprobs, self._most))

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
        # The likeliest token is always left, whatever rounding does to the sums.
        kept[:, 0] = True
        return scaled.masked_fill(~torch.zeros_like(kept).scatter(-1, order, kept), -torch.inf)


def drawn(scaled: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Ids (rows, k) of the softmax of scaled logits (rows, vocabulary), by uniform numbers (rows, k), in float64."""
    cumulative = torch.softmax(scaled, dim=-1).cumsum(-1)
    # Scaled by the total so that rounding can never push the draw past the last token of positive
    # probability.
    draws = uniforms * cumulative[:, -1:]
    return torch.searchsorted(cumulative, draws, right=True).clamp(max=scaled.shape[-1] - 1)


def _likeliest(logprobs: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k likeliest ids int32 (rows, k) of log-probabilities (rows, vocabulary), and theirs float32 (rows, k)."""
    if not k:
        return logprobs.new_empty((len(logprobs), 0), dtype=torch.int32), logprobs[:, :0]
    values, ids = logprobs.topk(k, dim=-1)
    return ids.to(torch.int32), values


def _generator(seed: int | None, index: int) -> np.random.Generator:
    if seed is None:
        return np.random.default_rng()
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, index])))


# Positions of a prompt whose logits exist at once.
_SCORED_POSITIONS = 256


class _Sample(NamedTuple):
    """One completion to sample: number `number` of request `request`, after prompt `prompt` (indices in the batch)."""

    request: int
    number: int
    prompt: int


class _Scores(NamedTuple):
    """Log-probabilities in the places of a prompt's tokens: of these, float32 (tokens,), and the likeliest ones."""

    logprobs: np.ndarray
    top: TopLogprobs


class Batch:
    """The requests of one batch. `features` are those of media items, kept for later ones; `max_length` is the model's.

    `is_interrupted` is asked after every token. Once it returns True, the unfinished completions end with
    `FinishReason.ABORT`; each has at least one token. So do those of a request that is aborted. So do all
    unfinished ones where the model fails after the first token of a batch of several requests, which then get
    `runs_alone`; any other error is raised. Tokens of requests with a listener are reported after every step.
    """

    def __init__(
        self,
        forward: ForwardPass,
        running: Sequence[RunningRequest],
        features: FeatureCache,
        max_length: int,
        is_interrupted: Callable[[], bool],
    ) -> None:
        self._forward = forward
        self._running = running
        self._requests = requests = [each.request for each in running]
        self._features = features
        self._max_length = max_length
        self._is_interrupted = is_interrupted
        self._prompts: list[TokenRow] = []  # distinct ones
        self._samples: list[_Sample] = []
        prompt_indices: dict[tuple[Any, ...], int] = {}
        for request_index, request in enumerate(requests):
            media = request.media
            key = (tuple(request.prompt_ids), tuple((item.mm_hash, item_range.offset) for item, item_range in media))
            prompt = prompt_indices.setdefault(key, len(prompt_indices))
            if prompt == len(self._prompts):
                ids = np.asarray(request.prompt_ids, dtype=np.int64)
                self._prompts.append(TokenRow(ids, media, request.request_id))
            self._samples += [_Sample(request_index, number, prompt) for number in range(request.sampling.n)]

    def run(self, weight_version: str) -> list[GenerateResult]:
        """Sample every completion; the results are in the order of the requests."""
        logits, cache, mask, positions, scores = self._prefill()
        completions: list[list[Completion]] = [[] for _ in self._requests]
        columns = self._decode(logits, cache, mask, positions)
        for sample, (row_ids, row_logprobs, top_ids, top_logprobs) in zip(self._samples, columns, strict=True):
            reason = self._finish_reason(sample, row_ids)
            sampling = self._requests[sample.request].sampling
            completion = Completion(
                index=sample.number,
                token_ids=row_ids,
                logprobs=row_logprobs,
                finish_reason=reason,
                stop_token_id=int(row_ids[-1]) if reason is FinishReason.STOP else None,
                weight_spans=(WeightSpan(weight_version, 0, len(row_ids)),),
                top_logprobs=_first(sampling.top_logprobs, top_ids, top_logprobs),
            )
            completions[sample.request].append(with_kept_ids(completion, sampling, raw=True))
        results = []
        for index, (request, of_request) in enumerate(zip(self._requests, completions, strict=True)):
            of_prompt = scores.get(index)
            result = GenerateResult(
                request.request_id,
                of_request,
                of_prompt.logprobs if of_prompt is not None and request.prompt_logprobs else None,
                None if of_prompt is None else _first(request.prompt_top_logprobs, *of_prompt.top),
            )
            results.append(result)
        return results

    def _limit(self, sample: _Sample) -> int:
        room = self._max_length - len(self._prompts[sample.prompt])
        return min(self._requests[sample.request].sampling.max_tokens, room)

    def _finish_reason(self, sample: _Sample, ids: np.ndarray) -> FinishReason:
        if int(ids[-1]) in self._requests[sample.request].sampling.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(ids) >= self._limit(sample) else FinishReason.ABORT

    def _prefill(self) -> tuple[torch.Tensor, DynamicCache, torch.Tensor, torch.Tensor, dict[int, _Scores]]:
        """Logits (samples, vocabulary), cache, attention mask, next positions, and scores by request."""
        config = self._forward.architecture.text_config
        # On the left, so that the last column has the last token of every prompt.
        rows = placed_rows(self._prompts, pad_id=getattr(config, "pad_token_id", None) or 0, side="left")
        cache = DynamicCache(config=config)
        hidden, following = self._forward.prefill(rows, cache, self._features)
        logits = self._forward.head.logits(hidden[:, -1])
        prompts = torch.tensor([sample.prompt for sample in self._samples], device=hidden.device)
        if len(self._samples) > len(self._prompts):
            # A row of the cache for each sample: each distinct prompt was computed once.
            cache.reorder_cache(prompts)
        mask = torch.from_numpy(rows.attention_mask).to(hidden.device)[prompts]
        return logits[prompts], cache, mask, following[prompts], self._prompt_scores(hidden)

    def _prompt_scores(self, hidden: torch.Tensor) -> dict[int, _Scores]:
        """By the index of each request that asks for them. `hidden` (prompts, T, hidden) is padded on the left."""
        prompts = {sample.request: sample.prompt for sample in self._samples}
        wanted = {index: prompts[index] for index, each in enumerate(self._requests) if each.scores_prompt}
        most = dict.fromkeys(wanted.values(), 0)
        observers: dict[int, list[PromptObserver]] = {prompt: [] for prompt in most}
        for index, prompt in wanted.items():
            most[prompt] = max(most[prompt], self._requests[index].prompt_top_logprobs)
            if (observe := self._running[index].observe) is not None:
                observers[prompt].append(observe)
        scored = {
            prompt: self._scored(hidden[prompt], self._prompts[prompt].token_ids, k, observers[prompt])
            for prompt, k in most.items()
        }
        return {index: scored[prompt] for index, prompt in wanted.items()}

    def _scored(self, hidden: torch.Tensor, ids: np.ndarray, k: int, observers: Sequence[PromptObserver]) -> _Scores:
        """The scores of a prompt with the k likeliest tokens in each place; `hidden` (T, hidden) ends with it."""
        # The state in a place predicts the token behind it.
        states = hidden[len(hidden) - len(ids) : -1]
        # A copy, because ids from the wire are read-only, which torch cannot represent.
        targets = torch.from_numpy(ids[1:].copy()).to(hidden.device)
        values = [torch.full((1,), torch.nan)]
        top = [TopLogprobs.unpredicted(1, k)]
        for start in range(0, len(targets), _SCORED_POSITIONS):
            part = slice(start, start + _SCORED_POSITIONS)
            logprobs = torch.log_softmax(self._forward.head.logits(states[part]).float(), dim=-1)
            values.append(logprobs.gather(-1, targets[part, None])[:, 0].cpu())
            for observe in observers:
                observe(start, logprobs)
            top.append(TopLogprobs(*(column.cpu().numpy() for column in _likeliest(logprobs, k))))
        return _Scores(torch.cat(values).numpy(), TopLogprobs.joined(top))

    def _decode(
        self, logits: torch.Tensor, cache: DynamicCache, mask: torch.Tensor, positions: torch.Tensor
    ) -> list[tuple[np.ndarray, ...]]:
        """Of each sample the columns of `SampledTokens`, with int32 ids."""
        device = logits.device
        params = [self._requests[sample.request].sampling for sample in self._samples]
        sampler = RowSampler(params, [sample.number for sample in self._samples], device)
        limits = [self._limit(sample) for sample in self._samples]
        max_tokens = torch.tensor(limits, device=device)
        # Each row: the stop ids of a sample, padded with -1.
        stop_rows = [torch.tensor([*each.stop_token_ids, -1]) for each in params]
        stops = torch.nn.utils.rnn.pad_sequence(stop_rows, batch_first=True, padding_value=-1).to(device)
        active = torch.arange(len(params), device=device)  # the sample of each row that still generates
        steps: list[tuple[torch.Tensor, SampledTokens]] = []  # of each step: samples, tokens

        for step in range(max(limits)):
            sampled = sampler.sample(logits, step)
            ids = sampled.ids
            steps.append((active, sampled))
            self._report(active, sampled)
            unfinished = ~(ids[:, None] == stops[active]).any(-1) & (step + 1 < max_tokens[active])
            if any(each.is_aborted for each in self._running):
                aborted = [self._running[self._samples[sample].request].is_aborted for sample in active.tolist()]
                unfinished &= ~torch.tensor(aborted, device=device)
            if not bool(unfinished.any()) or self._is_interrupted():
                break
            if not bool(unfinished.all()):
                rows = unfinished.nonzero()[:, 0]
                active, ids, mask, positions = active[rows], ids[rows], mask[rows], positions[rows]
                sampler.keep(rows)
                cache.reorder_cache(rows)  # selects rows of every kind of layer
            mask = torch.cat([mask, mask.new_ones((len(mask), 1))], dim=1)
            try:
                logits = self._forward.head.logits(self._forward.next_hidden_states(ids, positions, mask, cache))
            except Exception:  # of the model, whatever it is
                if len(self._running) == 1:
                    raise
                for each in self._running:
                    each.runs_alone = True
                break
            positions = positions + 1

        samples = torch.cat([active for active, _ in steps]).cpu().numpy()
        # Stable: the tokens of each sample stay in the order of the steps.
        order = np.argsort(samples, kind="stable")
        ends = np.cumsum(np.bincount(samples))[:-1]
        parts = []
        for column in zip(*(tokens for _, tokens in steps), strict=True):
            array = torch.cat(column).cpu().numpy()
            array = array.astype(np.int32) if array.dtype == np.int64 else array
            # Copies: a view would keep the arrays of the whole batch alive.
            parts.append([part.copy() for part in np.split(array[order], ends)])
        return list(zip(*parts, strict=True))

    def _report(self, active: torch.Tensor, sampled: SampledTokens) -> None:
        if all(each.listen is None for each in self._running):
            return
        ids, values, *top = (column.cpu().numpy() for column in sampled)
        tokens = ids.astype(np.int32)
        for index, sample in enumerate(self._samples[each] for each in active.tolist()):
            if (listen := self._running[sample.request].listen) is not None:
                row = slice(index, index + 1)
                k = self._requests[sample.request].sampling.top_logprobs
                likeliest = _first(k, *(each[row] for each in top))
                listen(TokenDelta(sample.number, tokens[row], values[row], likeliest))


def _first(k: int, ids: np.ndarray, logprobs: np.ndarray) -> TopLogprobs | None:
    """The k likeliest of tokens in arrays of at least k columns, copied where there are more; None for k 0."""
    return TopLogprobs(*(np.ascontiguousarray(array[:, :k]) for array in (ids, logprobs))) if k else None
