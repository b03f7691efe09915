"""Listeners of a runner: metrics, progress on a terminal, Prometheus, OpenTelemetry, logs, episodes that wait for long.

Importing this package loads neither prometheus_client nor opentelemetry.
"""

from rollouts.observability.engine_load import EngineMonitor, RendererStats
from rollouts.observability.errors import EndpointError
from rollouts.observability.json_logs import JsonLinesFormatter, JsonLogs
from rollouts.observability.log_context import EpisodeLogContext, EpisodeLogFilter, EpisodePosition, current_episode
from rollouts.observability.metric_table import METRICS, Metric
from rollouts.observability.opentelemetry import EpisodeSpans
from rollouts.observability.progress import ProgressDisplay
from rollouts.observability.prometheus import PrometheusEndpoint, prometheus_registry
from rollouts.observability.run_metrics import RunMetrics
from rollouts.observability.waiting import EpisodeWait, WaitWatcher, wait_report

__all__ = [
    "METRICS",
    "EndpointError",
    "EngineMonitor",
    "EpisodeLogContext",
    "EpisodeLogFilter",
    "EpisodePosition",
    "EpisodeSpans",
    "EpisodeWait",
    "JsonLinesFormatter",
    "JsonLogs",
    "Metric",
    "ProgressDisplay",
    "PrometheusEndpoint",
    "RendererStats",
    "RunMetrics",
    "WaitWatcher",
    "current_episode",
    "prometheus_registry",
    "wait_report",
]
