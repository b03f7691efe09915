"""The counters and gauges of a server, in the text format of Prometheus."""

import re
from collections.abc import Mapping
from typing import NamedTuple, Self

from rollouts.engines.http.address import redacted
from rollouts.errors import CapabilityError, MalformedResultError

_CALL_NAME = "metrics"

# name{label="value",...} value timestamp. Source: the Prometheus text exposition format, version 0.0.4.
# The repeats are possessive, so that a line is read in a time proportional to its length.
_LINE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*+)(?:\s*+\{(.*)\})?\s++(\S++)(?:\s++-?\d++)?\s*+")
_LABEL = re.compile(r'\s*+([a-zA-Z_][a-zA-Z0-9_]*+)\s*+=\s*+"((?:[^"\\]|\\.)*+)"\s*+(?:,|$)')
_ESCAPE = re.compile(r'\\([\\"n])')


class Sample(NamedTuple):
    """One number and the labels that say what it counts."""

    labels: Mapping[str, str]
    value: float


class Metrics(dict[str, list[Sample]]):
    """Samples by the server's own names ("vllm:num_requests_running"), one sample for each set of labels."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the Prometheus text format. Raises `MalformedResultError`."""
        metrics = cls()
        for line in text.split("\n"):  # `splitlines` would also split at characters that a label may hold
            if not line.strip() or line.startswith("#"):
                continue
            match = _LINE.fullmatch(line)
            written, position = (match and match[2]) or "", 0
            labels: dict[str, str] = {}
            while (label := _LABEL.match(written, position)) is not None:
                labels[label[1]] = _ESCAPE.sub(lambda escape: "\n" if escape[1] == "n" else escape[1], label[2])
                position = label.end()
            if match is None or position < len(written):
                raise MalformedResultError(_CALL_NAME, f"not a name, labels and a value: {redacted(line)[:200]!r}")
            try:
                metrics.setdefault(match[1], []).append(Sample(labels, float(match[3])))
            except ValueError as error:
                raise MalformedResultError(_CALL_NAME, f"{error} in the line {redacted(line)[:200]!r}") from None
        return metrics

    def total(self, name: str) -> float:
        """The sum of the samples of a name. Raises `CapabilityError` if there are none."""
        if name not in self:
            raise CapabilityError(_CALL_NAME, f"the server does not report {name}; was it started without statistics?")
        return sum(sample.value for sample in self[name])
