"""What a server reports of its state, its metrics, and the routes that change it."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rollouts.engines.http.connection import ServerConnection
from rollouts.engines.http.metrics import Metrics
from rollouts.engines.http.responses import HttpResponse, excerpt, response_error
from rollouts.engines.vllm.capabilities import ServerCapabilities
from rollouts.engines.vllm.probe_requests import json_object
from rollouts.errors import CapabilityError, EngineError, MalformedResultError


class ServerMetrics(Metrics):
    """Samples by the server's own names ("vllm:num_requests_running"), one sample for each set of labels.

    The properties sum over the engines of a server. They raise `CapabilityError` where the server does not report them.
    """

    @property
    def running(self) -> int:
        """Requests (samples of n) that are being generated."""
        return int(self.total("vllm:num_requests_running"))

    @property
    def waiting(self) -> int:
        """Requests in the queue: the KV cache has no room for them, or the server is paused."""
        return int(self.total("vllm:num_requests_waiting"))

    @property
    def preemptions(self) -> int:
        """How often a running request lost its blocks of the KV cache to others and was computed again later.

        On a vLLM that takes images, each of them may kill the server: see "A full KV cache" in docs/vllm.md.
        """
        return int(self.total("vllm:num_preemptions_total"))

    @property
    def process_start_time(self) -> float | None:
        """When the server's process began, in seconds since 1970; None where the server does not report it."""
        return next((sample.value for sample in self.get("process_start_time_seconds", ())), None)

    @property
    def sleep_level(self) -> int | None:
        """1: the weights are in the host's memory, 2: they were dropped, 0: neither; None where it is not reported.

        The level stays until all memory is back.
        """
        if "vllm:engine_sleep_state" not in self:
            return None
        states = {sample.labels.get("sleep_state", "") for sample in self["vllm:engine_sleep_state"] if sample.value}
        return max(({"weights_offloaded": 1, "discard_all": 2}.get(state, 0) for state in states), default=0)


class ControlRoutes:
    """Sends control requests. They do not count against the number of requests that may run at once."""

    def __init__(self, connection: ServerConnection, capabilities: Callable[[], Awaitable[ServerCapabilities]]) -> None:
        self._connection = connection
        self.capabilities = capabilities

    async def call(
        self,
        method: str,
        path: str,
        action: str,
        *,
        content: Mapping[str, Any] | None = None,
        params: Mapping[str, str | int | bool] | None = None,
    ) -> HttpResponse:
        """Call a route of development mode. `action` names the call in errors. Raises as `require` and `checked` do."""
        await self.require(path)
        return self.checked(await self.request(method, path, content=content, params=params), path, action)

    async def request(
        self,
        method: str,
        path: str,
        *,
        content: Mapping[str, Any] | None = None,
        params: Mapping[str, str | int | bool] | None = None,
    ) -> HttpResponse:
        """Call any route; a response of any status is returned."""
        body = None if content is None else [json.dumps(content).encode()]
        return await self._connection.request(method, path, name=_call_name(path), body=body, params=params, slot=False)

    def checked(self, response: HttpResponse, path: str, action: str) -> HttpResponse:
        """The response if it is a success. Raises `CapabilityError` where the route is missing, else `ServerError`."""
        if response.status in (404, 405):
            raise CapabilityError(
                _call_name(path),
                f"{self._connection.base_url} has no /{_call_name(path)}: this vLLM is older than the route",
            )
        if response.status != 200:
            error = response_error(_call_name(path), response, action)
            if response.status == 501:  # vLLM's Rust frontend, which names the cure
                raise CapabilityError(_call_name(path), error.reason)
            if b"object has no attribute" in response.body:
                raise CapabilityError(
                    _call_name(path),
                    f"{error.reason}. The engine of this vLLM is not of the release of its Rust frontend: start both "
                    "from one release, or set VLLM_USE_RUST_FRONTEND=0",
                )
            raise error
        return response

    async def require(self, path: str) -> None:
        """Raise `CapabilityError` unless the server runs in development mode, as `path` needs."""
        if not (await self.capabilities()).control:
            name = _call_name(path)
            raise CapabilityError(
                name,
                f"{self._connection.base_url} has no /{name}: start it with VLLM_SERVER_DEV_MODE=1 in its environment, "
                "and let nobody but the trainer reach it",
            )

    async def metrics(self) -> ServerMetrics:
        """The counters and gauges that the server reports now."""
        body = self.checked(await self.request("GET", "/metrics"), "/metrics", "reading metrics").body
        return ServerMetrics.parse(body.decode("utf-8", errors="replace"))

    async def takes_media(self) -> bool:
        """Whether the server was started to take images; assumed of the Rust frontend, which does not tell."""
        capabilities = await self.capabilities()
        return capabilities.pixel_dtype is not None or capabilities.rust_frontend is not None


