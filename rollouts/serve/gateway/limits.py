"""The upper bounds of a gateway, and the memory of values that count for them."""

import sys
from dataclasses import dataclass

from rollouts.values import Bounded, number_field, whole_field


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayLimits(Bounded):
    """Upper bounds.

    - `max_body_bytes`: of the body of a request, media in base64 included.
    - `max_parts`: messages of a request, parts of their contents, tool calls and tools, together.
    - `max_field_bytes`: of each field that a session keeps: `group_id`, `error`, `metrics`, and the `info` of
      a reward.
    - `body_seconds`: until the body of a request has arrived.
    - `request_seconds`: until a completion is finished; then it is aborted, with HTTP 504.
    - `max_choices`: `n` of a request.
    - `max_sessions`: sessions at a time; further ones are refused with HTTP 503.
    - `max_bytes`: of all sessions together, as estimated from all that they keep: tokens, messages, tools,
      images, the prompts of their last turns, and the fields above; further sessions, completions and infos
      are refused with HTTP 503.
    - `idle_seconds`: a session without a request for so long is evicted.

    Raises `ArgumentError` for counts that are not integers from 1, and for seconds that are not above 0.
    """

    max_body_bytes: int = whole_field(64 * 2**20)
    max_parts: int = whole_field(10_000)
    max_field_bytes: int = whole_field(2**20)
    body_seconds: float = number_field(60.0, above=0)
    request_seconds: float = number_field(1800.0, above=0)
    max_choices: int = whole_field(128)
    max_sessions: int = whole_field(16384)
    max_bytes: int = whole_field(4 * 2**30)
    idle_seconds: float = number_field(3600.0, above=0)


def kept_bytes(*values: object) -> int:
    """The memory that texts, numbers, lists and dicts take, with all that they hold."""
    total, remaining = 0, list(values)
    while remaining:
        value = remaining.pop()
        total += sys.getsizeof(value)
        if isinstance(value, dict):
            remaining += value.keys()
            remaining += value.values()
        elif isinstance(value, list | tuple):
            remaining += value
    return total
