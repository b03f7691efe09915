"""What the server generates: log-probabilities, aborted requests, images, and images from its cache."""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import replace
from typing import Any

import numpy as np

from renderers import RenderedTokens
from rollouts.cli.doctor.image_rendering_checks import rendered_pixels
from rollouts.cli.doctor.target import GENERATE_PATH, Finding, Target, completion_of, failed, fresh_image, ok, skipped
from rollouts.engines.protocol import Completion, FinishReason
from rollouts.errors import CapabilityError, MalformedResultError, MissingLogProbsError

# A request is aborted after the first delay; if it has ended by then, another one is aborted after the next delay.
_ABORT_AFTER_SECONDS = (0.5, 0.1, 0.02)
# A request that ends so soon after the abort may have ended by itself.
_GRACE_SECONDS = 0.1
# The largest number of log-probabilities at one position that vLLM reports by default.
_TOP_LOGPROBS = 20

#: The largest difference between log-probabilities of media that a server does not look at.
SAME_COMPLETION = 1e-6

_RAW_LOGPROBS_CURE = "start `vllm serve` with --logprobs-mode raw_logprobs: training needs the model's own"
_ABORT_CURE = (
    "the abort did not reach the process that runs the request: start `vllm serve` with --api-server-count 1, and give "
    "each server an address of its own"
)


async def text_request(target: Target) -> Finding:
    started = time.perf_counter()
    try:
        completion = await target.sample(target.text_prompt())
    except MissingLogProbsError as error:
        return failed(str(error), _RAW_LOGPROBS_CURE)
    seconds = time.perf_counter() - started
    return ok(f"{len(completion.token_ids)} tokens with log-probabilities in {seconds * 1000:.0f} ms")


async def logprobs_mode(target: Target) -> Finding:
    """Log-probabilities must be the model's own: before temperature and top-k, and not logits."""
    if (total := await _total_probability(target)) is not None and total > 1.01:
        return failed(f"the probabilities of one token's alternatives add up to {total:.3g}", _RAW_LOGPROBS_CURE)
    difference = await difference_from_prompt(target, temperature=0.5, top_k=2)
    if difference <= target.tolerance:
        return ok(
            f"raw, before temperature and top-k (at most {difference:.2g} from those of the same tokens as a prompt)"
        )
    seen = f"log-probabilities of sampled tokens are {difference:.2g} from those of the same tokens as a prompt"
    plain = await difference_from_prompt(target, temperature=1.0)
    if plain <= target.tolerance:
        return failed(seen, _RAW_LOGPROBS_CURE)
    return failed(
        f"{seen}, and without temperature and top-k {plain:.2g}",
        "the server computes prompts and completions differently: start `vllm serve` without --kv-cache-dtype, "
        "--speculative-config and --quantization",
    )


async def difference_from_prompt(target: Target, **sampling: Any) -> float:
    """The largest difference between log-probabilities of sampled tokens and of the same tokens as a prompt."""
    rendered = target.text_prompt()
    sampled = await target.sample(rendered, seed=0, **sampling)
    ids = sampled.token_ids.tolist()
    prompt_ids = [*rendered.token_ids, *ids]
    scoring = replace(
        target.request(rendered, max_tokens=1),
        prompt_ids=prompt_ids,
        sampled=[(len(rendered.token_ids), len(prompt_ids))],  # where an image token is text
        prompt_logprobs=True,
    )
    scored = (await target.engine.generate(scoring)).prompt_logprobs
    assert scored is not None
    return float(np.abs(sampled.logprobs - scored[-len(ids) :]).max())


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
            try:
                await target.control.abort([request_id])
            except CapabilityError:  # the Rust frontend, outside development mode
                running.cancel()
                return await _ended_with_its_connection(target)
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


async def _ended_with_its_connection(target: Target) -> Finding:
    """Whether the server runs no request after the connection of the only one was closed."""
    try:
        async with asyncio.timeout(30):
            while (await target.control.metrics()).running:  # noqa: ASYNC110 the state of a server
                await asyncio.sleep(_GRACE_SECONDS)
    except TimeoutError:
        return failed("requests run 30 s after the connection of one was closed", _ABORT_CURE)
    return ok("a running request ended when its connection was closed; an abort by id needs VLLM_SERVER_DEV_MODE=1")


# Images.


async def image_request(target: Target) -> Finding:
    """Two different images must give different log-probabilities."""
    first, second = target.image_prompt(fresh_image()), target.image_prompt(fresh_image())
    difference = max_logprob_difference(await target.sample(first), await target.sample(second))
    if difference > SAME_COMPLETION:
        return ok(f"two images give different completions (log-probabilities differ by up to {difference:.2g})")
    return failed(
        "two different images give exactly the same completion: the server ignores images",
        await _blind_cure(target, first, second),
    )


