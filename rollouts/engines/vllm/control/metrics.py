"""The counters and gauges of a vLLM server, read from the Prometheus text of its `/metrics`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from rollouts.engines.vllm.http.server_address import redacted
from rollouts.errors import CapabilityError, MalformedResultError

_CALL_NAME = "metrics"

# name{label="value",...} value timestamp. Source: the Prometheus text exposition format, version 0.0.4.
_LINE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)\s*(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?\s*")
_LABEL = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*(?:,|$)')
_ESCAPE = re.compile(r'\\([\\"n])')

_SLEEP_LEVELS = {"weights_offloaded": 1, "discard_all": 2}


class Sample(NamedTuple):
    """One number and the labels that say what it counts."""

    labels: Mapping[str, str]
    value: float


class ServerMetrics(dict[str, list[Sample]]):
    """Samples by the server's own names ("vllm:num_requests_running"), one sample for each set of labels.

    The properties sum over the engines of a server. They raise `CapabilityError` where the server does not report them.
    """

    @classmethod
    def parse(cls, text: str) -> ServerMetrics:
        """Read the Prometheus text format. Raises `MalformedResultError`."""
        metrics = cls()
        for line in text.split("\n"):  # `splitlines` would also split at characters that a label may hold
            if not line.strip() or line.startswith("#"):
                continue
            match = _LINE.fullmatch(line)
            if match is None or _LABEL.sub("", match[2] or ""):
                raise MalformedResultError(_CALL_NAME, f"not a name, labels and a value: {redacted(line)[:200]!r}")
            labels = {
                name: _ESCAPE.sub(lambda escape: "\n" if escape[1] == "n" else escape[1], value)
                for name, value in _LABEL.findall(match[2] or "")
            }
            try:
                metrics.setdefault(match[1], []).append(Sample(labels, float(match[3])))
            except ValueError as error:
                raise MalformedResultError(_CALL_NAME, f"{error} in the line {redacted(line)[:200]!r}") from None
        return metrics

    def total(self, name: str, **labels: str) -> float:
        """The sum of the samples of a name that have these labels. Raises `CapabilityError` if there are none."""
        values = [sample.value for sample in self.get(name, ()) if labels.items() <= sample.labels.items()]
        if not values:
            raise CapabilityError(
                _CALL_NAME, f"the server does not report {name}{labels or ''}; was it started with --disable-log-stats?"
            )
        return sum(values)

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
        return max((_SLEEP_LEVELS.get(state, 0) for state in states), default=0)
