"""What the server generates: log-probabilities, stop tokens, and completions that depend on images."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from renderers.messages import Modality
from rollouts.cli.doctor.target import Finding, Target, absent, failed, ok, skipped
from rollouts.engines.protocol import FinishReason
from rollouts.errors import CapabilityError, InvalidRequestError, MissingLogProbsError

_RAW_LOGPROBS_CURE = "start `vllm serve` with --logprobs-mode raw_logprobs: training needs the model's own"


async def text_request(target: Target) -> Finding:
    try:
        completion = await target.sample(target.text_prompt())
    except MissingLogProbsError as error:
        return failed(str(error), _RAW_LOGPROBS_CURE)
    return ok(f"{len(completion.token_ids)} tokens with log-probabilities")


async def stop_token(target: Target) -> Finding:
    """A completion must end with the stop token that was requested, and hold it."""
    prompt = target.text_prompt()
    ids = (await target.sample(prompt)).token_ids.tolist()
    token = ids[len(ids) // 2]
    stopped = await target.sample(prompt, stop_token_ids=(token,))
    reason = stopped.finish_reason
    if reason is FinishReason.STOP and stopped.token_ids[-1] == token:
        return ok(f"a completion ends with the stop token {token}, after {len(stopped.token_ids)} tokens")
    if reason is not FinishReason.STOP and token not in stopped.token_ids:
        return skipped("the same prompt gave another completion at temperature 0, without the stop token")
    return failed(
        f"a completion with the stop token {token} is {stopped.token_ids.tolist()}, with the finish reason {reason}",
        f"a proxy before `{target.command}` must pass stop_token_ids and all ids on",
    )


async def logprobs_mode(target: Target) -> Finding:
    """Log-probabilities must be the model's own: before temperature and top-k."""
    processed = {"temperature": 0.5, "top_k": 2} if target.kind == "vLLM" else {}
    difference = await _difference_from_prompt(target, **processed)
    if difference <= target.tolerance:
        if getattr(target.capabilities, "raw_logprobs", None) is False:  # of SGLang, whose probe tells
            return absent(
                "log-probabilities are after temperature: requests with another temperature than 0 and 1 are refused",
                "start the server with SGLANG_RETURN_ORIGINAL_LOGPROB=1 in its environment",
            )
        return ok(f"at most {difference:.2g} from those of the same tokens as a prompt")
    seen = f"log-probabilities of sampled tokens are {difference:.2g} from those of the same tokens as a prompt"
    if processed and await _difference_from_prompt(target, temperature=1.0) <= target.tolerance:
        return failed(seen, _RAW_LOGPROBS_CURE)
    return failed(
        seen,
        f"the server computes prompts and completions differently: start `{target.command}` without --kv-cache-dtype, "
        "--quantization and speculative decoding",
    )


async def _difference_from_prompt(target: Target, **sampling: Any) -> float:
    """The largest difference between log-probabilities of sampled tokens and of the same tokens as a prompt."""
    rendered = target.text_prompt()
    sampled = await target.sample(rendered, seed=0, **sampling)
    prompt_ids = [*rendered.token_ids, *sampled.token_ids.tolist()]
    scoring = replace(
        target.request(rendered, max_tokens=1),
        prompt_ids=prompt_ids,
        sampled=[(len(rendered.token_ids), len(prompt_ids))],  # where an image token is text
        prompt_logprobs=True,
    )
    scored = (await target.engine.generate(scoring)).prompt_logprobs
    assert scored is not None
    return float(np.abs(sampled.logprobs - scored[len(rendered.token_ids) - len(prompt_ids) :]).max())


async def media_request(target: Target, *, modality: Modality, name: str) -> Finding:
    """Two different images, or sounds, must give different log-probabilities. `name`: that of one of them."""
    try:
        first, second = [await target.sample(target.media_prompt(modality)) for _ in range(2)]
    except (CapabilityError, InvalidRequestError) as error:
        if modality == "image":
            raise
        return absent(str(error), f"leave {name}s out, or use a server that takes them")
    same_ids = first.token_ids.tolist() == second.token_ids.tolist()
    # The largest difference between log-probabilities of media that a server does not look at.
    if not same_ids or float(np.abs(first.logprobs - second.logprobs).max()) > 1e-6:
        return ok(f"two {name}s give different completions or log-probabilities")
    return failed(
        f"two different {name}s give exactly the same completion: the server ignores {name}s",
        f"start `{target.command}` from a trained checkpoint, without --load-format dummy; if it is one, send "
        'files: VLLMEngine(media="content_parts")',
    )
