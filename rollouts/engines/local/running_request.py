"""A request inside the engine: what was asked for, who listens to its tokens, and whether it is to end early."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rollouts.engines.protocol import Completion, FinishReason, GenerateRequest, GenerateResult, TokenListener

if TYPE_CHECKING:
    from rollouts.engines.local.adapters import LocalAdapter


@dataclass(slots=True, eq=False)
class RunningRequest:
    """`listen` is called on the worker thread with each new token. `is_aborted` may be set by any thread.

    `adapter` samples it; None: the model alone. `runs_alone`: the model has failed in a batch with this request and
    others, one of which is the reason.
    """

    request: GenerateRequest
    listen: TokenListener | None = None
    adapter: LocalAdapter | None = None
    is_aborted: bool = False
    runs_alone: bool = False


def without_tokens(request: GenerateRequest) -> GenerateResult:
    """The result of a request that was aborted before it began."""
    completions = [
        Completion(number, np.empty(0, np.int32), np.empty(0, np.float32), FinishReason.ABORT)
        for number in range(request.sampling.n)
    ]
    return GenerateResult(request.request_id, completions)
