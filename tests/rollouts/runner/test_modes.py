"""How many groups a mode lets start, and what it does with samples of each staleness."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollouts.runner.modes import Asynchronous, Demand, OneStepOffPolicy, Synchronous

MODES = [
    Synchronous(),
    OneStepOffPolicy(),
    Asynchronous(0),
    Asynchronous(3),
    Asynchronous(2, "downweight"),
]
modes = pytest.mark.parametrize("mode", MODES, ids=repr)


@pytest.mark.parametrize(
    ("mode", "waiting", "undelivered"),
    [
        (Synchronous(), 0, 0),  # between two batches nothing starts
        (OneStepOffPolicy(), 0, 8),
        (OneStepOffPolicy(), 8, 8),
        (OneStepOffPolicy(), 3, 3),  # those of the batch that are left
        (Asynchronous(3), 0, 24),
        (Asynchronous(0), 0, 0),
    ],
)
def test_after_a_batch_of_8_a_run_is_ahead_by_as_many_batches_as_updates_are_allowed(mode, waiting, undelivered):
    assert mode.max_undelivered(Demand(waiting, 8)) == undelivered


@pytest.mark.slow
@modes
@given(data=st.data(), batch=st.integers(1, 6), updates=st.integers(1, 8))
def test_with_one_update_for_each_batch_and_delivery_in_order_no_sample_is_too_old(mode, data, batch, updates):
    """A run without the runner: groups are sampled when they start, so each is as old as it can be."""
    started: list[int] = []  # the version of each group that is not delivered, in order
    for version in range(updates):
        waiting = batch
        while waiting:
            while len(started) < mode.max_undelivered(Demand(waiting, batch)):
                started.append(version)
            for _ in range(data.draw(st.integers(1, waiting))):
                staleness = version - started.pop(0)
                assert staleness <= mode.max_staleness
                waiting -= 1
        # The trainer trains on the batch, and then the next version comes into use.
        while len(started) < mode.max_undelivered(Demand(0, batch)):
            started.append(version)
