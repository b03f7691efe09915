"""What the server samples: log-probabilities, pictures, its cache, and aborting."""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import replace

import numpy as np

from renderers import MultiModalData, RenderedTokens
from rollouts.doctor.finding import Finding, failed, ok, skipped
from rollouts.doctor.patient import Patient, Sampled, fresh_picture, sampled_in
from rollouts.engines.vllm.control import SERVER_PREFIX

_ABORT_AFTER_SECONDS = 0.5
_GENERATE = "/inference/v1/generate"


async def text_request(patient: Patient) -> Finding:
    started = time.perf_counter()
    completion = await patient.sample(patient.text_prompt())
    seconds = time.perf_counter() - started
    count = len(completion.token_ids)
    return ok("text request", f"{count} tokens with log-probabilities in {seconds * 1000:.0f} ms")


async def picture_request(patient: Patient) -> list[Finding]:
    """Two pictures must not answer alike, and ours must answer as the server's own processing of the same file."""
    if not patient.takes_pictures:
        return [skipped("image request", "the server or the model takes no pictures")]
    first, second = patient.picture_prompt(fresh_picture()), patient.picture_prompt(fresh_picture())
    answer = await patient.sample(first)
    apart = _apart(answer, await patient.sample(second))
    return [_different_pictures(patient, apart), await _as_the_server_sees(patient, first, answer)]


def _different_pictures(patient: Patient, apart: float) -> Finding:
    if apart > 1e-6:
        return ok("image request", f"two pictures answer differently (log-probabilities up to {apart:.2g} apart)")
    return failed(
        "image request",
        "two different pictures answer alike to the last bit: the server does not look at them",
        "the pixels may be normalised twice: their dtype must be what the server wants (pixel dtype, above)",
    )


async def _as_the_server_sees(patient: Patient, rendered: RenderedTokens, answer: Sampled) -> Finding:
    check = "image pixels"
    if not patient.capabilities.content_parts:
        return skipped(check, "this version takes no `content_parts` to compare with")
    apart = _apart(answer, await patient.sample(rendered, engine=patient.server_side))
    if apart <= patient.tolerance:
        return ok(check, f"answer as the server's own processing of the file (at most {apart:.2g} apart)")
    return failed(
        check,
        f"log-probabilities are up to {apart:.2g} from those after the server's own processing of the same file",
        "pixels or their dtype are not what the server wants; see image features, above",
    )


async def cache(patient: Patient) -> list[Finding]:
    """Known pictures go without data; unknown ones are refused in the way that resending relies on."""
    if not patient.takes_pictures:
        return [skipped("image cache", "the server or the model takes no pictures")]
    rendered = patient.picture_prompt(fresh_picture())
    media = rendered.multi_modal_data
    assert media is not None
    answer = await patient.sample(rendered)
    reply = await patient.post_features(rendered.token_ids, media, salt=uuid.uuid4().hex)
    if reply.status == 500:
        by_hash = failed(
            "image cache",
            "a picture that was just shown is not found by its hash: every request has to carry it",
            "do not start the server with --mm-processor-cache-gb 0; with several API servers each has its own cache",
        )
    else:
        apart = _apart(answer, sampled_in(reply, "a request with known media"))
        by_hash = (
            ok("image cache", f"a picture shown by hash alone answers as the first time (at most {apart:.2g} apart)")
            if apart <= patient.tolerance
            else failed(
                "image cache",
                f"the same picture by hash alone answers {apart:.2g} from the first time",
                "the server's cache mixes up pictures: restart it",
            )
        )
    return [by_hash, await _unknown_picture(patient, rendered.token_ids, media)]


