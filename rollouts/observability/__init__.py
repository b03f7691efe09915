"""Listeners of a runner and sinks of its figures: metrics, terminal, Prometheus, OpenTelemetry, TensorBoard, logs.

Importing this package loads none of prometheus_client, opentelemetry, tensorboardX and wandb.
"""

from rollouts.observability.engine_load import EngineMonitor, RendererStats
from rollouts.observability.errors import EndpointError, SinkStartError, TrainingLogError
from rollouts.observability.json_logs import JsonLinesFormatter, JsonLogs
from rollouts.observability.log_context import EpisodeLogContext, EpisodeLogFilter, EpisodePosition, current_episode
from rollouts.observability.metric_sinks import JsonLinesSink, MetricHistory, MetricSink
from rollouts.observability.metric_table import METRICS, Metric
from rollouts.observability.opentelemetry import EpisodeSpans
from rollouts.observability.progress import ProgressDisplay
from rollouts.observability.prometheus import PrometheusEndpoint, prometheus_registry
from rollouts.observability.run_metrics import RunMetrics
from rollouts.observability.tensorboard import TensorBoardSink
from rollouts.observability.training_log import TrainingLog
from rollouts.observability.waiting import EpisodeWait, WaitWatcher, wait_report
from rollouts.observability.weights_and_biases import WandbSink

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
    "JsonLinesSink",
    "JsonLogs",
    "Metric",
    "MetricHistory",
    "MetricSink",
    "ProgressDisplay",
    "PrometheusEndpoint",
    "RendererStats",
    "RunMetrics",
    "SinkStartError",
    "TensorBoardSink",
    "TrainingLog",
    "TrainingLogError",
    "WaitWatcher",
    "WandbSink",
    "current_episode",
    "prometheus_registry",
    "wait_report",
]
