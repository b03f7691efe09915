"""Routes that tell about the server: its health, version, model, load and metrics."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rollouts.errors import MissingExtraError
from rollouts.serve.served_model import WIRE_VERSION
from rollouts.serve.server_state import ServerState

try:
    from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    from prometheus_client.registry import Collector
except ImportError as error:
    raise MissingExtraError("rollouts serve", "serve", "prometheus-client") from error

_SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")  # by the level of sleep


class MonitoringRoutes:
    """Routes that read and change nothing. Prometheus reads the same names as of vLLM."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._registry = CollectorRegistry()
        self._registry.register(_ServerCollector(state))
        self.routes = [
            Route("/health", self._health, methods=["GET"]),
            Route("/ping", self._health, methods=["GET", "POST"]),
            Route("/version", self._version, methods=["GET"]),
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/load", self._load, methods=["GET"]),
            Route("/metrics", self._metrics, methods=["GET"]),
        ]

    async def _health(self, request: Request) -> Response:
        health = getattr(getattr(self._state.engine.engine, "control", None), "health", None)
        alive = health is None or await health()  # of a server behind this one
        return Response(status_code=200 if alive else 503)

    async def _version(self, request: Request) -> Response:
        return JSONResponse({"version": reported_version()})

    async def _models(self, request: Request) -> Response:
        model = self._state.model
        card = {
            "id": model.name,
            "object": "model",
            "created": int(self._state.started),
            "owned_by": "mmrollouts",
            "root": str(model.directory),
            "parent": None,
            "max_model_len": model.max_model_len,
            "permission": [],
        }
        loaded = {} if self._state.engine.adapters is None else await self._state.engine.adapters()
        adapters = [
            {**card, "id": name, "root": directory, "parent": model.name, "max_model_len": None}
            for name, directory in loaded.items()
        ]
        return JSONResponse({"object": "list", "data": [card, *adapters]})

    async def _load(self, request: Request) -> Response:
        return JSONResponse({"server_load": self._state.engine.running + self._state.engine.waiting})

    async def _metrics(self, request: Request) -> Response:
        return Response(generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST})


def reported_version() -> str:
    """The vLLM whose wire format this server has, with this package as its local part: "0.32.0+mmrollouts.0.1.0"."""
    try:
        own = version("mmrollouts")
    except PackageNotFoundError:  # imported from a directory of sources
        own = "0"
    return f"{WIRE_VERSION}+mmrollouts.{own}"


class _ServerCollector(Collector):
    """vLLM's names for what this server knows; it has neither a cache of prompts nor preemptions."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    def collect(self) -> Iterator[Any]:
        state = self._state
        yield GaugeMetricFamily(
            "process_start_time_seconds", "Start of the server, in seconds since 1970.", value=state.started
        )
        gauges = {
            "num_requests_running": ("Requests in the engine.", state.engine.running),
            "num_requests_waiting": ("Requests that wait for the end of a pause.", state.engine.waiting),
            "kv_cache_usage_perc": ("Used part of the cache of prompts, of which there is none.", 0),
        }
        counters = {
            "num_preemptions": ("Requests that lost their cache.", 0),
            "prefix_cache_queries": ("Prompt tokens looked up in the cache of prompts.", 0),
            "prefix_cache_hits": ("Prompt tokens found in the cache of prompts.", 0),
            "mm_cache_queries": ("Images and sounds of requests.", state.media.queries),
            "mm_cache_hits": ("Images and sounds of requests that were found by their name.", state.media.hits),
        }
        labels = {"engine": "0", "model_name": state.model.name}
        for family, values in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, (meaning, value) in values.items():
                metric = family(f"vllm:{name}", meaning, labels=list(labels))
                metric.add_metric(list(labels.values()), value)
                yield metric
        sleep = GaugeMetricFamily("vllm:engine_sleep_state", "State of sleep.", labels=[*labels, "sleep_state"])
        for level, name in enumerate(_SLEEP_STATES):
            sleep.add_metric([*labels.values(), name], float(level == state.sleep_level))
        yield sleep
