"""The ids that each token of a completion was sampled from, where options leave a part of the vocabulary out."""

from dataclasses import replace
from typing import Final

import numpy as np

from rollouts.engines.protocol import Completion, SamplingParams

#: In likeliest tokens, the log-probability of one that the sampler had left out. vLLM writes -9999, which
#: stands for a missing value in all other places.
LEFT_OUT: Final = -9998.0

#: Options of `SamplingParams.extra` that leave ids out.
_OPTIONS = ("allowed_token_ids", "bad_words", "min_p", "min_tokens", "structured_outputs")


def with_kept_ids(completion: Completion, sampling: SamplingParams, *, raw: bool) -> Completion:
    """The completion with `sampling_masks`, if the options leave ids out or the server reports them.

    They are known at temperature 1, of a token in the place of which `top_logprobs` has one that was left
    out, or the `top_k` likeliest, or all that the server reports; with `raw`, where log-probabilities are
    those before any option, also those of `top_p`. The mask of another token is empty.
    """
    options = any(sampling.extra.get(name) for name in _OPTIONS)
    reported = completion.sampling_masks
    if reported is None and not (options or sampling.top_p < 1 or sampling.top_k):
        return completion
    top, count = completion.top_logprobs, len(completion.token_ids)
    unknown = np.empty(0, np.int32)
    masks = [unknown] * count
    if top is not None and sampling.temperature == 1:
        if reported is not None:
            # vLLM reports them beside raw log-probabilities too, whose sum over them has to be known.
            pairs = zip(reported, top.token_ids, strict=True)
            masks = [mask if np.isin(mask, ids).all() else unknown for mask, ids in pairs]
        else:
            counts = _num_kept(top.logprobs, sampling, raw=raw, options=options).tolist()
            masks = [ids[:kept] for ids, kept in zip(top.token_ids, counts, strict=True)]
            for place, (token, mask) in enumerate(zip(completion.token_ids, masks, strict=True)):
                own, likeliest = completion.logprobs[place], top.logprobs[place]
                if len(mask) and token not in mask and own == likeliest[len(mask) - 1]:
                    # Which of the ids that are as likely as the last is kept is not defined; the sum is.
                    masks[place] = np.append(mask[:-1], token)
    known = [mask if token in mask else unknown for token, mask in zip(completion.token_ids, masks, strict=True)]
    return replace(completion, sampling_masks=tuple(known))


def _num_kept(logprobs: np.ndarray, sampling: SamplingParams, *, raw: bool, options: bool) -> np.ndarray:
    """How many of the likeliest ids (n, k) in each place are all that were kept, int64 (n,); 0: not known."""
    kept = np.zeros(len(logprobs), np.int64)
    if sampling.top_k and sampling.top_p == 1 and not options and logprobs.shape[1] >= sampling.top_k:
        kept[:] = sampling.top_k
    elif raw and not sampling.top_k and not options:
        probabilities = np.exp(logprobs, dtype=np.float64)
        before = np.cumsum(probabilities, axis=1) - probabilities
        kept = np.where(before[:, -1] >= sampling.top_p, (before < sampling.top_p).sum(axis=1), 0)
    if not raw:
        are_left_out = (logprobs <= LEFT_OUT).any(axis=1)
        kept = np.where(are_left_out, (logprobs > LEFT_OUT).sum(axis=1), kept)
    return kept
