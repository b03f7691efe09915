"""Metrics of a run for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from threading import Thread
from typing import TYPE_CHECKING, Any, Final, Self
from wsgiref.simple_server import WSGIServer

from renderers.errors import MissingExtraError
from rollouts.errors import RolloutsError, describe_exception
from rollouts.observability.metric_table import METRICS, Metric
from rollouts.observability.run_metrics import RunMetrics

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric as Family

_PREFIX: Final = "mmrollouts_"


class PrometheusEndpoint:
    """Serves the metrics of a run under `http://HOST:PORT/metrics`, in a thread. Needs the extra `prometheus`.

        with PrometheusEndpoint(metrics, port=9464) as endpoint:
            endpoint.url

    The names are those of `METRICS` with the prefix `mmrollouts_` and, for counters, the suffix `_total`;
    labels as in the table. The values are read when Prometheus asks for them; the endpoint costs an episode
    nothing. `host` is the loopback address unless given; the endpoint has no password. Port 0 is any free
    port. `__enter__` raises `RolloutsError` if it cannot listen. Raises `MissingExtraError`.
    """

    def __init__(self, metrics: RunMetrics, *, port: int = 9464, host: str = "127.0.0.1") -> None:
        try:
            from prometheus_client import CollectorRegistry
        except ImportError as error:
            raise MissingExtraError("the endpoint for Prometheus", "prometheus", "prometheus-client") from error
        self._metrics = metrics
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self._host = host
        self._port = port
        self._listening: tuple[WSGIServer, Thread] | None = None

    @property
    def port(self) -> int:
        """The port that is listened on; outside the block, the one that was given."""
        return self._port if self._listening is None else self._listening[0].server_port

    @property
    def url(self) -> str:
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self.port}/metrics"

    def collect(self) -> Iterator[Family]:
        """The metrics, as the registry asks for them."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

        values: dict[str, dict[str, float]] = {}
        for key, value in self._metrics.metrics().items():
            name, _, label = key.partition("/")
            values.setdefault(name, {})[label] = value
        for metric in METRICS:
            if metric.kind == "histogram":
                yield self._histogram(metric)
            # Prometheus computes rates from counters, over any time.
            elif metric.name in values and metric.name not in {"turns_per_second", "completion_tokens_per_second"}:
                make: Any = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
                family = _family(make, metric)
                for label, value in values[metric.name].items():
                    family.add_metric([label] if metric.label else [], value)
                yield family
        if version := self._metrics.weight_version:
            yield InfoMetricFamily(
                f"{_PREFIX}weights", "version of the last update of the weights", {"version": version}
            )

    def _histogram(self, metric: Metric) -> Any:
        from prometheus_client.core import HistogramMetricFamily

        family = _family(HistogramMetricFamily, metric)
        for key, histogram in self._metrics.histograms.items():
            name, _, label = key.partition("/")
            if name == metric.name:
                counts = histogram.cumulative()
                buckets = [("+Inf" if bound == float("inf") else str(bound), count) for bound, count in counts]
                family.add_metric([label] if metric.label else [], buckets, histogram.sum)
        return family

    def __enter__(self) -> Self:
        from prometheus_client import start_http_server

        try:
            self._listening = start_http_server(self._port, addr=self._host, registry=self.registry)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or describe_exception(error)
            cure = "pass another port, or port=0 for any that is free"
            raise RolloutsError(
                f"the metrics endpoint cannot listen on {self._host}:{self._port}: {reason}; {cure}"
            ) from error
        return self

    def __exit__(self, *_: object) -> None:
        if self._listening is not None:
            (server, thread), self._listening = self._listening, None
            server.shutdown()
            server.server_close()
            thread.join()


def _family(make: Callable[..., Any], metric: Metric) -> Any:
    labels = [metric.label] if metric.label else []
    return make(_PREFIX + metric.name, f"{metric.meaning} ({metric.unit})", labels=labels)
