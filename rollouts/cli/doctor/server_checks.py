"""Version, options and state of the server."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from renderers.messages import PLURALS, Modality
from rollouts.cli.doctor.target import SAMPLED_TOKENS, Finding, Target, absent, failed, ok, skipped
from rollouts.engines.vllm.capabilities import release_of

# The oldest and the newest version whose wire format is known, from their sources or from tests.
_KNOWN_VERSIONS = {"vLLM": ((0, 31), (0, 33)), "SGLang": ((0, 5, 23), (0, 5, 23))}


async def reachable(target: Target) -> Finding:
    response = await target.connection.request("GET", "/health", name="asking for its health")
    if response.status != 200:
        cure = f"read its log, then start `{target.command}` again"
        return failed(f"/health answers {response.status}: the server's engine is dead", cure)
    return ok(target.connection.base_url)


async def version(target: Target) -> Finding:
    reported, frontend = target.capabilities.version, target.rust_frontend
    seen = f"{target.kind} {reported}" + (f" behind its Rust frontend {frontend}" if frontend else "")
    release = release_of(reported)
    oldest, newest = _KNOWN_VERSIONS[target.kind]
    if release is not None and oldest <= release[: len(oldest)] <= newest:
        return ok(seen)
    known = " to ".join(".".join(map(str, each)) for each in dict.fromkeys((oldest, newest)))
    return absent(
        f"{seen}: none of the versions that mmrollouts knows, {known}",
        "if other checks fail too, its wire format is another one: update mmrollouts, or serve with one "
        "of these versions",
    )


async def served_model(target: Target) -> Finding:
    """Compare the token limit with the longest request of the checks."""
    limit = target.capabilities.max_model_len
    seen = f"{target.capabilities.model}, {limit} tokens"
    sees = "image" in target.renderer.processors
    prompt = await asyncio.to_thread(target.media_prompt, "image") if sees else target.text_prompt()
    needed = len(prompt.token_ids) + SAMPLED_TOKENS
    if limit < needed:
        option = "--max-model-len" if target.kind == "vLLM" else "--context-length"
        return failed(
            f"{seen}: a short prompt, with an image if the model takes images, and its completion take {needed}",
            # 8,192 tokens have room for a conversation.
            f"start `{target.command}` with {option} {max(needed, 8192)}, or what the model allows",
        )
    return ok(seen)


async def media(target: Target) -> Finding | list[Finding]:
    """One finding for all that is not checked because the renderer has no processor for it; none if nothing is."""
    processors = target.renderer.processors
    parts: dict[Modality, str] = {"image": "vision_config", "audio": "audio_config"}
    none = [
        each for each, part in parts.items() if each not in processors and (part in target.config or not processors)
    ]
    missing = " and ".join(PLURALS[each] for each in none)
    return skipped(f"no {missing} are checked: the renderer of --model has no processor for them") if none else []


async def vocabulary(target: Target) -> Finding:
    """An id outside of the vocabulary ends SGLang, so that its size must be that of the model directory."""
    config: Mapping[str, Any] = target.config.get("text_config", target.config)
    size, expected = target.capabilities.vocab_size, config.get("vocab_size")
    if expected not in (None, size):
        return failed(
            f"the server has {size} tokens, config.json of --model {expected}",
            f"start `sglang serve --model-path {target.directory}`, or pass --model the directory that is served",
        )
    return ok(f"{size} tokens")


async def scale_out(target: Target) -> Finding:
    if target.capabilities.scale_out:
        return ok("/inference/v1/generate answers")
    return failed(
        "/inference/v1/generate does not answer: rollouts and most of the checks are impossible",
        "start `vllm serve` with --enable-scale-out",
    )


async def control_routes(target: Target) -> Finding:
    """Weights are updated through these routes. A paused server answers all requests except those to generate."""
    if not target.capabilities.control:
        return absent(
            "no pause, resume or weight reloading",
            "start the server with VLLM_SERVER_DEV_MODE=1 if weights are to be updated in it; never on an open network",
        )
    url = target.connection.base_url
    if await target.engine.control.is_sleeping():
        return failed("the server is asleep: requests wait until it is woken up", f"curl -X POST {url}/wake_up")
    if await target.engine.control.is_paused():
        return failed("the server is paused: requests wait until it is resumed", f"curl -X POST {url}/resume")
    return ok("pause, resume, sleep and weight reloading are on; neither paused nor asleep")
