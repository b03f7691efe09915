"""Stop strings: a completion ends with the token that completes one of them.

Engines return tokens, not text, so that they do not know stop strings. Which tokens were sampled up to a stop string
does not depend on what was sampled after it; without the later tokens, the completion is what an engine that knows
the string would have returned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from rollouts.engines.protocol import Completion, FinishReason


def cut_at_stop(
    completion: Completion, stop: Sequence[str], decode: Callable[[Sequence[int]], str]
) -> tuple[Completion, str | None]:
    """The completion up to the token that completes the first stop string, and that string; None if it has none."""
    ids = completion.token_ids.tolist()
    if not stop or _first_stop(decode(ids), stop) is None:
        return completion, None
    length = _shortest_with_stop(ids, stop, decode)
    string = _first_stop(decode(ids[:length]), stop)
    if length == len(ids):
        return replace(completion, finish_reason=FinishReason.STOP, stop_token_id=None), string
    spans = tuple(replace(span, end=min(span.end, length)) for span in completion.weight_spans if span.start < length)
    experts, masks = completion.routed_experts, completion.sampling_masks
    cut = replace(
        completion,
        token_ids=completion.token_ids[:length],
        logprobs=completion.logprobs[:length],
        finish_reason=FinishReason.STOP,
        stop_token_id=None,
        weight_spans=spans,
        routed_experts=None if experts is None else experts[: len(experts) - (len(ids) - length)],
        sampling_masks=None if masks is None else masks[:length],
    )
    return cut, string


def text_before(text: str, stop: str) -> str:
    """The text up to the stop string, or all of it."""
    return text.partition(stop)[0]


def _first_stop(text: str, stop: Sequence[str]) -> str | None:
    """The stop string that begins first in the text."""
    found = [(position, string) for string in stop if (position := text.find(string)) >= 0]
    return min(found)[1] if found else None


def _shortest_with_stop(ids: Sequence[int], stop: Sequence[str], decode: Callable[[Sequence[int]], str]) -> int:
    """The length of the shortest prefix whose text has a stop string, which the text of all ids has."""
    shorter, enough = 0, len(ids)
    while enough - shorter > 1:
        middle = (shorter + enough) // 2
        if _first_stop(decode(ids[:middle]), stop) is None:
            shorter = middle
        else:
            enough = middle
    return enough
