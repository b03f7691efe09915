"""Checks of an SGLang server."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from renderers import TemplateRenderer
from rollouts.cli.doctor.generation_checks import SAME_COMPLETION, difference_from_prompt, max_logprob_difference
from rollouts.cli.doctor.mismatch_check import mismatch
from rollouts.cli.doctor.target import (
    REPORTED,
    Finding,
    Outcome,
    Target,
    absent,
    failed,
    fresh_image,
    ok,
    skipped,
    weights_dtype,
)
from rollouts.engines.http.connection import ServerConnection
from rollouts.engines.protocol import FinishReason
from rollouts.engines.sglang import SGLangControl, SGLangEngine
from rollouts.engines.sglang.capabilities import probe, server_info
from rollouts.engines.vllm.capabilities import release_of
from rollouts.engines.vllm.media_payload import MediaMode
from rollouts.errors import CapabilityError, MalformedResultError

#: The version whose wire format the tests know.
KNOWN_VERSION = (0, 5, 23)

# A request is aborted after this time.
_ABORT_AFTER_SECONDS = 0.3
_ABORTED_AFTER_SECONDS = 30.0

_WEIGHTS_CURE = (
    "the server has other weights, another config.json, another processor or another dtype than --model: start `sglang "
    "serve --model-path` from --model, without --quantization, --json-model-override-args and --load-format dummy"
)


@dataclass(frozen=True, eq=False)
class SGLangTarget(Target):
    """An SGLang server; `engine` and `server_side` are one engine, because it takes image files alone."""

    command: ClassVar[str] = "sglang serve"
    length_option: ClassVar[str] = "--context-length"

    engine: SGLangEngine
    control: SGLangControl
    capabilities: Any  # SGLangCapabilities

    @cached_property
    def image_mode(self) -> MediaMode:
        return "content_parts"


async def sglang_target(
    connection: ServerConnection, renderer: TemplateRenderer, directory: Path, **options: Any
) -> SGLangTarget:
    """`options` are those of the engine. Raises `EngineError`."""
    capabilities, server = await asyncio.gather(probe(connection), server_info(connection))
    dtype, source = str(server.get("dtype", "auto")), REPORTED
    if dtype == "auto":
        dtype, source = await weights_dtype(connection, directory)
    engine = SGLangEngine(connection.base_url, **options)
    return SGLangTarget(
        engine=engine,
        server_side=engine,
        control=engine.control,
        connection=connection,
        renderer=renderer,
        directory=directory,
        capabilities=capabilities,
        dtype=dtype,
        dtype_source=source,
    )


async def version(target: SGLangTarget) -> Finding:
    seen = f"SGLang {target.capabilities.version}"
    release = release_of(target.capabilities.version)
    if release is not None and release[:3] == KNOWN_VERSION:
        return ok(seen)
    known = ".".join(map(str, KNOWN_VERSION))
    return absent(
        f"{seen}: mmrollouts is tested with {known}",
        f"if other checks fail too, its wire format is another one: install {known}",
    )


async def vocabulary(target: SGLangTarget) -> Finding:
    """An id outside of the vocabulary ends the server, so that its size must be that of the model directory."""
    config: Mapping[str, Any] = target.config.get("text_config", target.config)
    size, expected = target.capabilities.vocab_size, config.get("vocab_size")
    if expected not in (None, size):
        return failed(
            f"the server has {size} tokens, config.json of --model {expected}",
            f"start `sglang serve --model-path {target.directory}`, or pass --model the directory that is served",
        )
    return ok(f"{size} tokens")


async def image_request(target: SGLangTarget) -> Finding:
    """The ids of a prompt with images must stay, and different images give different log-probabilities."""
    if not target.has_images:
        return skipped("no images are processed here: the renderer has no processor")
    prompts = [target.image_prompt(fresh_image()) for _ in range(2)]
    try:
        completions = [await target.sample(prompt) for prompt in prompts]
    except MalformedResultError as error:
        return failed(error.reason, "see the table of versions and models in docs/sglang.md")
    except CapabilityError as error:
        return absent(error.reason, "serve a model that takes images, with SGLang 0.5.23")
    difference = max_logprob_difference(*completions)
    if difference <= SAME_COMPLETION:
        return failed("two different images give exactly the same completion", _WEIGHTS_CURE)
    return ok(
        f"the ids of the prompt are those of the renderer, and two images give different completions (up to "
        f"{difference:.2g} apart)"
    )


async def logprobs(target: SGLangTarget) -> Finding:
    """Log-probabilities of sampled tokens must be those of the same tokens as a prompt, and of the model itself."""
    difference = await difference_from_prompt(target, temperature=1.0)
    seen = f"at most {difference:.2g} from those of the same tokens as a prompt"
    if difference > target.tolerance:
        return failed(
            seen,
            "the server computes prompts and completions differently: start `sglang serve` without --kv-cache-dtype, "
            "--speculative-algorithm and --quantization",
        )
    if target.capabilities.raw_logprobs is None:
        return skipped(f"{seen}; the likeliest tokens are equally likely, so that the effect of temperature is unknown")
    if not target.capabilities.raw_logprobs:
        return absent(
            f"{seen}, but after temperature: requests with another temperature than 0 and 1 are refused",
            "start the server with SGLANG_RETURN_ORIGINAL_LOGPROB=1 in its environment",
        )
    return ok(f"{seen}, and before temperature")


async def seeds(target: SGLangTarget) -> Finding:
    if target.capabilities.deterministic:
        return ok("the server takes seeds")
    return absent(
        "the server takes no seeds: completions cannot be repeated",
        "start `sglang serve` with --enable-deterministic-inference where they have to be",
    )


async def metrics(target: SGLangTarget) -> Finding:
    try:
        found = await target.control.metrics()
    except CapabilityError as error:
        return absent(error.reason, "reports of runs then have no load of the server")
    return ok(f"{len(found)} metrics")


async def aborting(target: SGLangTarget) -> Finding:
    """Abort a long request by its id."""
    prompt = target.text_prompt()
    room = target.capabilities.max_model_len - len(prompt.token_ids)
    long = target.request(prompt, max_tokens=room, temperature=1.0, extra={"ignore_eos": True})
    request = replace(long, request_id=uuid.uuid4().hex)
    running = asyncio.ensure_future(target.engine.generate(request))
    try:
        await asyncio.wait([running], timeout=_ABORT_AFTER_SECONDS)
        await target.engine.abort([request.request_id])
        (completion,) = (await asyncio.wait_for(running, _ABORTED_AFTER_SECONDS)).completions
    finally:
        running.cancel()
    count = len(completion.token_ids)
    if completion.finish_reason is FinishReason.ABORT and count:
        return ok(f"a running request ended after {count} of {room} tokens")
    return skipped(f"a request of {room} tokens ended by itself, or had none when it was aborted")


async def agreement(target: SGLangTarget, max_gigabytes: float) -> list[Finding]:
    findings = await mismatch(target, max_gigabytes=max_gigabytes)
    return [replace(each, cure=_WEIGHTS_CURE) if each.outcome is Outcome.FAILED else each for each in findings]


async def pause_and_resume(target: SGLangTarget) -> Finding:
    """Pause the server for a moment; requests in flight are kept."""
    try:
        await target.control.pause("keep")
        paused = not await target.control.health()
    finally:
        await target.control.resume()
    if not paused or not await target.control.health():
        return failed("the server accepted the request and did not pause or resume", "read its log")
    return ok("paused, with requests in flight kept, and resumed")
