"""Metrics of a run for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Thread
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from wsgiref.simple_server import WSGIServer

from rollouts.error_texts import describe_exception
from rollouts.errors import ArgumentError, MissingExtraError
from rollouts.numbers import whole_number
from rollouts.observability.errors import EndpointError
from rollouts.observability.metric_table import METRICS, Metric
from rollouts.observability.run_metrics import RunMetrics

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric as Family

_PREFIX = "mmrollouts_"

# Prometheus computes rates from counters, over any time.
_NOT_EXPORTED = frozenset({"turns_per_second", "completion_tokens_per_second"})


class PrometheusEndpoint:
    """Serves the metrics of a run under `http://HOST:PORT/metrics`, in a thread. Needs the extra `prometheus`.

        with PrometheusEndpoint(metrics, port=9464) as endpoint:
            endpoint.url

    The names are those of `METRICS` with the prefix `mmrollouts_` and, for counters, the suffix `_total`; labels as in
    the table. The values are read when Prometheus asks for them; the endpoint costs an episode nothing. It has a
    registry of its own. `host` is the loopback address unless given; the endpoint has no password. Port 0 is any free
    port. `__enter__` raises `EndpointError` if it cannot listen. Raises `MissingExtraError`, and `ArgumentError` for a
    port that is no integer from 0 to 65535.
    """

    def __init__(self, metrics: RunMetrics, *, port: int = 9464, host: str = "127.0.0.1") -> None:
        number = whole_number(port)
        if number is None or not 0 <= number <= 65535:
            raise ArgumentError("port", port, "pass an integer from 0 (any free port) to 65535")
        self.registry = prometheus_registry(metrics)
        self._host = host
        self._port = number
        self._server: WSGIServer | None = None
        self._thread: Thread | None = None

    @property
    def port(self) -> int:
        """The port that is listened on; before `start`, the one that was given."""
        return self._port if self._server is None else self._server.server_port

    @property
    def url(self) -> str:
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self.port}/metrics"

    def start(self) -> None:
        """Listen. Has no effect on an endpoint that listens. Raises `EndpointError`."""
        from prometheus_client import start_http_server

        if self._server is not None:
            return
        try:
            self._server, self._thread = start_http_server(self._port, addr=self._host, registry=self.registry)
        except OSError as error:
            raise EndpointError(self._host, self._port, error.strerror or describe_exception(error)) from error

    def stop(self) -> None:
        """Close the port. Has no effect on an endpoint that does not listen."""
        server, thread = self._server, self._thread
        self._server = self._thread = None
        if server is not None and thread is not None:
            server.shutdown()
            server.server_close()
            thread.join()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def prometheus_registry(metrics: RunMetrics) -> CollectorRegistry:
    """A registry with the metrics of a run alone, for an application that has an endpoint of its own.

    Raises `MissingExtraError`.
    """
    try:
        from prometheus_client import CollectorRegistry
        from prometheus_client.registry import Collector
    except ImportError as error:
        raise MissingExtraError("the endpoint for Prometheus", "prometheus", "prometheus-client") from error

    class RunCollector(Collector):
        def collect(self) -> Iterator[Family]:
            return _families(metrics)

    registry = CollectorRegistry()
    registry.register(RunCollector())
    return registry


def _families(metrics: RunMetrics) -> Iterator[Family]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

    values: dict[str, dict[str, float]] = {}
    for key, value in metrics.metrics().items():
        name, _, label = key.partition("/")
        values.setdefault(name, {})[label] = value
    for metric in METRICS:
        if metric.kind == "histogram":
            yield _histogram(metric, metrics)
        elif metric.name in values and metric.name not in _NOT_EXPORTED:
            make: Any = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family: Family = make(_PREFIX + metric.name, _help(metric), labels=[metric.label] if metric.label else [])
            for label, value in values[metric.name].items():
                family.add_metric([label] if metric.label else [], value)  # type: ignore[attr-defined]
            yield family
    if metrics.weight_version:
        yield InfoMetricFamily(
            f"{_PREFIX}weights", "version of the last update of the weights", {"version": metrics.weight_version}
        )


def _histogram(metric: Metric, metrics: RunMetrics) -> Family:
    from prometheus_client.core import HistogramMetricFamily

    family = HistogramMetricFamily(_PREFIX + metric.name, _help(metric), labels=[metric.label] if metric.label else [])
    for key, histogram in metrics.histograms.items():
        name, _, label = key.partition("/")
        if name == metric.name:
            buckets = [
                ("+Inf" if bound == float("inf") else str(bound), count) for bound, count in histogram.cumulative()
            ]
            family.add_metric([label] if metric.label else [], buckets, histogram.sum)
    return family


def _help(metric: Metric) -> str:
    return f"{metric.meaning} ({metric.unit})"
