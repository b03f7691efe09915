"""Completions that a pause of a server cuts off are continued from their tokens."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from rollouts.engines.continuation import continuation, join_completions, restarts_from_prompt
from rollouts.engines.protocol import Completion, FinishReason, GenerateRequest
from rollouts.errors import EngineError

log = logging.getLogger("rollouts.engines.http")


@dataclass(frozen=True, slots=True)
class ResumePolicy:
    """How completions that a pause aborts are continued.

    They wait until the server runs again, at most `wait_seconds`, and are continued, each at most `rounds` times. The
    server is polled first after `first_poll_seconds`, later at most every `longest_poll_seconds`.
    """

    rounds: int = 64
    wait_seconds: float = 3600.0
    first_poll_seconds: float = 0.05
    longest_poll_seconds: float = 1.0


async def completed(
    request: GenerateRequest,
    partial: Completion,
    *,
    rounds: int,
    max_model_len: Callable[[], Awaitable[int]],
    is_aborted: Callable[[], bool],
    wait_until_resumed: Callable[[], Awaitable[None]],
    send: Callable[[GenerateRequest], Awaitable[Completion]],
) -> Completion:
    """The completion `partial` of a request with what is sampled after each abort by the server.

    `is_aborted` says whether the caller ended the request, which then keeps the tokens so far. `wait_until_resumed`
    returns when the server runs again, or the caller has ended the request. `send` samples one completion. Raises
    `EngineError` after `rounds` aborts, and what the functions raise.
    """
    done = 0
    while partial.finish_reason is FinishReason.ABORT and not is_aborted():
        done += 1
        if done > rounds:
            raise EngineError(
                request.request_id,
                f"completion {partial.index} was aborted {rounds} times without an end; "
                "pause the server less often, or raise ResumePolicy.rounds",
            )
        await wait_until_resumed()
        if is_aborted():
            return partial
        rest_request = continuation(request, partial, done, await max_model_len())
        if rest_request is None:
            return replace(partial, finish_reason=FinishReason.LENGTH)  # aborted at its last possible token
        log.info("request %s: cut off after %d tokens; continued", request.request_id, len(partial.token_ids))
        rest = await send(rest_request)
        if restarts_from_prompt(request):
            partial = replace(rest, index=partial.index)
        else:
            partial = join_completions(partial, rest)
    return partial
