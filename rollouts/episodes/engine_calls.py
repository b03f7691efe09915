"""Calls of an engine by an episode, with checks of the result."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

from renderers import RendererError
from rollouts.engines.protocol import (
    Completion,
    Engine,
    FinishReason,
    GenerateRequest,
    TokenListener,
    check_result,
    is_streaming,
)
from rollouts.episodes.errors import ends_task
from rollouts.error_texts import describe_exception
from rollouts.errors import EngineFailedError, GenerationInterruptedError, RolloutsError
from rollouts.numbers import whole_number

#: Models pad their embedding by fewer rows than this beyond the tokenizer's ids, and a policy may sample such a row.
_MAX_PADDING = 4096


async def generate_completion(engine: Engine, request: GenerateRequest, vocab_size: int | None) -> Completion:
    """The one completion of a request, which has `n` 1. Raises as `generate_completions`."""
    try:
        result = await engine.generate(request)
        check_result(request, result, vocab_size=vocab_size)
    except BaseException as error:  # noqa: BLE001  raised below
        _raise_engine_error(error, engine, request)
    completion: Completion = result.completions[0]
    if completion.finish_reason is FinishReason.STOP or completion.finish_reason is FinishReason.LENGTH:
        return completion
    check_uninterrupted(request, result.completions)
    return completion


async def generate_completions(
    engine: Engine, request: GenerateRequest, vocab_size: int | None, listen: TokenListener | None = None
) -> list[Completion]:
    """The completions of a request, by index, none of which was interrupted. Raises as `generated`."""
    completions = await generated(engine, request, vocab_size, listen)
    check_uninterrupted(request, completions)
    return completions


async def generated(
    engine: Engine, request: GenerateRequest, vocab_size: int | None, listen: TokenListener | None = None
) -> list[Completion]:
    """The completions of a request, by index. `listen` receives their tokens earlier, if the engine streams them.

    Raises `EngineError`; `EngineFailedError` if the engine raises an exception that is not of this distribution.
    """
    try:
        if listen is not None and is_streaming(engine):
            result = await engine.generate_streamed(request, listen)
        else:
            result = await engine.generate(request)
        check_result(request, result, vocab_size=vocab_size)
    except BaseException as error:  # noqa: BLE001  raised below
        _raise_engine_error(error, engine, request)
    return sorted(result.completions, key=lambda completion: completion.index)


def _raise_engine_error(error: BaseException, engine: Engine, request: GenerateRequest) -> NoReturn:
    """Raise what an episode raises for an exception of its engine, which may be anything."""
    try:
        if isinstance(error, (RolloutsError, RendererError)) or ends_task(error):
            raise error
        text = f"{type(engine).__name__} raised {describe_exception(error)}"
        raise EngineFailedError(request.request_id, text) from error
    finally:
        del error  # it refers to this frame


def check_uninterrupted(request: GenerateRequest, completions: Iterable[Completion]) -> None:
    """Raises `GenerationInterruptedError` for a completion that the engine ended before its end."""
    for completion in completions:
        if completion.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
            raise GenerationInterruptedError(
                request.request_id, f"generation ended with {completion.finish_reason.value!r}"
            )


def known_vocab_size(engine: object, renderer: object) -> int | None:
    """The number of token ids of the model: the engine's `vocab_size`, else the tokenizer's plus padding, else None."""
    engine_size = whole_number(getattr(engine, "vocab_size", None))
    if engine_size is not None:
        return engine_size
    tokenizer = getattr(getattr(renderer, "renderer", renderer), "tokenizer", None)
    tokenizer_size = whole_number(getattr(tokenizer, "vocab_size", None))
    return None if tokenizer_size is None else tokenizer_size + _MAX_PADDING


def expecting_request(engine: Any) -> AbstractContextManager[None]:
    """Announces a request that is being prepared to an engine that batches requests (see `Engine`)."""
    announce = getattr(engine, "expecting_request", nullcontext)
    announcement: AbstractContextManager[None] = announce()
    return announcement
