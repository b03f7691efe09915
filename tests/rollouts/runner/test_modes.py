"""How many groups a mode lets start; what it does with those that are too old is in test_runner_invariants.py."""

import pytest

from rollouts.runner.modes import Asynchronous, Demand, OneStepOffPolicy, Synchronous


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
