"""Version, options and state of the server."""

import asyncio
from collections.abc import Mapping
from typing import Any

from rollouts.cli.doctor.target import SAMPLED_TOKENS, Finding, Target
from rollouts.engines.vllm.capabilities import release_of

# The oldest and the newest version whose wire format is known, from their sources or from tests.
_KNOWN_VERSIONS = {"vllm": ((0, 31), (0, 33)), "sglang": ((0, 5, 23), (0, 5, 23))}


async def server(target: Target) -> Finding:
    """Whether it lives, and whether its version is a known one."""
    response = await target.connection.request("GET", "/health", name="asking for its health")
    if response.status != 200:
        cure = f"read its log, then start `{target.kind} serve` again"
        return Finding("failed", f"/health answers {response.status}: the server's engine is dead", cure)
    capabilities = target.capabilities
    seen = f"{target.connection.base_url}, {capabilities.engine} {capabilities.version}"
    if target.kind == "vllm" and capabilities.rust_frontend is not None:
        seen += f" behind its Rust frontend {capabilities.rust_frontend}"
    release = release_of(capabilities.version)
    oldest, newest = _KNOWN_VERSIONS[target.kind]
    if release is not None and oldest <= release[: len(oldest)] <= newest:
        return Finding("ok", seen)
    known = " to ".join(".".join(map(str, each)) for each in dict.fromkeys((oldest, newest)))
    return Finding(
        "absent",
        f"{seen}: none of the versions that mmrollouts knows, {known}",
        "if other checks fail too, its wire format is another one: update mmrollouts, or serve with one "
        "of these versions",
    )


async def served_model(target: Target) -> Finding:
    """Compare the token limit with the longest request of the checks."""
    limit = target.capabilities.max_model_len
    seen = f"{target.capabilities.model}, {limit} tokens"
    request = await asyncio.to_thread(target.request, "image" if "image" in target.renderer.processors else None)
    needed = len(request.prompt_ids) + SAMPLED_TOKENS
    if limit >= needed:
        return Finding("ok", seen)
    option = "--max-model-len" if target.kind == "vllm" else "--context-length"
    return Finding(
        "failed",
        f"{seen}: a short prompt, with an image if the model takes images, and its completion take {needed}",
        # 8,192 tokens have room for a conversation.
        f"start `{target.kind} serve` with {option} {max(needed, 8192)}, or what the model allows",
    )


async def vocabulary(target: Target) -> Finding:
    """An id outside of the vocabulary ends SGLang, so that its size must be that of the model directory."""
    config: Mapping[str, Any] = target.config.get("text_config", target.config)
    size, expected = target.capabilities.vocab_size, config.get("vocab_size")
    if expected in (None, size):
        return Finding("ok", f"{size} tokens")
    return Finding(
        "failed",
        f"the server has {size} tokens, config.json of --model {expected}",
        f"start `sglang serve --model-path {target.directory}`, or pass --model the directory that is served",
    )


async def scale_out(target: Target) -> Finding:
    if target.capabilities.scale_out:
        return Finding("ok", "/inference/v1/generate answers")
    return Finding(
        "failed",
        "/inference/v1/generate does not answer: rollouts and most of the checks are impossible",
        "start `vllm serve` with --enable-scale-out",
    )


async def control_routes(target: Target) -> Finding:
    """Weights are updated through these routes. A paused server answers all requests except those to generate."""
    if not target.capabilities.control:
        return Finding(
            "absent",
            "no pause, resume or weight reloading",
            "start the server with VLLM_SERVER_DEV_MODE=1 if weights are to be updated in it; never on an open network",
        )
    control = target.engine.control
    if not await control.is_paused():
        return Finding("ok", "pause, resume, sleep and weight reloading are on; neither paused nor asleep")
    state, route = ("asleep", "/wake_up") if await control.is_sleeping() else ("paused", "/resume")
    cure = f"curl -X POST {target.connection.base_url}{route}"
    return Finding("failed", f"the server is {state}: requests wait until that ends", cure)