_BLIND_MODEL_CURE = (
    "the weights that are served do not look at images: start `vllm serve` from a trained checkpoint, without "
    "--load-format dummy (`mismatch, image` tells whether the weights of --model look at images in transformers)"
)


async def _blind_cure(target: Target, first: RenderedTokens, second: RenderedTokens) -> str:
    """The cure where two images give one completion: whether the server sees the images if it gets their files."""
    if target.image_mode == "content_parts":
        return _BLIND_MODEL_CURE
    if target.no_server_side(first) is not None:
        return (
            f"features may be normalised twice: leave pixel_dtype out of ExpectedCapabilities; or {_BLIND_MODEL_CURE}"
        )
    completions = [await target.sample(each, engine=target.server_side) for each in (first, second)]
    if max_logprob_difference(*completions) > SAME_COMPLETION:
        return 'send files, which the server sees: VLLMEngine(media="content_parts"); features may be normalised twice'
    return _BLIND_MODEL_CURE


async def image_pixels(target: Target) -> Finding:
    """The engine's pixels must give the log-probabilities that the server's own processing of the same file gives."""
    if target.image_mode != "features":
        return await rendered_pixels(target)
    rendered = target.image_prompt(fresh_image())
    if (reason := target.no_server_side(rendered)) is not None:
        return skipped(f"nothing to compare with: {reason}")
    difference = max_logprob_difference(
        await target.sample(rendered), await target.sample(rendered, engine=target.server_side)
    )
    if difference <= target.tolerance:
        return ok(f"log-probabilities equal those after the server's own processing (at most {difference:.2g} apart)")
    return failed(
        f"log-probabilities are up to {difference:.2g} from those after the server's own processing of the same file",
        'send files: VLLMEngine(media="content_parts")',
    )


async def image_cache(target: Target) -> Finding:
    """An image that the server has seen must be found by its hash alone."""
    if (missing := target.lacks("takes no image by its name alone: its data are sent with every request")) is not None:
        return missing
    rendered = target.image_prompt(fresh_image())
    first = await target.sample(rendered)
    request = target.request(rendered)
    payload = target.image_payload(request)
    response = await target.post_hashes_only(request, payload)
    if response.status != 200 and payload.is_cache_miss(response.status, response.body.decode(errors="replace")):
        return failed(
            "an image that was just sent is not found by its hash: every request has to carry the data of its images",
            "start `vllm serve` without --mm-processor-cache-gb 0, and with --api-server-count 1: each API server has "
            "a cache of its own",
        )
    difference = max_logprob_difference(first, completion_of(response, rendered, "a request with known media"))
    if difference <= target.tolerance:
        return ok(f"an image sent as its hash alone gives the same completion (at most {difference:.2g} apart)")
    return failed(
        f"the same image sent as its hash alone gives log-probabilities {difference:.2g} from those of the first time",
        "the server's cache mixes up images: stop `vllm serve` and start it again",
    )


async def unknown_image(target: Target) -> Finding:
    """A hash that the server does not know must be refused in the way on which sending the image again relies."""
    if (missing := target.lacks("takes no image by its name alone")) is not None:
        return missing
    request = target.request(target.image_prompt(fresh_image()), max_tokens=1)
    payload = target.image_payload(request)
    response = await target.post_hashes_only(request, payload)
    version = target.capabilities.version
    if await target.health() != 200:
        return failed(
            "an unknown image hash has ended the server's engine",
            f"start `vllm serve` again, after pip install --upgrade vllm (this is {version})",
        )
    if response.status == 200:
        return failed(
            "the server answers a request about an image that it never received",
            f"pip install --upgrade vllm (this is {version}): its completions cannot be trusted",
        )
    if payload.is_cache_miss(response.status, response.body.decode(errors="replace")):
        return ok(f"an unknown hash is refused with {response.status}, and the server lives: images are resent")
    return failed(
        f"an unknown hash is answered with {response.status}, which does not say that the image has to be resent",
        "update mmrollouts: this version of vLLM reports a cache miss in another way",
    )


def max_logprob_difference(first: Completion, second: Completion) -> float:
    """The largest difference of log-probabilities, up to and including the first token that differs."""
    count = min(len(first.token_ids), len(second.token_ids))
    differing = np.flatnonzero(first.token_ids[:count] != second.token_ids[:count])
    if len(differing):
        count = int(differing[0]) + 1
    return float(np.abs(first.logprobs[:count] - second.logprobs[:count]).max())
