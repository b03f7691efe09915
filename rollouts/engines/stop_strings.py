"""Stop strings: a completion ends with the token that completes one of them.

Engines return tokens, not text, so that they do not know stop strings. Which tokens were sampled up to a stop
string does not depend on what was sampled after it; without the later tokens, the completion is what an
engine that knows the string would have returned. An engine that streams and can end requests is told to once
all completions of a request have a stop string.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

from rollouts.engines.protocol import Completion, FinishReason, GenerateRequest, TokenDelta, TokenListener
from rollouts.errors import EngineError

Decode = Callable[[Sequence[int]], str]


def cut_at_stop(completion: Completion, stop: Sequence[str], decode: Decode) -> tuple[Completion, str | None]:
    """The completion up to the token that completes the first stop string, and that string; None if it has none."""
    ids = completion.token_ids.tolist()
    if not stop or _first_stop(decode(ids), stop) is None:
        return completion, None
    length = _shortest_with_stop(ids, stop, decode)
    string = _first_stop(decode(ids[:length]), stop)
    if length == len(ids):
        return replace(completion, finish_reason=FinishReason.STOP, stop_token_id=None), string
    spans = tuple(replace(span, end=min(span.end, length)) for span in completion.weight_spans if span.start < length)
    experts, masks, top = completion.routed_experts, completion.sampling_masks, completion.top_logprobs
    cut = replace(
        completion,
        token_ids=completion.token_ids[:length],
        logprobs=completion.logprobs[:length],
        finish_reason=FinishReason.STOP,
        stop_token_id=None,
        weight_spans=spans,
        # Experts have rows of the prompt too: the end of both is what agrees.
        routed_experts=None if experts is None else experts[: len(experts) - (len(ids) - length)],
        sampling_masks=None if masks is None else masks[:length],
        top_logprobs=None if top is None else top.rows(slice(length)),
    )
    return cut, string


def text_before(text: str, stop: str) -> str:
    """The text up to the stop string, or all of it. At the beginning of a text, line breaks are layout and are gone."""
    visible = stop.lstrip("\n")
    if visible and stop not in text and text.startswith(visible):
        return ""
    return text.partition(stop)[0]


def sendable_length(text: str, stop: Sequence[str], *, is_beginning: bool = False) -> int:
    """How many characters of a text that is not finished are before everything that may be a stop string.

    `is_beginning`: line breaks may stand before the text, which are layout and not part of it.
    """
    layout = "\n" * max(map(len, stop), default=0) if is_beginning else ""
    held = 0
    for string in stop:
        longest = min(len(string) - 1, len(layout) + len(text))
        fits = (length for length in range(longest, held, -1) if (layout + text).endswith(string[:length]))
        held = max(held, next(fits, 0))
    return max(0, len(text) - held)


@asynccontextmanager
async def ending_early(
    abort: Callable[[list[str]], Coroutine[Any, Any, None]],
    request: GenerateRequest,
    stop: Sequence[str],
    decode: Decode,
    listen: TokenListener | None = None,
) -> AsyncIterator[TokenListener | None]:
    """A listener that ends a request at its engine once each of its completions has a stop string.

    `abort` is that of the engine. `listen` receives the tokens before those that complete a stop string. The block
    ends when the engine has been told; where it refuses, it samples to the end, which changes no completion.
    """
    if not stop:
        yield listen
        return
    # Tokens in which a stop string is looked for, beyond one for each of its bytes: some have no text.
    window = max(len(string.encode()) for string in stop) + 8
    sampled: list[list[int]] = [[] for _ in range(request.sampling.n)]
    unfinished = set(range(request.sampling.n))
    aborting: asyncio.Task[None] | None = None

    def receive(delta: TokenDelta) -> None:
        nonlocal aborting
        if delta.index not in unfinished:
            return
        ids = sampled[delta.index]
        ids += delta.token_ids.tolist()
        # The text of all tokens decides; the last ones alone are decoded for each new token.
        last = ids[-(window + len(delta.token_ids)) :]
        if _first_stop(decode(last), stop) is None or _first_stop(decode(ids), stop) is None:
            if listen is not None:
                listen(delta)
            return
        unfinished.remove(delta.index)
        if not unfinished:
            # A listener is called and not awaited.
            aborting = asyncio.ensure_future(abort([request.request_id]))

    yield receive
    if aborting is not None:
        with suppress(EngineError):
            await aborting


def _first_stop(text: str, stop: Sequence[str]) -> str | None:
    found = [(position, string) for string in stop if (position := text.find(string)) >= 0]
    return min(found)[1] if found else None


def _shortest_with_stop(ids: Sequence[int], stop: Sequence[str], decode: Decode) -> int:
    """The length of the shortest prefix whose text has a stop string, which the text of all ids has."""
    # Halving: a beginning that has a stop string has it with every further token, too.
    shorter, enough = 0, len(ids)
    while enough - shorter > 1:
        middle = (shorter + enough) // 2
        if _first_stop(decode(ids[:middle]), stop) is None:
            shorter = middle
        else:
            enough = middle
    return enough
