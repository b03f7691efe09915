"""Upper bounds for one request of an engine."""

from __future__ import annotations

from dataclasses import dataclass

from rollouts.engines.protocol import GenerateRequest
from rollouts.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Upper bounds for `SamplingParams.n` and `max_tokens`, checked before anything is reserved for a request."""

    n: int = 1024
    max_tokens: int = 2**20

    def __post_init__(self) -> None:
        if self.n < 1 or self.max_tokens < 1:
            raise InvalidRequestError("limits", f"a limit below 1 admits no request: {self}")

    def check(self, request: GenerateRequest) -> None:
        """Raise `InvalidRequestError`, naming the field, for a request that exceeds a bound."""
        for name in ("n", "max_tokens"):
            value, limit = getattr(request.sampling, name), getattr(self, name)
            if value > limit:
                raise InvalidRequestError(
                    request.request_id,
                    f"{name} is {value} and this engine takes at most {limit}. Use a smaller one, or give the engine "
                    f"other EngineLimits({name}=...)",
                )
