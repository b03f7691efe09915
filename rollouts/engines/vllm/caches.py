"""Pausing a vLLM server and emptying its caches, in the orders that do not kill it.

What the calls do to the caches of a server, measured with vLLM 0.32.0 (media: pixels by hash; encoder: the outputs of
the vision tower; prefix: the KV cache of prompts):

    call                                         media     encoder    prefix
    pause("abort"), pause("wait")                cleared   cleared    cleared
    pause("keep"), any with clear_cache=False    kept      kept       kept
    sleep(0)                                     kept      kept       kept
    sleep(1), sleep(2)                           cleared   cleared    cleared
    vLLM's reload_weights by itself              kept      half       kept
    reset_mm_cache                               cleared   kept       kept
    reset_encoder_cache                          kept      cleared    kept
    reset_prefix_cache                           kept      kept       cleared, unless requests hold blocks of it
    update_weight_version, abort, abort_all      kept      kept       kept

"Half": the workers drop entries that the scheduler still counts on, and the next request with a known image kills the
engine.

A request whose image lies in the part of its prompt that the prefix cache holds reaches the workers without pixels
(vLLM's `strip_covered_mm_data`). If the caches are cleared while the server still has that request (running, frozen by
"keep", or put back into the queue), the image has to be encoded again, without pixels, and the engine dies. (Model
runner V1 of vLLM 0.32 does this: on CPUs, and elsewhere where it is selected; a client cannot see which one runs.)
Therefore the caches of a server that takes media are emptied only after all its requests have ended.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from rollouts.engines.http.connection import ServerConnection
from rollouts.engines.vllm.capabilities import ServerCapabilities
from rollouts.engines.vllm.probe_requests import json_object
from rollouts.engines.vllm.server_state import ControlRoutes, ServerState, required_field
from rollouts.errors import EngineError, MalformedResultError, ServerError
from rollouts.values import check_choice

PauseMode = Literal["abort", "wait", "keep"]


class CacheControl:
    """Pauses a server and empties its caches; `ServerControl` documents the arguments."""

    def __init__(
        self,
        connection: ServerConnection,
        capabilities: Callable[[], Awaitable[ServerCapabilities]],
        *,
        forget_media: Callable[[], None] = lambda: None,
        on_weight_version: Callable[[str], None] = lambda version: None,
    ) -> None:
        self._connection = connection
        self._routes = ControlRoutes(connection, capabilities)
        self._state = ServerState(self._routes)
        self._forget_media = forget_media
        self._on_weight_version = on_weight_version

    @property
    def base_url(self) -> str:
        return self._connection.base_url

    # Pausing.

    async def pause(self, mode: PauseMode = "abort", *, clear_cache: bool | None = None) -> None:
        """Stop generating; returns once no request runs.

        Requests in flight end with the tokens that they have and finish reason "abort" (mode "abort"), are finished
        first ("wait"; this call takes as long), or stay and continue after `resume` ("keep"). New requests wait for
        `resume`, or get status 503 (vLLM 0.33).

        `clear_cache` empties the caches; by default "abort" and "wait" do and "keep" does not. On a server that takes
        media no request may be left while that happens: "wait" then ends the requests in the server's queue as "abort"
        does (a `VLLMEngine` continues them after `resume`), and "keep" with `clear_cache=True` raises
        `EngineError`. On a server of text alone, requests frozen by "keep" are computed again after `resume`.
        """
        check_choice("mode", mode, PauseMode)
        self._state.paused_by_update = False
        clears = mode != "keep" if clear_cache is None else clear_cache
        requests_remain = clears and mode != "abort" and await self._routes.takes_media()
        if requests_remain and mode == "keep":
            raise EngineError(
                "pause",
                'mode "keep" with clear_cache=True: after `resume` a frozen request with an image would have to encode '
                "it again, of which vLLM dies. Leave clear_cache out (the caches still belong to these weights), or "
                'use mode "abort", after which every VLLMEngine continues its completions',
            )
        with self._media_forgotten(clears):
            if requests_remain:
                await self._send_pause("wait", clear_cache=False)
                mode = "abort"  # ends what was preempted, and what arrived in the meantime
            await self._send_pause(mode, clear_cache=clears)

    async def resume(self) -> None:
        """Continue after `pause`. Refused while the server sleeps or holds weights that would kill it."""
        self._state.refuse_during_update("resume")
        await self._state.refuse_with_unusable_weights("resume")
        if (level := await self._state.sleep_level()) > 0:
            raise EngineError(
                "resume", f"the server sleeps (level {level}): it would run without its memory. Use wake_up"
            )
        await self._send_resume()

    async def is_paused(self) -> bool:
        """Whether the server generates nothing for now. True also while it sleeps."""
        response = await self._routes.call("GET", "/is_paused", "reading whether it is paused")
        if not isinstance(paused := required_field(response, "is_paused"), bool):
            raise MalformedResultError(response.name, f"`is_paused` is {paused!r}, not true or false")
        return paused

    # Caches.

    async def reset_prefix_cache(self, *, preempt: bool = False) -> None:
        """Empty the KV cache of prompts.

        While running requests hold blocks of it vLLM resets nothing: `ServerError`. `preempt` puts them back into the
        queue; they are computed again with the weights of that time. On a server that takes media that could kill it,
        and raises `EngineError` where any request runs.
        """
        preempts = preempt and not await self._routes.takes_media()
        response = await self._routes.call(
            "POST", "/reset_prefix_cache", "resetting the prefix cache", params={"reset_running_requests": preempts}
        )
        if response.body:
            done = json_object(response).get("success") is True
        else:  # up to vLLM 0.31, where running requests prevent the reset without an error
            done = preempts or (await self._routes.metrics()).running == 0
        if not done and preempt:
            raise EngineError(
                "reset_prefix_cache",
                "requests run, and one with an image, put back into the queue, has to encode the image again, of which "
                'vLLM dies. Use pause("abort"), which empties the caches too; every VLLMEngine continues its '
                "completions after resume()",
            )
        if not done:
            raise ServerError(
                "reset_prefix_cache",
                "the prefix cache was not reset, for requests hold blocks of it; pause first, or preempt=True",
                status=response.status,
                body=response.body[:200].decode(errors="replace"),
            )

    async def reset_mm_cache(self) -> None:
        """Empty the cache of pixels; each item is sent again on its next use."""
        with self._media_forgotten():
            await self._routes.call("POST", "/reset_mm_cache", "resetting the cache of media")

    async def reset_encoder_cache(self) -> None:
        """Empty the cache of the vision tower's outputs. Refused unless the server is paused: a running request may
        need an entry, and the server's count of running requests lags behind.
        """
        if not await self.is_paused():
            raise EngineError(
                "reset_encoder_cache", "running requests may need entries of the encoder cache; pause first"
            )
        await self._routes.call("POST", "/reset_encoder_cache", "resetting the encoder cache")

    async def _reset_all(self) -> None:
        await self.reset_prefix_cache(preempt=True)
        await self.reset_mm_cache()
        await self.reset_encoder_cache()

    async def _send_pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        """Pause without the precautions of `pause`."""
        await self._routes.call("POST", "/pause", "pausing", params={"mode": mode, "clear_cache": clear_cache})

    async def _send_resume(self) -> None:
        await self._routes.call("POST", "/resume", "resuming")
        self._state.paused_by_update = False

    @contextmanager
    def _media_forgotten(self, clears: bool = True) -> Iterator[None]:
        """Forget before and after the block which media the server holds, unless `clears` is false.

        Before, so that no media are sent by name meanwhile; after, because a request that ran beside the block may have
        recorded some.
        """
        if clears:
            self._forget_media()
        try:
            yield
        finally:
            if clears:
                self._forget_media()
