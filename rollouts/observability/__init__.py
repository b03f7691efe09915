"""Listeners of a runner report its figures: terminal, Prometheus, TensorBoard, Weights & Biases, files.

Importing this package loads none of prometheus_client, tensorboardX and wandb.
"""

from rollouts.observability.engine_load import EngineMonitor, RendererStats
from rollouts.observability.metric_sinks import JsonLinesSink, MetricHistory, MetricSink, TensorBoardSink, WandbSink
from rollouts.observability.metric_table import METRICS, Metric
from rollouts.observability.progress import ProgressDisplay
from rollouts.observability.prometheus import PrometheusEndpoint
from rollouts.observability.run_metrics import RunMetrics
from rollouts.observability.training_log import TrainingLog

__all__ = [
    "METRICS",
    "EngineMonitor",
    "JsonLinesSink",
    "Metric",
    "MetricHistory",
    "MetricSink",
    "ProgressDisplay",
    "PrometheusEndpoint",
    "RendererStats",
    "RunMetrics",
    "TensorBoardSink",
    "TrainingLog",
    "WandbSink",
]
