"""What the server generates: log-probabilities, stop tokens, and completions that depend on images."""

from typing import Any

import numpy as np

from renderers.messages import PLURALS, Modality
from rollouts.cli.doctor.target import Finding, Target
from rollouts.engines.protocol import FinishReason
from rollouts.errors import CapabilityError, InvalidRequestError, MissingLogProbsError
from rollouts.models.placed_rows import TokenRow
from rollouts.scoring import score

_RAW_LOGPROBS_CURE = "start `vllm serve` with --logprobs-mode raw_logprobs: training needs the model's own"
# The largest difference between log-probabilities of equal computations whose additions are in another order,
# by dtype.
_TOLERANCES = {"float32": 1e-4, "float16": 0.05, "bfloat16": 0.3}


async def text_request(target: Target) -> Finding:
    try:
        completion = await target.sample(target.request())
    except MissingLogProbsError as error:
        return Finding("failed", str(error), _RAW_LOGPROBS_CURE)
    return Finding("ok", f"{len(completion.token_ids)} tokens with log-probabilities")


async def stop_token(target: Target) -> Finding:
    """A completion must end with the stop token that was requested, and hold it."""
    ids = (await target.sample(target.request())).token_ids.tolist()
    token = ids[len(ids) // 2]
    stopped = await target.sample(target.request(stop_token_ids=(token,)))
    reason = stopped.finish_reason
    if reason is FinishReason.STOP and stopped.token_ids[-1] == token:
        return Finding("ok", f"a completion ends with the stop token {token}, after {len(stopped.token_ids)} tokens")
    if reason is not FinishReason.STOP and token not in stopped.token_ids:
        return Finding("skipped", "the same prompt gave another completion at temperature 0, without the stop token")
    return Finding(
        "failed",
        f"a completion with the stop token {token} is {stopped.token_ids.tolist()}, with the finish reason {reason}",
        "a proxy before `vllm serve` must pass stop_token_ids and all ids on",
    )


async def logprobs_mode(target: Target) -> Finding:
    """Log-probabilities must be the model's own: before temperature and top-k."""
    tolerance = _TOLERANCES.get(target.dtype, _TOLERANCES["bfloat16"])
    processed = {"temperature": 0.5, "top_k": 2} if target.kind == "vllm" else {}
    difference = await _difference_from_prompt(target, **processed)
    if difference <= tolerance:
        if target.kind == "sglang" and target.capabilities.raw_logprobs is False:
            return Finding(
                "absent",
                "log-probabilities are after temperature: requests with another temperature than 0 and 1 are refused",
                "start the server with SGLANG_RETURN_ORIGINAL_LOGPROB=1 in its environment",
            )
        return Finding("ok", f"at most {difference:.2g} from those of the same tokens as a prompt")
    seen = f"log-probabilities of sampled tokens are {difference:.2g} from those of the same tokens as a prompt"
    if processed and await _difference_from_prompt(target, temperature=1.0) <= tolerance:
        return Finding("failed", seen, _RAW_LOGPROBS_CURE)
    return Finding(
        "failed",
        seen,
        f"the server computes prompts and completions differently: start `{target.kind} serve` without "
        "--kv-cache-dtype, --quantization and speculative decoding",
    )


async def _difference_from_prompt(target: Target, **sampling: Any) -> float:
    """The largest difference between log-probabilities of sampled tokens and of the same tokens as a prompt."""
    request = target.request(seed=0, **sampling)
    sampled = await target.sample(request)
    (scores,) = await score([TokenRow(np.array([*request.prompt_ids, *sampled.token_ids]))], target.engine)
    return float(np.abs(sampled.logprobs - scores.logprobs[len(request.prompt_ids) :]).max())


async def media_request(target: Target, *, modality: Modality) -> Finding:
    """Two different images, or sounds, must give different log-probabilities."""
    plural = PLURALS[modality]
    if modality not in target.renderer.processors:
        return Finding("skipped", f"the renderer of --model has no processor for {plural}")
    try:
        first, second = [await target.sample(target.request(modality)) for _ in range(2)]
    except (CapabilityError, InvalidRequestError) as error:
        if modality == "image":
            raise
        return Finding("absent", str(error), f"leave {plural} out, or use a server that takes them")
    same_ids = first.token_ids.tolist() == second.token_ids.tolist()
    # The largest difference between log-probabilities of media that a server does not look at.
    if not same_ids or float(np.abs(first.logprobs - second.logprobs).max()) > 1e-6:
        return Finding("ok", f"two {plural} give different completions or log-probabilities")
    return Finding(
        "failed",
        f"two different {plural} give exactly the same completion: the server ignores {plural}",
        f"start `{target.kind} serve` from a trained checkpoint, without --load-format dummy; if it is one, send "
        'files: VLLMEngine(media="content_parts")',
    )
