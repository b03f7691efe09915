"""Everything that a trainer does with a vLLM server except generating, without the calls that would kill the server."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Literal, get_args

from rollouts.engines.http.error_context import name_errors_after_methods
from rollouts.engines.http.health import HealthControl
from rollouts.engines.http.responses import HttpResponse
from rollouts.engines.vllm.probe_requests import json_object
from rollouts.engines.vllm.server_state import ServerMetrics
from rollouts.engines.vllm.transfer import TransferControl
from rollouts.errors import CapabilityError, EngineError, InvalidRequestError

MemoryTag = Literal["weights", "kv_cache"]

#: What the server puts before the id of a request. An abort without it gets status 200 and does nothing.
REQUEST_ID_PREFIX = "generate-tokens-"


@name_errors_after_methods
class ServerControl(TransferControl, HealthControl):
    """The control calls of one server. Most of them need VLLM_SERVER_DEV_MODE=1 in the environment of the server.

    `forget_media` is called before and after every call that makes the server drop pixels; `on_weight_version` is
    called with each new label. All calls raise `CapabilityError` where the server has no such route, `ServerError`
    where it refuses, `EngineError` where the call would do damage and was not sent, and the errors of
    `ServerConnection.request`.
    """

    # Sleeping.

    async def sleep(self, level: int = 1) -> None:
        """Abort what runs and free memory for others. Level 0 frees none and keeps the caches; 1 moves the weights to
        the host's memory; 2 drops the weights.

        Frees nothing on a CPU; elsewhere the server needs --enable-sleep-mode.
        """
        if level not in (0, 1, 2):
            raise InvalidRequestError("sleep", f"level is {level!r}, not 0, 1 or 2")
        self._state.refuse_during_update("sleep")
        if (current := await self._state.sleep_level()) > 0:
            raise EngineError("sleep", f"the server sleeps already (level {current}); wake it up first")
        with self._media_forgotten(level > 0):
            await self._routes.call("POST", "/sleep", "putting it to sleep", params={"level": level})
        self._state.record_sleep(level)

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

    async def is_sleeping(self) -> bool:
        """Whether memory is freed. False for a server that is only paused, where vLLM's own route returns true."""
        return await self._state.sleep_level() > 0

    # Ending requests.

    async def abort(self, request_ids: Iterable[str]) -> None:
        """End requests by the ids of their `GenerateRequest`; each returns the tokens it has, finish reason "abort".

        The server does not report ids that it does not run. Needs no development mode, except for vLLM's Rust frontend:
        without it, only closing the connection of a request ends it there, and this raises `CapabilityError`.
        """
        ids = list(request_ids)
        if not ids:  # an empty list would end all requests
            return
        path = "/inference/v1/abort_requests"
        served_ids = [f"{REQUEST_ID_PREFIX}{request_id}" for request_id in ids]
        response = await self._request_abort(path, served_ids)
        if response.status in (404, 405):  # up to vLLM 0.31
            response = await self._request_abort("/abort_requests", served_ids)
        elif response.status == 501:  # the Rust frontend, which adds no prefix to ids
            response = await self._request_abort("/abort_requests", ids)
            if response.status == 404:
                raise CapabilityError(
                    "abort",
                    f"{self.base_url}, vLLM's Rust frontend, aborts requests by id only if it was started with "
                    "VLLM_SERVER_DEV_MODE=1. A request ends when its connection is closed: cancel its call, or use "
                    "VLLMEngine.abort",
                )
        self._routes.checked(response, path, "aborting requests")

    async def _request_abort(self, path: str, ids: Sequence[str]) -> HttpResponse:
        body = [json.dumps({"request_ids": ids}).encode()]
        return await self._connection.request("POST", path, name="abort", body=body, slot=False)

    async def abort_all(self) -> int | None:
        """End every request of every client; returns their number, None where the server does not report it."""
        response = await self._routes.call("POST", "/abort_requests", "aborting all requests", content={})
        aborted = json_object(response).get("aborted")
        return None if aborted is None else int(aborted)

    # Monitoring.

    def _checked(self, response: HttpResponse, path: str, action: str) -> HttpResponse:
        return self._routes.checked(response, path, action)

    async def metrics(self) -> ServerMetrics:
        """Every counter and gauge of the server."""
        return await self._routes.metrics()
