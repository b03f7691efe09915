"""Calls of an engine by an episode: completions that were not interrupted."""

from collections.abc import Iterable
from contextlib import AbstractContextManager

from renderers import RendererError
from rollouts.engines.protocol import (
    ChatAnswer,
    ChatEngine,
    Completion,
    Engine,
    FinishReason,
    GenerateRequest,
    TokenListener,
    generate_at,
)
from rollouts.engines.result_checks import check_result
from rollouts.episodes.errors import wrap_exceptions
from rollouts.errors import EngineFailedError, GenerationInterruptedError, RolloutsError, describe_exception
from rollouts.values import whole_number


async def generated(
    engine: Engine, request: GenerateRequest, vocab_size: int | None, listen: TokenListener | None = None
) -> list[Completion]:
    """The completions, streamed to `listen` if the engine can. Raises `EngineError`."""
    with naming_engine(engine, request.request_id):
        result = await generate_at(engine, request, listen)
        check_result(request, result, vocab_size=vocab_size)
    return sorted(result.completions, key=lambda completion: completion.index)


def check_uninterrupted(request_id: str, completions: Iterable[Completion | ChatAnswer]) -> None:
    """Raises `GenerationInterruptedError` for a completion that the engine ended before its end."""
    for completion in completions:
        if completion.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
            raise GenerationInterruptedError(request_id, f"generation ended with {completion.finish_reason.value!r}")


def known_vocab_size(engine: Engine, renderer: object) -> int | None:
    """The number of token ids of the model: the engine's `vocab_size`, else the tokenizer's plus padding, else None."""
    if engine.vocab_size is not None:
        return engine.vocab_size
    tokenizer = getattr(getattr(renderer, "renderer", renderer), "tokenizer", None)
    tokenizer_size = whole_number(getattr(tokenizer, "vocab_size", None))
    # Models pad their embedding by fewer rows than this beyond the tokenizer's ids, and a policy may sample such a row.
    return None if tokenizer_size is None else tokenizer_size + 4096


def naming_engine(engine: Engine | ChatEngine, request_id: str) -> AbstractContextManager[None]:
    """Turns an exception that is not of this distribution into an `EngineFailedError`."""
    return wrap_exceptions(
        lambda error: EngineFailedError(request_id, f"{type(engine).__name__} raised {describe_exception(error)}"),
        unchanged=(RolloutsError, RendererError),
    )
