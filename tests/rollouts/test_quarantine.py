"""Rows that cannot be trained are left out with their reason, and counted."""

import pytest
from training_samples import sample, samples_of

from renderers.errors import MediaDecodeError
from rollouts.errors import BatchError, PixelMismatchError, RolloutsError, SampleError
from rollouts.training import Quarantine


def make(item):
    if isinstance(item, Exception):
        raise item
    return item


def test_a_malformed_sample_does_not_stop_the_batch():
    """prime-rl #3103: one malformed sample stops the run."""
    quarantine = Quarantine()
    good = samples_of([2, 3])
    samples = quarantine.collect([good[0], SampleError("e7/3", "token 4 is wrong"), good[1]], make)
    assert [each.name for each in samples] == ["s0", "s1"]
    assert (len(quarantine), quarantine.seen) == (1, 3)
    assert quarantine.summary() == "1 of 3 rows left out: 1 SampleError (e7/3: sample e7/3: token 4 is wrong)"


def test_each_kind_of_reason_is_counted_and_every_row_is_listed():
    quarantine = Quarantine()
    errors = [*(SampleError(f"r{n}", "bad") for n in range(5)), PixelMismatchError("a", "b")]
    quarantine.collect([*errors, sample(2)], make)
    assert quarantine.counts == {"SampleError": 5, "PixelMismatchError": 1}
    assert len(quarantine.rows) == 6
    assert quarantine.summary().endswith("; and 3 more)")


def test_an_item_may_make_several_samples():
    quarantine = Quarantine()
    assert len(quarantine.collect([samples_of([2, 3]), samples_of([4])], make)) == 3
    assert quarantine.seen == 3
    assert quarantine.summary() == "0 of 3 rows left out"


def test_a_batch_without_any_row_is_an_error():
    with pytest.raises(BatchError, match="no row is left for the batch: 2 of 2 rows left out: 2 SampleError"):
        Quarantine().collect([SampleError("a", "bad"), SampleError("b", "bad")], make)
    assert Quarantine().collect([], make) == []


@pytest.mark.parametrize(
    "error",
    [
        RolloutsError("there is no processor for images. Pass processors=renderer.processors."),
        KeyError("x"),
        ZeroDivisionError(),
    ],
)
def test_an_error_that_concerns_every_row_is_raised(error):
    with pytest.raises(type(error)):
        Quarantine().collect([sample(2), error], make)


def test_images_that_cannot_be_decoded_are_errors_of_one_row():
    quarantine = Quarantine()
    quarantine.collect([MediaDecodeError("no image"), sample(2)], make)
    assert quarantine.counts == {"MediaDecodeError": 1}
