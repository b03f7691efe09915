"""What is refused before a request is sent to an SGLang server: it would end the server, or change what is sampled."""

from collections.abc import Iterator, Mapping

import numpy as np

from rollouts.engines.http.prompt_checks import (
    header_violations,
    item_name,
    option_violations,
    placement_violations,
    refuse_first,
    sampled_marker,
    stray_token_violations,
)
from rollouts.engines.protocol import GenerateRequest
from rollouts.engines.request_limits import check_prompt
from rollouts.engines.sglang.capabilities import SGLangCapabilities
from rollouts.errors import CapabilityError

#: SGLang samples greedily below this temperature.
_MIN_TEMPERATURE = 1e-6

#: Options of SGLang that `SamplingParams.extra` may hold.
EXTRA_OPTIONS = frozenset({"ignore_eos", "min_p"})

_FIELD = "it is a field of SamplingParams; set it there"
_TEXT = "responses are token ids, not text"
_CHANGED = "SGLang reports log-probabilities after this change of the logits, which a trainer does not make"

#: Options of SGLang that the engine refuses, with the reason.
_REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "max_new_tokens",
            "max_tokens",
            "n",
            "sampling_seed",
            "seed",
            "stop_token_ids",
            "temperature",
            "top_k",
            "top_p",
        ),
        _FIELD,
    ),
    **dict.fromkeys(
        ("frequency_penalty", "logit_bias", "min_new_tokens", "min_tokens", "presence_penalty", "repetition_penalty"),
        _CHANGED,
    ),
    **dict.fromkeys(("ebnf", "json_schema", "regex", "structural_tag", "custom_params"), _CHANGED),
    **dict.fromkeys(("no_stop_trim", "skip_special_tokens", "spaces_between_special_tokens"), _TEXT),
    **dict.fromkeys(("stop", "stop_regex"), "stop strings are matched against text; use stop_token_ids"),
    "beam_width": "a beam is not sampled from the model's distribution",
    "stream_interval": "the engine chooses how responses are sent",
    "watermark": "a watermark changes the distribution that tokens are sampled from",
}


def check_request(request: GenerateRequest, capabilities: SGLangCapabilities) -> None:
    """Raise if the server would refuse the request, end, or misinterpret it.

    Raises `ContextLengthError`, `InvalidRequestError`, and `CapabilityError` if another server could run the request.
    """
    refuse_first(request, header_violations(request))
    ids = check_prompt(request, capabilities.max_model_len, capabilities.vocab_size)
    refuse_first(request, sampling_violations(request, capabilities.vocab_size))
    refuse_first(request, placement_violations(request, ids, {}))
    refuse_first(request, stray_token_violations(request, ids, request.placeholder_token_ids))
    refuse_first(request, _media_violations(request, ids))
    for reason in _missing_capabilities(request, capabilities):
        raise CapabilityError(request.request_id, reason)


def sampling_violations(request: GenerateRequest, vocab_size: int | None = None) -> Iterator[str]:
    """The values that SGLang refuses or changes, or with which it would end. `vocab_size` None: it is not known."""
    sampling = request.sampling
    if 0 < sampling.temperature < _MIN_TEMPERATURE:
        yield f"temperature is {sampling.temperature}, which SGLang replaces by 0; use 0 or at least {_MIN_TEMPERATURE}"
    seed = sampling.seed
    if seed is not None and not -(2**63) <= seed < 2**63 - sampling.n:
        yield f"seed is {seed}, not an int of 64 bits"
    top = max(sampling.top_logprobs, request.prompt_top_logprobs)
    if vocab_size is not None and top > vocab_size:
        yield f"top_logprobs is {top}, which is more than the vocabulary has: {vocab_size}; this would end the server"
    yield from option_violations(request, vocab_size, EXTRA_OPTIONS, _REFUSED)


def _media_violations(request: GenerateRequest, ids: np.ndarray) -> Iterator[str]:
    """The server puts medium i in the place of the i-th placeholder token, whoever wrote that token."""
    placed = request.media
    for item, placeholder in placed:
        if item.modality != "image":
            yield (
                f"{item_name(item)}: SGLang tokenises a prompt with {item.modality} again, so that its ids "
                "would not be those of the trajectory; images alone keep theirs"
            )
        if item.modality not in request.placeholder_token_ids:
            yield (
                f"{item_name(item)}: the server needs the token that stands for one {item.modality}: pass "
                "`RenderedTokens.placeholder_token_ids` with the request, or the `renderer` to `score`"
            )
        if not placeholder.whole:
            yield (
                f"{item_name(item)}: text at an edge of its placeholder may share a token with the text next "
                "to it, so that the prompt before expansion is not known"
            )
    markers = list(request.placeholder_token_ids.values())
    if placed and (at := sampled_marker(request, ids, markers)) is not None:
        yield (
            f"token {at} of the prompt is {ids[at]}, a media placeholder, sampled as text; SGLang would look "
            "for the media. End the episode there, or add the token to stop_token_ids"
        )


def _missing_capabilities(request: GenerateRequest, capabilities: SGLangCapabilities) -> Iterator[str]:
    sampling, version = request.sampling, f"SGLang {capabilities.version}"
    if request.media and not capabilities.takes_images:
        yield f"{capabilities.model} takes no images: the server says has_image_understanding false"
    if request.media and not capabilities.returns_prompt:
        yield (
            f"{version} does not return the ids of the prompt that it ran (return_prompt_token_ids), and may "
            "tokenise a prompt with images again without an error; upgrade it"
        )
    if sampling.temperature not in (0, 1) and capabilities.raw_logprobs is not True:
        found = "are those after temperature" if capabilities.raw_logprobs is False else "cannot be told apart"
        yield (
            f"temperature is {sampling.temperature}, and the server's log-probabilities {found}, not the "
            "model's own. Start it with SGLANG_RETURN_ORIGINAL_LOGPROB=1 in its environment, or use "
            "temperature 1"
        )
    if request.adapter is not None and not capabilities.lora:
        yield f"adapter is {request.adapter!r}, and the server was started without --enable-lora"
