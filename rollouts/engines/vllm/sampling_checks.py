"""Checks of sampling options: servers ignore unknown ones, and some would make a response unreadable."""

from collections.abc import Iterator, Mapping

from rollouts.engines.http.prompt_checks import option_violations
from rollouts.engines.protocol import GenerateRequest
from rollouts.values import whole_number

#: For a lower temperature vLLM uses this one instead and reports nothing.
_MIN_TEMPERATURE = 0.01
_MAX_TEMPERATURE = 2.0

#: Options of vLLM's `SamplingParams` (0.31 to 0.33) that `SamplingParams.extra` may hold.
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

_FIELD = "it is a field of SamplingParams; set it there"
_TEXT = "responses are token ids, not text"
_LOGPROBS = "the log-probability of every sampled token is requested already, and no other is read"
_OUTPUT = "the engine chooses how responses are sent"
_STOP_STRINGS = "stop strings are matched against text, and the server makes none; use stop_token_ids"

#: Options of vLLM that the engine refuses, with the reason.
_REFUSED: Mapping[str, str] = {
    **dict.fromkeys(("max_tokens", "n", "seed", "stop_token_ids", "temperature", "top_k", "top_p"), _FIELD),
    **dict.fromkeys(("detokenize", "skip_special_tokens", "spaces_between_special_tokens"), _TEXT),
    "logprobs": "set SamplingParams.top_logprobs",
    **dict.fromkeys(("logprob_token_ids", "flat_logprobs"), _LOGPROBS),
    **dict.fromkeys(("output_kind", "skip_clone", "stream_interval"), _OUTPUT),
    **dict.fromkeys(("include_stop_str_in_output", "stop"), _STOP_STRINGS),
    "prompt_logprobs": "set GenerateRequest.prompt_logprobs or prompt_top_logprobs",
    "prompt_logprob_start": "prompt log-probabilities are returned for the whole prompt",
    "prompt_logprob_token_ids": "only the log-probabilities of the prompt's own tokens are read",
    "routed_experts_prompt_start": "the experts of the prompt's tokens would be missing from the response",
    "trace_decode_token_ids": "it makes the server repeat given tokens instead of sampling",
}


def sampling_violations(request: GenerateRequest) -> Iterator[str]:
    """The values that vLLM refuses, changes or ignores. `SamplingParams` and `GenerateRequest` checked types."""
    sampling = request.sampling
    if 0 < sampling.temperature < _MIN_TEMPERATURE:
        yield (
            f"temperature is {sampling.temperature}, which vLLM replaces by {_MIN_TEMPERATURE}; use 0 "
            f"(greedy) or at least {_MIN_TEMPERATURE}"
        )
    if sampling.temperature > _MAX_TEMPERATURE:
        yield f"temperature is {sampling.temperature}; vLLM takes at most {_MAX_TEMPERATURE}"
    seed = sampling.seed
    if seed is not None and (seed == -1 or not -(2**63) <= seed < 2**63):
        yield f"seed is {seed}; use an int of 64 bits, except -1, which means no seed to vLLM"
    yield from option_violations(request, None, EXTRA_OPTIONS, _REFUSED)
    min_tokens = sampling.extra.get("min_tokens", 0)
    if whole_number(min_tokens) is None or not 0 <= min_tokens <= sampling.max_tokens:
        yield f"min_tokens is {min_tokens!r} and max_tokens {sampling.max_tokens}"
