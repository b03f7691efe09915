"""Completions of text: their log-probabilities, and aborting a request."""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import replace

import numpy as np

from renderers import RenderedTokens
from rollouts.cli.doctor.finding import Finding, failed, ok, skipped
from rollouts.cli.doctor.target import GENERATE_PATH, Target, completion_of
from rollouts.engines.protocol import FinishReason
from rollouts.errors import MalformedResultError, MissingLogProbsError

# A request is aborted after the first delay; if it has ended by then, another one is aborted after the next delay.
_ABORT_AFTER_SECONDS = (0.5, 0.1, 0.02)
# A request that ends so soon after the abort may have ended by itself.
_GRACE_SECONDS = 0.1
# The largest number of log-probabilities at one position that vLLM reports by default.
_TOP_LOGPROBS = 20

_RAW_LOGPROBS_CURE = "start `vllm serve` with --logprobs-mode raw_logprobs: training needs the model's own"


async def text_request(target: Target) -> Finding:
    started = time.perf_counter()
    try:
        completion = await target.sample(target.text_prompt())
    except (MalformedResultError, MissingLogProbsError) as error:
        return failed(str(error), _RAW_LOGPROBS_CURE)
    seconds = time.perf_counter() - started
    return ok(f"{len(completion.token_ids)} tokens with log-probabilities in {seconds * 1000:.0f} ms")


async def logprobs_mode(target: Target) -> Finding:
    """Log-probabilities must be the model's own: before temperature and top-k, and not logits."""
    if (total := await _total_probability(target)) is not None and total > 1.01:
        return failed(f"the probabilities of one token's alternatives add up to {total:.3g}", _RAW_LOGPROBS_CURE)
    rendered = target.text_prompt()
    sampled = await target.sample(rendered, temperature=0.5, top_k=2, seed=0)
    ids = sampled.token_ids.tolist()
    scoring = replace(
        target.request(rendered, max_tokens=1), prompt_ids=[*rendered.token_ids, *ids], prompt_logprobs=True
    )
    scored = (await target.engine.generate(scoring)).prompt_logprobs
    assert scored is not None
    difference = float(np.abs(sampled.logprobs - scored[-len(ids) :]).max())
    if difference <= target.tolerance:
        return ok(
            f"raw, before temperature and top-k (at most {difference:.2g} from those of the same tokens as a prompt)"
        )
    return failed(
        f"log-probabilities of sampled tokens are {difference:.2g} from those of the same tokens as a prompt",
        _RAW_LOGPROBS_CURE,
    )


async def _total_probability(target: Target) -> float | None:
    """The sum of the probabilities of the likeliest tokens at one position; None if the server reports none."""
    body = {
        "model": target.capabilities.model,
        "token_ids": target.text_prompt().token_ids,
        "sampling_params": {"max_tokens": 1, "temperature": 1.0, "logprobs": _TOP_LOGPROBS},
    }
    response = await target.post(GENERATE_PATH, body, "asking for the likeliest tokens")
    if response.status != 200:  # the server's --max-logprobs is smaller
        return None
    try:
        (position,) = response.json()["choices"][0]["logprobs"]["content"]
        return float(np.exp([each["logprob"] for each in position["top_logprobs"]]).sum())
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise MalformedResultError(response.name, f"likeliest tokens cannot be read: {error!r}") from error


async def aborting(target: Target) -> Finding:
    """Abort a long request by its id. A request that has ended by itself before that proves nothing."""
    prompt = target.text_prompt()
    room = target.capabilities.max_model_len - len(prompt.token_ids)
    for seconds in _ABORT_AFTER_SECONDS:
        finding = await _abort_after(target, prompt, room, seconds)
        if finding is not None:
            return finding
    return skipped(
        f"requests end by themselves before they can be aborted: they have room for {room} tokens",
        f"start `vllm serve` with a --max-model-len above {target.capabilities.max_model_len}",
    )


async def _abort_after(target: Target, prompt: RenderedTokens, room: int, seconds: float) -> Finding | None:
    """The finding of an abort after so many seconds; None if the request had ended by itself."""
    request_id = uuid.uuid4().hex
    body = {
        "model": target.capabilities.model,
        "request_id": request_id,
        "token_ids": prompt.token_ids,
        "sampling_params": {"max_tokens": room, "ignore_eos": True, "temperature": 1.0, "logprobs": 0},
    }
    running = asyncio.ensure_future(target.post(GENERATE_PATH, body, "a request to be aborted"))
    try:
        await asyncio.wait([running], timeout=seconds)
        if not running.done():
            await target.control.abort([request_id])
            await asyncio.wait([running], timeout=_GRACE_SECONDS)
        ended_at_once = running.done()
        response = await asyncio.wait_for(running, timeout=30)
    except TimeoutError:
        return failed("the request ran on for 30 s after it was aborted", _ABORT_CURE)
    finally:
        running.cancel()
    completion = completion_of(response, prompt, "an aborted request")
    count, reason = len(completion.token_ids), completion.finish_reason
    if reason is FinishReason.ABORT:
        return ok(f"a running request ended after {count} of {room} tokens")
    if ended_at_once and count == room:
        return None
    return failed(f"the request ended with the reason {reason} after {count} of {room} tokens", _ABORT_CURE)


_ABORT_CURE = (
    "the abort did not reach the process that runs the request: start `vllm serve` with --api-server-count 1, and give "
    "each server an address of its own"
)
