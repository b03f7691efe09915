"""Which weights sampled which tokens, as a server reports it with a sample."""

from __future__ import annotations

from typing import Any

from rollouts.engines.http.responses import reading
from rollouts.engines.protocol import WeightSpan
from rollouts.errors import MalformedResultError


def reported_spans(name: str, versions: Any, count: int) -> tuple[WeightSpan, ...]:
    """The spans of a sample of `count` tokens from the list `weight_versions` of a response.

    Raises `MalformedResultError` for request `name` where they cannot be read or do not cover the tokens.
    """
    with reading(name, "weight versions cannot be read"):
        spans = tuple(WeightSpan(str(v["version"]), int(v["start"]), int(v["end"])) for v in versions)
    starts, ends = [*(span.start for span in spans), count], [0, *(span.end for span in spans)]
    if starts != ends:
        raise MalformedResultError(name, f"weight versions {spans} do not cover the {count} tokens of a sample")
    return tuple(span for span in spans if span.end > span.start)
