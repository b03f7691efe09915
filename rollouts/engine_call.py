"""The one place where an episode calls an engine, and where what comes back is checked."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from renderers import RendererError
from rollouts.engines.protocol import Completion, Engine, FinishReason, GenerateRequest, check_result
from rollouts.error_texts import described
from rollouts.errors import EngineError, EngineFailedError, RolloutsError
from rollouts.user_code.calls import failures_as
from rollouts.user_code.numbers import whole_number

#: Models pad their embedding past the tokenizer's ids, by less than this, and a policy may sample such a row.
_MOST_PADDING = 4096


async def sampled_completion(engine: Engine, request: GenerateRequest, vocab_size: int | None) -> Completion:
    """The one completion of a request. Raises `EngineError`, `EngineFailedError` for what else an engine raises."""
    with failures_as(
        lambda error: EngineFailedError(request.request_id, f"{type(engine).__name__} raised {described(error)}"),
        passing=(RolloutsError, RendererError),
    ):
        result = await engine.generate(request)
        check_result(request, result, vocab_size=vocab_size)
        (completion,) = result.completions
    if completion.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
        raise EngineError(request.request_id, f"generation ended with {completion.finish_reason.value!r}")
    return completion


def known_vocab_size(engine: object, renderer: object) -> int | None:
    """How many ids the model has: what the engine says (`vocab_size`), else the tokenizer's and padding, else None."""
    stated = whole_number(getattr(engine, "vocab_size", None))
    if stated is not None:
        return stated
    tokenizer = getattr(getattr(renderer, "renderer", renderer), "tokenizer", None)
    of_tokenizer = whole_number(getattr(tokenizer, "vocab_size", None))
    return None if of_tokenizer is None else of_tokenizer + _MOST_PADDING


def expecting_request(engine: Any) -> AbstractContextManager[None]:
    """Tells an engine that collects requests into batches that another one is being prepared (see `Engine`)."""
    announce = getattr(engine, "expecting_request", nullcontext)
    announced: AbstractContextManager[None] = announce()
    return announced
