"""Objects that get members of a protocol from an object that they wrap, and what misses one."""

from __future__ import annotations

from typing import Any

import pytest

from rollouts import SamplingParams
from rollouts.errors import ArgumentError
from rollouts.runner import Runner
from rollouts.values import members
from rollouts.workers.protocol import Workers, are_workers

NAMES = {"num_slots", "is_closed", "on_slots_changed", "run", "set_update", "metrics", "close"}


class Wrapper:
    """Passes every use of a public attribute on, as a wrapper that counts or logs calls does."""

    def __init__(self, wrapped: Any) -> None:
        self._wrapped = wrapped

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)


def test_an_object_needs_every_member_of_the_protocol_and_may_have_them_from_another():
    assert members(Workers) == NAMES
    complete = type("Complete", (), dict.fromkeys(NAMES, "here"))
    assert are_workers(complete())
    assert are_workers(Wrapper(complete()))
    assert not are_workers(complete)
    for name in NAMES:
        assert not are_workers(Wrapper(type("Incomplete", (), dict.fromkeys(NAMES - {name}, "here"))()))
        assert not are_workers(type("Disabled", (complete,), {name: None})())


async def test_a_runner_refuses_workers_that_miss_a_member():
    class Partial:
        num_slots = 1

    with pytest.raises(ArgumentError, match="pass Workers"):
        Runner(None, None, None, sampling=SamplingParams(max_tokens=8), workers=Wrapper(Partial()))
