"""Metrics that an engine and a renderer keep themselves."""

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any, Self

from rollouts.engines.http.metrics import Metrics
from rollouts.errors import RolloutsError, describe_exception

log = logging.getLogger("rollouts.observability")


class PeriodicThread:
    """Calls `function` every `seconds` on a thread of its own, from `start` to `stop`.

    A thread runs also while something blocks the event loop. After an exception the function is called again;
    it is logged, unless the call before it failed too.
    """

    def __init__(self, function: Callable[[], object], seconds: float, name: str) -> None:
        self._function = function
        self._seconds = seconds
        self._name = name
        self._stopped = threading.Event()
        # A daemon: a program that ends without `stop` does not wait for it.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End, after the call that is running."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        failed = False
        while not self._stopped.wait(self._seconds):
            try:
                self._function()
                failed = False
            except Exception:
                if not failed:
                    log.exception("%s failed", self._name)
                failed = True


# Key -> the names under which vLLM and SGLang report it, for each of the engines of a server.
_SUMS = {
    "engine_requests_running": ("vllm:num_requests_running", "sglang:num_running_reqs"),
    "engine_requests_waiting": ("vllm:num_requests_waiting", "sglang:num_queue_reqs"),
    "engine_preemptions": ("vllm:num_preemptions_total", "sglang:num_retracted_requests_total"),
    "engine_prefix_cache_queries": ("vllm:prefix_cache_queries_total", "sglang:prompt_tokens_total"),
    "engine_prefix_cache_hits": ("vllm:prefix_cache_hits_total", "sglang:cached_tokens_total"),
    "engine_media_cache_queries": ("vllm:mm_cache_queries_total",),
    "engine_media_cache_hits": ("vllm:mm_cache_hits_total",),
}


class EngineMonitor:
    """A source of `RunMetrics`: the load of an engine and what its caches found.

        async with EngineMonitor(engine) as monitor:
            metrics = RunMetrics(sources=[monitor])

    Inside the block a task reads the metrics of a server of vLLM or SGLang, or of those of an `EngineFleet`,
    every five seconds (`engine.control.metrics`). While they cannot be read, their keys are absent and
    `engine_read_errors` counts. The counts of media that were sent and omitted (`engine.media_cache_counts`)
    are read at each call. An engine that offers neither has no metrics.
    """

    def __init__(self, engine: object) -> None:
        self._engine = engine
        self._of_server: dict[str, float] = {}
        self._errors = 0
        self._task: asyncio.Task[None] | None = None

    def __call__(self) -> Mapping[str, float]:
        """The latest values."""
        values = dict(self._of_server)
        if self._read_metrics is not None:
            values["engine_read_errors"] = self._errors
        if (counts := getattr(self._engine, "media_cache_counts", None)) is not None:
            values |= {
                "media_items_sent": counts.included_items,
                "media_items_omitted": counts.omitted_items,
                "media_sent_bytes": counts.included_bytes,
                "media_omitted_bytes": counts.omitted_bytes,
            }
        return values

    @property
    def _read_metrics(self) -> Any:
        return getattr(getattr(self._engine, "control", None), "metrics", None)

    async def read(self) -> None:
        """Read the metrics of the server now. An error is logged once until a reading succeeds again."""
        if self._read_metrics is None:
            return
        try:
            reading = await self._read_metrics()
            servers = [reading] if isinstance(reading, Metrics) else reading.values()
            self._of_server = server_load(*servers)
        except RolloutsError as error:
            if not self._errors or self._of_server:
                log.warning("the metrics of the engine cannot be read: %s", describe_exception(error))
            self._errors += 1
            self._of_server = {}

    async def _read_repeatedly(self) -> None:
        while True:
            await self.read()
            await asyncio.sleep(5.0)

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._read_repeatedly(), name="engine-monitor")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None


def server_load(*servers: Metrics) -> dict[str, float]:
    """What servers of vLLM and SGLang report about their load, under the keys of `METRICS`.

    What no server reports is left out. The values are sums over the servers and their engines; the usage of
    the KV cache is the mean.
    """
    values: dict[str, float] = {}
    for key, names in _SUMS.items():
        if totals := [server.total(name) for server in servers for name in names if name in server]:
            values[key] = sum(totals)
    # Ratios, in spite of the name of vLLM's.
    usages = [
        usage.value
        for server in servers
        for name in ("vllm:kv_cache_usage_perc", "sglang:token_usage")
        for usage in server.get(name, ())
    ]
    if usages:
        values["engine_kv_cache_usage_ratio"] = sum(usages) / len(usages)
    return values


class RendererStats:
    """A source of `RunMetrics`: how many prompts a renderer bridged, and why it refused the others.

    `renderer` is a renderer, or a pool of one. A renderer without `bridge_stats` has no metrics.
    """

    def __init__(self, renderer: object) -> None:
        self._renderer = getattr(renderer, "renderer", renderer)

    def __call__(self) -> Mapping[str, float]:
        stats = getattr(self._renderer, "bridge_stats", None)
        if stats is None:
            return {}
        # A copy: threads that render may add a reason, and a dict that grows cannot be iterated.
        refused = {f"bridges_refused/{reason.name.lower()}": count for reason, count in stats.refused.copy().items()}
        return {"bridges": stats.bridged, **refused}