async def _unknown_picture(patient: Patient, token_ids: list[int], media: MultiModalData) -> Finding:
    check = "cache miss"
    renamed = MultiModalData.from_items(
        (replace(item, mm_hash=f"doctor-{uuid.uuid4().hex}"), where) for item, where in media.placed()
    )
    reply = await patient.post_features(token_ids, renamed, salt=uuid.uuid4().hex, max_tokens=1)
    health = await patient.connection.request("GET", "/health", name="asking for its health")
    if health.status != 200:
        return failed(check, "a picture that it does not know took the server down", "upgrade vLLM, restart the server")
    if reply.status == 500:
        return ok(check, "an unknown hash is refused with 500, and the server lives: pictures are sent again then")
    if reply.status == 200:
        return failed(check, "the server answers about a picture that it never saw", "do not use it: upgrade vLLM")
    return failed(
        check,
        f"an unknown hash is answered with {reply.status}, not with 500, so pictures are not sent again",
        "this version tells a cache miss in another way: upgrade mmrollouts",
    )


async def logprobs_mode(patient: Patient) -> Finding:
    """Whether reported log-probabilities are the model's, before temperature and top-k.

    Tokens are sampled at temperature 0.5 among the best two; then the same tokens are scored as a prompt, which is
    always raw. Where they were processed, the reported ones are higher.
    """
    check = "log-probabilities"
    rendered = patient.text_prompt()
    sampled = await patient.sample(rendered, temperature=0.5, top_k=2, seed=0)
    ids = sampled.token_ids.tolist()
    scoring = replace(
        patient.request(rendered, max_tokens=1), prompt_ids=[*rendered.token_ids, *ids], prompt_logprobs=True
    )
    scored = (await patient.engine.generate(scoring)).prompt_logprobs
    assert scored is not None
    apart = float(np.abs(sampled.logprobs - scored[-len(ids) :]).max())
    if apart <= patient.tolerance:
        return ok(check, f"raw, before temperature and top-k (at most {apart:.2g} from a second scoring)")
    return failed(
        check,
        f"sampled tokens are reported {apart:.2g} from what the model gives them as a prompt",
        "start the server with --logprobs-mode raw_logprobs: training needs the model's own",
    )


async def aborting(patient: Patient) -> Finding:
    """A long request, ended by its name."""
    rendered = patient.text_prompt()
    request_id = uuid.uuid4().hex
    room = patient.capabilities.max_model_len - len(rendered.token_ids)
    body = {
        "model": patient.capabilities.model,
        "request_id": request_id,
        "token_ids": rendered.token_ids,
        "sampling_params": {"max_tokens": room, "ignore_eos": True, "temperature": 1.0, "logprobs": 0},
    }
    running = asyncio.ensure_future(patient.post(_GENERATE, body, "a request to be aborted"))
    try:
        await asyncio.sleep(_ABORT_AFTER_SECONDS)
        name = f"{SERVER_PREFIX}{request_id}"
        await patient.post("/inference/v1/abort_requests", {"request_ids": [name]}, "aborting a request")
        reply = await asyncio.wait_for(running, timeout=30)
    except TimeoutError:
        return failed("abort", "the request ran on for 30 s after it was aborted", _ABORT_CURE)
    finally:
        running.cancel()
    count = len(sampled_in(reply, "an aborted request").token_ids)
    reason = reply.json()["choices"][0].get("finish_reason")
    if reason == "abort":
        return ok("abort", f"a running request ended after {count} of {room} tokens")
    return failed("abort", f"the request ended by {reason} after {count} of {room} tokens", _ABORT_CURE)


_ABORT_CURE = "cancelled rollouts keep the server busy until they end: set small max_tokens, or upgrade vLLM"


def _apart(first: Sampled, second: Sampled) -> float:
    """The largest difference of log-probabilities up to the first token that differs, where each has its own."""
    count = min(len(first.token_ids), len(second.token_ids))
    differing = np.flatnonzero(first.token_ids[:count] != second.token_ids[:count])
    if len(differing):
        count = int(differing[0]) + 1
    return float(np.abs(first.logprobs[:count] - second.logprobs[:count]).max())
