"""Everything that a trainer does with a vLLM server except generating, without the calls that would kill the server."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Literal, get_args

from rollouts.engines.vllm.capabilities import ServerCapabilities
from rollouts.engines.vllm.control.caches import PauseMode, ServerCaches
from rollouts.engines.vllm.control.metrics import ServerMetrics
from rollouts.engines.vllm.control.routes import ControlRoutes, json_object, required_field
from rollouts.engines.vllm.control.server_state import ServerState
from rollouts.engines.vllm.control.weight_updates import WeightUpdates, log
from rollouts.engines.vllm.error_context import name_errors_after_method
from rollouts.engines.vllm.http.connection import ServerConnection
from rollouts.errors import InvalidRequestError, ServerTimeoutError, ServerUnreachableError, UnsafeControlError

MemoryTag = Literal["weights", "kv_cache"]

_HEALTH_SECONDS = 10.0

#: What the server puts before the id of a request. An abort without it gets status 200 and does nothing.
REQUEST_ID_PREFIX = "generate-tokens-"


class ServerControl:
    """The control calls of one server. Most of them need VLLM_SERVER_DEV_MODE=1 in the environment of the server.

    `forget_media` is called before and after every call that makes the server drop pixels; `on_weight_version` is
    called with each new label. All calls raise `CapabilityError` where the server has no such route, `ServerError`
    where it refuses, `UnsafeControlError` where the call would do damage and was not sent, and the errors of
    `ServerConnection.request`.
    """

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
        self._caches = ServerCaches(self._routes, forget_media)
        self._weights = WeightUpdates(self._routes, self._caches, self._state, on_weight_version)

    @property
    def base_url(self) -> str:
        return self._connection.base_url

    # Pausing.

    @name_errors_after_method
    async def pause(self, mode: PauseMode = "abort", *, clear_cache: bool | None = None) -> None:
        """Stop generating; returns once no request runs.

        Requests in flight end with the tokens that they have and finish reason "abort" (mode "abort"), are finished
        first ("wait"; this call takes as long), or stay and continue after `resume` ("keep"). New requests wait for
        `resume`, or get status 503 (vLLM 0.33).

        `clear_cache` empties the caches; by default "abort" and "wait" do and "keep" does not. On a server that takes
        media no request may be left while that happens: "wait" then ends the requests in the server's queue as "abort"
        does (a `VLLMEngine` continues them after `resume`), and "keep" with `clear_cache=True` raises
        `UnsafeControlError`. On a server of text alone, requests frozen by "keep" are computed again after `resume`.
        """
        await self._caches.pause(mode, clear_cache)

    @name_errors_after_method
    async def resume(self) -> None:
        """Continue after `pause`. Refused while the server sleeps or holds weights that would kill it."""
        self._state.refuse_during_update("resume")
        await self._state.refuse_with_unusable_weights("resume")
        if (level := await self._state.sleep_level()) > 0:
            raise UnsafeControlError(
                "resume", f"the server sleeps (level {level}): it would run without its memory. Use wake_up"
            )
        await self._caches.send_resume()

    @name_errors_after_method
    async def is_paused(self) -> bool:
        """Whether the server generates nothing for now. True also while it sleeps."""
        return await self._caches.is_paused()

    # Sleeping.

    @name_errors_after_method
    async def sleep(self, level: int = 1) -> None:
        """Abort what runs and free memory for others. Level 0 frees none and keeps the caches; 1 moves the weights to
        the host's memory; 2 drops the weights.

        Frees nothing on a CPU; elsewhere the server needs --enable-sleep-mode.
        """
        if level not in (0, 1, 2):
            raise InvalidRequestError("sleep", f"level is {level!r}, not 0, 1 or 2")
        self._state.refuse_during_update("sleep")
        if (current := await self._state.sleep_level()) > 0:
            raise UnsafeControlError("sleep", f"the server sleeps already (level {current}); wake it up first")
        with self._caches.media_forgotten(level > 0):
            await self._routes.call("POST", "/sleep", "putting it to sleep", params={"level": level})
        self._state.record_sleep(level)

    @name_errors_after_method
    async def wake_up(self, tags: Sequence[MemoryTag] | None = None) -> None:
        """Allocate memory again: all of it, or that of `tags`. Generation continues once all memory is back.

        After `sleep(2)` the server has no weights. Then only this order is allowed: `wake_up(["weights"])`,
        `reload_weights(...)`, `wake_up()`.
        """
        self._state.refuse_during_update("wake_up")
        await self._state.refuse_with_unusable_weights("wake_up")
        if unknown := [tag for tag in tags or () if tag not in get_args(MemoryTag)]:
            raise InvalidRequestError("wake_up", f"tag {unknown[0]!r} is not one of {', '.join(get_args(MemoryTag))}")
        if tags is None or set(tags) != {"weights"}:
            await self._state.refuse_with_dropped_weights("wake_up")
        query = "&".join(f"tags={tag}" for tag in tags or ())
        response = await self._routes.call("POST", f"/wake_up?{query}" if query else "/wake_up", "waking it up")
        awake = json_object(response).get("status", "awake") == "awake"
        self._state.record_wake_up(weights=tags is None or "weights" in tags, awake=awake)

    @name_errors_after_method
    async def is_sleeping(self) -> bool:
        """Whether memory is freed. False for a server that is only paused, where vLLM's own route returns true."""
        return await self._state.sleep_level() > 0

    # Caches.

    @name_errors_after_method
    async def reset_prefix_cache(self, *, preempt: bool = False) -> None:
        """Empty the KV cache of prompts.

        While running requests hold blocks of it vLLM resets nothing: `ServerError`. `preempt` puts them back into the
        queue; they are computed again with the weights of that time. On a server that takes media that could kill it,
        and raises `UnsafeControlError` where any request runs.
        """
        await self._caches.reset_prefix_cache(preempt)

    @name_errors_after_method
    async def reset_mm_cache(self) -> None:
        """Empty the cache of pixels; each item is sent again on its next use."""
        await self._caches.reset_mm_cache()

    @name_errors_after_method
    async def reset_encoder_cache(self) -> None:
        """Empty the cache of the vision tower's outputs. Refused unless the server is paused: a running request may
        need an entry, and the server's count of running requests lags behind.
        """
        await self._caches.reset_encoder_cache()

    # Ending requests.

    @name_errors_after_method
    async def abort(self, request_ids: Iterable[str]) -> None:
        """End requests by the ids of their `GenerateRequest`; each returns the tokens it has, finish reason "abort".

        The server does not report ids that it does not run. Needs no development mode.
        """
        served_ids = [f"{REQUEST_ID_PREFIX}{request_id}" for request_id in request_ids]
        if not served_ids:  # an empty list would end all requests
            return
        body = [json.dumps({"request_ids": served_ids}).encode()]
        for path in ("/inference/v1/abort_requests", "/abort_requests"):  # the second up to vLLM 0.31
            response = await self._connection.request("POST", path, name="abort", body=body, slot=False)
            if response.status not in (404, 405):
                break
        self._routes.checked(response, "/inference/v1/abort_requests", "aborting requests")

    @name_errors_after_method
    async def abort_all(self) -> int:
        """End every request of every client; returns their number."""
        response = await self._routes.call("POST", "/abort_requests", "aborting all requests", content={})
        return int(json_object(response).get("aborted", 0))

    # Weights.

    @name_errors_after_method
    async def reload_weights(self, directory: str | os.PathLike[str], *, check: bool = True) -> None:
        """Load a checkpoint of the same model into a paused server, and empty every cache.

        The server reads the directory itself. `check` first checks the files from this process, which needs the same
        file system here; without it (the server is elsewhere, or loads another format) a wrong directory leaves a
        server that has to be restarted. Where the server takes media, requests that a pause has left in it ("keep") end
        first, as by "abort"; a `VLLMEngine` continues them after `resume`. Raises `WeightUpdateError`: nothing was
        changed, or the text says what was; `UnsafeControlError` if the server is not paused, or sleeps and its weights
        have no memory.
        """
        await self._weights.reload(directory, check)

    @name_errors_after_method
    async def update_weight_version(self, version: str) -> None:
        """Label tokens sampled from now on. Servers that keep no label (before vLLM 0.29): on this side only."""
        await self._weights.set_version(version)

    @name_errors_after_method
    async def weight_version(self) -> str:
        """The label of the weights that the server has ("default" until one is set)."""
        response = await self._routes.call("GET", "/weight_info", "reading the weight version")
        return str(required_field(response, "weight_version"))

    @name_errors_after_method
    async def update_weights_from_directory(
        self, directory: str | os.PathLike[str], version: str, in_flight: PauseMode = "abort", *, check: bool = True
    ) -> None:
        """A complete weight update: pause, load, empty every cache, label, resume.

        `in_flight` decides about running requests: "abort" ends them and every `VLLMEngine` continues its own from the
        tokens that they have, with the new weights; "wait" finishes them with the old ones; "keep" leaves them in the
        server, which computes them again and continues with the new weights. A server that takes media would die of
        that: there "keep" does the same as "abort". Cached results of the old weights are never used with the new
        ones. A server that was paused before stays paused.

        Raises `WeightUpdateError` where the weights are not those of `directory` afterwards; its text says which they
        are and whether the server runs. A cancelled call still completes the update before it raises `CancelledError`.
        """
        update = self._weights.update("update_weights_from_directory", directory, version, in_flight, check)
        task = asyncio.ensure_future(update)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait([task])
            if not task.cancelled() and (error := task.exception()) is not None:
                log.warning("a cancelled update of the weights failed: %s", error)
            raise

    @name_errors_after_method
    async def world_size(self) -> int:
        """How many workers (GPUs) the model is spread over, data parallelism included."""
        response = await self._routes.call("GET", "/get_world_size", "reading the world size")
        return int(required_field(response, "world_size"))

    # Monitoring.

    @name_errors_after_method
    async def health(self) -> bool:
        """Whether the server responds and its engine lives. True also with weights that a failed reload has broken."""
        try:
            response = await self._connection.request(
                "GET", "/health", name="health", seconds=_HEALTH_SECONDS, retry=False, slot=False
            )
        except (ServerUnreachableError, ServerTimeoutError):
            return False
        return response.status == 200

    @name_errors_after_method
    async def load(self) -> int:
        """Requests that the HTTP server is processing; 0 unless it was started with --enable-server-load-tracking."""
        response = await self._routes.request("GET", "/load")
        return int(required_field(self._routes.checked(response, "/load", "reading the load"), "server_load"))

    @name_errors_after_method
    async def metrics(self) -> ServerMetrics:
        """Every counter and gauge of the server."""
        return await self._routes.metrics()
