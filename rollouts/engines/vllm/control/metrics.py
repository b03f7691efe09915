"""What a vLLM server counts: the text of its `/metrics`, read into samples, with names for those that matter here."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from rollouts.errors import CapabilityError, MalformedResultError

_NAME = "metrics"

# name{label="value",...} value timestamp. Source: the Prometheus text exposition format, version 0.0.4.
_LINE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)\s*(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?\s*")
_LABEL = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*(?:,|$)')
_ESCAPES = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}

_SLEEP_LEVELS = {"weights_offloaded": 1, "discard_all": 2}


class Sample(NamedTuple):
    """One number, and what it is about."""

    labels: Mapping[str, str]
    value: float


class CacheCounts(NamedTuple):
    """Of a cache, since the server was started. For the prefix cache these are tokens, for that of media items."""

    queries: float
    hits: float

    @property
    def hit_rate(self) -> float:
        """Between 0 and 1; NaN before the first query."""
        return self.hits / self.queries if self.queries else float("nan")


class ServerMetrics(Mapping[str, tuple[Sample, ...]]):
    """Samples by the name that the server gives them ("vllm:num_requests_running"), one a set of labels.

    The properties add up over the engines of a server; they raise `CapabilityError` where it does not count.
    """

    def __init__(self, samples: Mapping[str, tuple[Sample, ...]]) -> None:
        self._samples = samples

    @classmethod
    def parse(cls, text: str) -> ServerMetrics:
        """Read the Prometheus text format. Raises `MalformedResultError`."""
        samples: dict[str, list[Sample]] = {}
        for line in text.split("\n"):  # a label may hold what `splitlines` takes for the end of a line
            if line.strip() and not line.startswith("#"):
                name, sample = _parse_line(line)
                samples.setdefault(name, []).append(sample)
        return cls({name: tuple(found) for name, found in samples.items()})

    def __getitem__(self, name: str) -> tuple[Sample, ...]:
        return self._samples[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._samples)

    def __len__(self) -> int:
        return len(self._samples)

    def total(self, name: str, **labels: str) -> float:
        """The sum of the samples of a name that have these labels. Raises `CapabilityError` if there are none."""
        values = self._values(name, labels)
        if not values:
            raise CapabilityError(
                _NAME, f"the server does not report {name}{labels or ''}; was it started with --disable-log-stats?"
            )
        return sum(values)

    @property
    def running(self) -> int:
        """Requests (samples of n) that are being generated."""
        return int(self.total("vllm:num_requests_running"))

    @property
    def waiting(self) -> int:
        """Requests that wait for room, or for the server to be resumed."""
        return int(self.total("vllm:num_requests_waiting"))

    @property
    def kv_cache_usage(self) -> float:
        """How much of the KV cache is taken, between 0 and 1; of the fullest engine."""
        self.total("vllm:kv_cache_usage_perc")
        return max(self._values("vllm:kv_cache_usage_perc", {}))

    @property
    def preemptions(self) -> int:
        """How often a running request lost its place in the KV cache to others and was computed again later.

        On a vLLM that shows images, each of them may take the server down: see "A full KV cache" in docs/vllm.md.
        """
        return int(self.total("vllm:num_preemptions_total"))

    @property
    def prefix_cache(self) -> CacheCounts:
        return self._cache("vllm:prefix_cache")

    @property
    def media_cache(self) -> CacheCounts:
        return self._cache("vllm:mm_cache")

    @property
    def prompt_tokens(self) -> int:
        return int(self.total("vllm:prompt_tokens_total"))

    @property
    def generated_tokens(self) -> int:
        return int(self.total("vllm:generation_tokens_total"))

    @property
    def sleep_level(self) -> int | None:
        """1: the weights are in the host's memory, 2: they are gone, 0: neither; None where the server does not say.

        Also while a part of the memory is back already.
        """
        if "vllm:engine_sleep_state" not in self:
            return None
        states = {sample.labels.get("sleep_state", "") for sample in self["vllm:engine_sleep_state"] if sample.value}
        return max((_SLEEP_LEVELS.get(state, 0) for state in states), default=0)

    def _cache(self, prefix: str) -> CacheCounts:
        return CacheCounts(self.total(f"{prefix}_queries_total"), self.total(f"{prefix}_hits_total"))

    def _values(self, name: str, labels: Mapping[str, str]) -> list[float]:
        return [sample.value for sample in self.get(name, ()) if labels.items() <= sample.labels.items()]


def _parse_line(line: str) -> tuple[str, Sample]:
    match = _LINE.fullmatch(line)
    try:
        if match is None:
            raise ValueError("no name and value")
        return match[1], Sample(_parse_labels(match[2] or ""), float(match[3]))
    except ValueError as error:
        raise MalformedResultError(_NAME, f"{error} in the line {line[:200]!r}") from None


def _parse_labels(text: str) -> dict[str, str]:
    labels: dict[str, str] = {}
    position = 0
    while position < len(text):
        match = _LABEL.match(text, position)
        if match is None:
            raise ValueError(f"no label at {text[position : position + 40]!r}")
        labels[match[1]] = re.sub(r'\\[\\"n]', lambda escape: _ESCAPES[escape[0]], match[2])
        position = match.end()
    return labels
