"""Listeners of a runner and sinks of its figures: metrics, terminal, Prometheus, OpenTelemetry, TensorBoard, logs.

Importing this package loads none of prometheus_client, opentelemetry, tensorboardX and wandb.
"""

from rollouts.errors import TrainingLogError
from rollouts.observability.engine_load import EngineMonitor, RendererStats
from rollouts.observability.json_logs import (
    EpisodeLogContext,
    EpisodeLogFilter,
    EpisodePosition,
    JsonLinesFormatter,
    JsonLogs,
    current_episode,
)
from rollouts.observability.metric_sinks import JsonLinesSink, MetricHistory, MetricSink, TensorBoardSink, WandbSink
from rollouts.observability.opentelemetry import EpisodeSpans
from rollouts.observability.progress import ProgressDisplay
from rollouts.observability.prometheus import METRICS, Metric, PrometheusEndpoint, prometheus_registry
from rollouts.observability.run_metrics import RunMetrics
from rollouts.observability.training_log import TrainingLog
from rollouts.observability.waiting import EpisodeWait, WaitWatcher, wait_report

__all__ = [
    "METRICS",
    "EngineMonitor",
    "EpisodeLogContext",
    "EpisodeLogFilter",
    "EpisodePosition",
    "EpisodeSpans",
    "EpisodeWait",
    "JsonLinesFormatter",
    "JsonLinesSink",
    "JsonLogs",
    "Metric",
    "MetricHistory",
    "MetricSink",
    "ProgressDisplay",
    "PrometheusEndpoint",
    "RendererStats",
    "RunMetrics",
    "TensorBoardSink",
    "TrainingLog",
    "TrainingLogError",
    "WaitWatcher",
    "WandbSink",
    "current_episode",
    "prometheus_registry",
    "wait_report",
]
