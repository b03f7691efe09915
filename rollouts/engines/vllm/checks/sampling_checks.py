"""Which sampling options are sent: servers ignore those that they do not know, and some make an answer unreadable."""

from __future__ import annotations

from collections.abc import Mapping

from rollouts.engines.protocol import GenerateRequest
from rollouts.errors import InvalidRequestError

#: Below this vLLM samples at this temperature instead, without a word.
_LEAST_TEMPERATURE = 0.01
_MOST_TEMPERATURE = 2.0

#: Options of vLLM's `SamplingParams` (0.20 to 0.33) that `SamplingParams.extra` may hold.
EXTRA_OPTIONS = frozenset(
    {
        "allowed_token_ids",
        "bad_words",
        "extra_args",
        "frequency_penalty",
        "ignore_eos",
        "logit_bias",
        "min_p",
        "min_tokens",
        "presence_penalty",
        "repetition_detection",
        "repetition_penalty",
        "skip_reading_prefix_cache",
        "structured_outputs",
        "thinking_token_budget",
        "watermarking",
    }
)

_A_FIELD = "it is a field of SamplingParams; set it there"
_OF_TEXT = "answers are token ids; no text is made"
_OF_LOGPROBS = "the log-probability of every sampled token is asked for already, and nothing else is read"
_OF_ANSWER = "the engine chooses how answers come"
_OF_STRINGS = "stop strings are found in text, and none is made; use stop_token_ids"

#: Options that vLLM knows and the engine refuses, and why.
_REFUSED: Mapping[str, str] = {
    **dict.fromkeys(("max_tokens", "n", "seed", "stop_token_ids", "temperature", "top_k", "top_p"), _A_FIELD),
    **dict.fromkeys(("detokenize", "skip_special_tokens", "spaces_between_special_tokens"), _OF_TEXT),
    **dict.fromkeys(("logprobs", "logprob_token_ids", "flat_logprobs"), _OF_LOGPROBS),
    **dict.fromkeys(("output_kind", "skip_clone", "stream_interval"), _OF_ANSWER),
    **dict.fromkeys(("include_stop_str_in_output", "stop"), _OF_STRINGS),
    "prompt_logprobs": "set GenerateRequest.prompt_logprobs",
    "prompt_logprob_start": "prompt log-probabilities come for the whole prompt",
    "prompt_logprob_token_ids": "only the log-probabilities of the prompt's own tokens are read",
    "routed_experts_prompt_start": "the experts of the prompt's tokens would be missing from the answer",
    "trace_decode_token_ids": "it makes the server repeat given tokens instead of sampling",
}


def check_sampling(request: GenerateRequest, *, vocab_size: int | None) -> None:
    """Raise `InvalidRequestError` for what vLLM refuses, changes or ignores. `SamplingParams` checked its types."""
    sampling = request.sampling
    for name in ("max_tokens", "n", "top_k"):
        if not is_int64(getattr(sampling, name)):
            _refuse(request, f"{name} is {getattr(sampling, name)}, not an int of 64 bits")
    if sampling.temperature == 0 and sampling.n > 1:
        _refuse(request, f"n is {sampling.n} with temperature 0, where all samples are the same; ask for one")
    if 0 < sampling.temperature < _LEAST_TEMPERATURE:
        _refuse(
            request,
            f"temperature is {sampling.temperature}, in place of which vLLM samples at {_LEAST_TEMPERATURE}; use 0 "
            f"(greedy) or at least {_LEAST_TEMPERATURE}",
        )
    if sampling.temperature > _MOST_TEMPERATURE:
        _refuse(request, f"temperature is {sampling.temperature}; vLLM takes at most {_MOST_TEMPERATURE}")
    seed = sampling.seed
    if seed is not None and (not is_int64(seed) or seed == -1):
        _refuse(request, f"seed is {seed!r}; use an int of 64 bits, apart from -1, which vLLM takes for no seed")
    past = float("inf") if vocab_size is None else vocab_size
    for token in sampling.stop_token_ids:
        if not is_int64(token) or not 0 <= token < past:
            _refuse(request, f"stop_token_ids holds {token!r}, which is no token of a vocabulary of {past}")
    _check_extra(request)
    if not is_int64(request.priority):
        _refuse(request, f"priority is {request.priority!r}, not an int of 64 bits")


def _check_extra(request: GenerateRequest) -> None:
    extra = request.sampling.extra
    for name in extra:
        if name in _REFUSED:
            _refuse(request, f"sampling.extra holds {name!r}: {_REFUSED[name]}")
        if name not in EXTRA_OPTIONS:
            _refuse(
                request,
                f"sampling.extra holds {name!r}, which vLLM would ignore; it may hold "
                f"{', '.join(sorted(EXTRA_OPTIONS))}",
            )
    least = extra.get("min_tokens", 0)
    if not is_int64(least) or not 0 <= least <= request.sampling.max_tokens:
        _refuse(request, f"min_tokens is {least!r} and max_tokens {request.sampling.max_tokens}")


def is_int64(value: object) -> bool:
    """Whether JSON shows it as an integer, and one that vLLM can pass on to its engine."""
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def _refuse(request: GenerateRequest, reason: str) -> None:
    raise InvalidRequestError(request.request_id, reason)
