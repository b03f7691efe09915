"""What the server samples: its log-probabilities, and aborting."""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import replace

import numpy as np

from rollouts.cli.doctor.finding import Finding, failed, ok, skipped
from rollouts.cli.doctor.target import GENERATE, Patient, sampled_in
from rollouts.engines.vllm.http.response import HttpResponse
from rollouts.errors import MalformedResultError, MissingLogProbsError

# After so long a request is aborted; where it has ended by itself until then, another one is, sooner.
_ABORT_AFTER_SECONDS = (0.5, 0.1, 0.02)
# A request that ends by itself so soon after the abort may have crossed it.
_CROSSING_SECONDS = 0.1
# As many tokens at a place as vLLM reports by default.
_MOST_LIKELY = 20

_RAW_LOGPROBS = "start `vllm serve` with --logprobs-mode raw_logprobs: training needs the model's own"


async def text_request(patient: Patient) -> Finding:
    check = "text request"
    started = time.perf_counter()
    try:
        completion = await patient.sample(patient.text_prompt())
    except (MalformedResultError, MissingLogProbsError) as error:
        return failed(check, str(error), _RAW_LOGPROBS)
    seconds = time.perf_counter() - started
    return ok(check, f"{len(completion.token_ids)} tokens with log-probabilities in {seconds * 1000:.0f} ms")


async def logprobs_mode(patient: Patient) -> Finding:
    """Log-probabilities must be the model's own: before temperature and top-k, and no logits."""
    check = "log-probabilities"
    if (total := await _total_probability(patient)) is not None and total > 1.01:
        return failed(check, f"the probabilities of one token's alternatives add up to {total:.3g}", _RAW_LOGPROBS)
    rendered = patient.text_prompt()
    sampled = await patient.sample(rendered, temperature=0.5, top_k=2, seed=0)
    ids = sampled.token_ids.tolist()
    scoring = replace(
        patient.request(rendered, max_tokens=1), prompt_ids=[*rendered.token_ids, *ids], prompt_logprobs=True
    )
    scored = (await patient.engine.generate(scoring)).prompt_logprobs
    assert scored is not None
    difference = float(np.abs(sampled.logprobs - scored[-len(ids) :]).max())
    if difference <= patient.tolerance:
        return ok(check, f"raw, before temperature and top-k (at most {difference:.2g} from a second scoring)")
    return failed(
        check, f"sampled tokens are reported {difference:.2g} from what the model gives them as a prompt", _RAW_LOGPROBS
    )


async def _total_probability(patient: Patient) -> float | None:
    """What the likeliest tokens at one place have together, by the server's numbers; None where it does not tell."""
    body = {
        "model": patient.capabilities.model,
        "token_ids": patient.text_prompt().token_ids,
        "sampling_params": {"max_tokens": 1, "temperature": 1.0, "logprobs": _MOST_LIKELY},
    }
    reply = await patient.post(GENERATE, body, "asking for the likeliest tokens")
    if reply.status != 200:  # --max-logprobs allows fewer
        return None
    try:
        (place,) = reply.json()["choices"][0]["logprobs"]["content"]
        return float(np.exp([each["logprob"] for each in place["top_logprobs"]]).sum())
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise MalformedResultError(reply.name, f"likeliest tokens cannot be read: {error!r}") from error


async def aborting(patient: Patient) -> Finding:
    """A long request, ended by its name; one that ends by itself before shows nothing."""
    room = patient.capabilities.max_model_len - len(patient.text_prompt().token_ids)
    for seconds in _ABORT_AFTER_SECONDS:
        found = await _aborted(patient, room, seconds)
        if found is not None:
            return found
    return skipped(
        "abort",
        f"requests end by themselves before they can be aborted: there is room for {room} tokens",
        f"start `vllm serve` with a --max-model-len beyond {patient.capabilities.max_model_len}",
    )


async def _aborted(patient: Patient, room: int, seconds: float) -> Finding | None:
    """What an abort after so many seconds did; None where the request had ended by itself."""
    request_id = uuid.uuid4().hex
    body = {
        "model": patient.capabilities.model,
        "request_id": request_id,
        "token_ids": patient.text_prompt().token_ids,
        "sampling_params": {"max_tokens": room, "ignore_eos": True, "temperature": 1.0, "logprobs": 0},
    }
    running = asyncio.ensure_future(patient.post(GENERATE, body, "a request to be aborted"))
    try:
        await asyncio.wait([running], timeout=seconds)
        if not running.done():
            await patient.control.abort([request_id])
            await asyncio.wait([running], timeout=_CROSSING_SECONDS)
        crossed = running.done()
        reply = await asyncio.wait_for(running, timeout=30)
    except TimeoutError:
        return failed("abort", "the request ran on for 30 s after it was aborted", _ABORT_CURE)
    finally:
        running.cancel()
    return _abort_finding(reply, room, crossed=crossed)


def _abort_finding(reply: HttpResponse, room: int, *, crossed: bool) -> Finding | None:
    count = len(sampled_in(reply, "an aborted request").token_ids)
    reason = reply.json()["choices"][0].get("finish_reason")
    if reason == "abort":
        return ok("abort", f"a running request ended after {count} of {room} tokens")
    if crossed and count == room:
        return None
    return failed("abort", f"the request ended by {reason} after {count} of {room} tokens", _ABORT_CURE)


_ABORT_CURE = (
    "the abort did not reach the process that runs the request: start `vllm serve` with --api-server-count 1, and give "
    "each server an address of its own"
)