def required_field(response: HttpResponse, key: str) -> Any:
    """One field of the JSON object of a response. Raises `MalformedResultError` where it is missing."""
    content = json_object(response)
    if key not in content:
        raise MalformedResultError(response.name, f"the response has no `{key}`: {excerpt(response.body)[:200]!r}")
    return content[key]


def _call_name(path: str) -> str:
    return path.partition("?")[0].strip("/")


class ServerState:
    """The state of one server as the calls of this process left it. Forgotten when the server is another process.

    `loaded_directory` holds the weights that were loaded last, unless a trainer has sent others since
    (`was_transferred`); `unusable_weights` is the reason why the server must not run with the weights that it has, None
    where it may. `paused_by_update`: an update has paused the server, and the next one that succeeds resumes it.
    """

    def __init__(self, routes: ControlRoutes) -> None:
        self._routes = routes
        self._running_update: str | None = None  # the name of the call
        self._process_start_time: float | None = None
        self._forget()

    def _forget(self) -> None:
        self.loaded_directory: str | None = None
        self.was_transferred = False
        self.unusable_weights: str | None = None
        self.paused_by_update = False
        self.record_sleep(0)

    def record_sleep(self, level: int) -> None:
        """The server was put to sleep with this level."""
        self._last_sleep_level = level
        # Since then:
        self._weights_have_memory = False
        self._weights_loaded = False

    def record_wake_up(self, *, weights: bool, awake: bool) -> None:
        """Memory is back: that of the weights, and where `awake` all of it."""
        self._weights_have_memory |= weights
        if awake:
            self._last_sleep_level = 0

    def record_load(self, directory: str) -> None:
        """All workers have loaded the weights in `directory`."""
        self.unusable_weights = None
        self.loaded_directory = directory
        self.was_transferred = False
        self._weights_loaded = True

    def record_transfer(self) -> None:
        """All workers have received weights from a trainer."""
        self.unusable_weights = self.loaded_directory = None
        self.was_transferred = True
        self._weights_loaded = True

    async def sleep_level(self) -> int:
        """The level that the server reports, else that of the last call. Raises `CapabilityError`."""
        await self._routes.require("/sleep")
        level = (await self._routes.metrics()).sleep_level
        return self._last_sleep_level if level is None else level

    async def forget_if_restarted(self) -> None:
        """Forget everything if the server is not the process that it was. Raises `CapabilityError`."""
        await self._routes.require("/collective_rpc")
        started = (await self._routes.metrics()).process_start_time
        if self._process_start_time is not None and started != self._process_start_time:
            self._forget()
        self._process_start_time = started

    # Calls that are refused. All raise `EngineError`.

    @contextmanager
    def exclusive_update(self, name: str) -> Iterator[None]:
        """Run one update of the weights; another one in the meantime is refused."""
        self.refuse_during_update(name)
        self._running_update = name
        try:
            yield
        finally:
            self._running_update = None

    def refuse_during_update(self, name: str) -> None:
        if self._running_update is not None:
            raise EngineError(name, f"{self._running_update} is under way on this server; wait for it")

    async def refuse_with_unusable_weights(self, name: str) -> None:
        if self.unusable_weights is not None:
            await self.forget_if_restarted()
        if self.unusable_weights is not None:
            raise EngineError(
                name,
                f"{self.unusable_weights}: the next request would kill the server or get garbage. Reload a checkpoint "
                "that is known to be good, or restart the server",
            )

    async def refuse_while_weights_sleep(self, name: str) -> None:
        if not self._weights_have_memory and (level := await self.sleep_level()) > 0:
            raise EngineError(
                name, f'the server sleeps (level {level}), its weights have no memory. wake_up(["weights"]) first'
            )

    async def refuse_with_dropped_weights(self, name: str) -> None:
        if not self._weights_loaded and await self.sleep_level() == 2:
            raise EngineError(
                name,
                "the weights were dropped (level 2), the server would generate with whatever is in their memory. Use "
                'wake_up(["weights"]), then reload_weights(directory), then wake_up()',
            )
