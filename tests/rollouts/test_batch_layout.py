"""The layouts of a batch: every token of every sample is where `starts` says, and padding is neutral."""

import numpy as np
import pytest
from hypothesis import given, settings
from training_samples import LAYOUTS, LENGTHS, PAD, samples_of

from rollouts.training import TrainingBatch

COLUMNS = {"input_ids": "token_ids", "loss_mask": "loss_mask", "logprobs": "logprobs", "advantages": "advantages"}


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(LENGTHS, LAYOUTS)
def test_every_layout_holds_each_sample_at_its_start_and_neutral_padding_elsewhere(lengths, layout):
    samples = samples_of(lengths)
    batch = TrainingBatch.from_samples(samples, pad_id=PAD, **layout)
    padding = np.ones(batch.input_ids.shape, bool)
    for number, ((row, column), each) in enumerate(zip(batch.starts.tolist(), samples, strict=True)):
        tokens = (row, slice(column, column + len(each)))
        assert padding[tokens].all()
        padding[tokens] = False
        for name, source in COLUMNS.items():
            np.testing.assert_array_equal(getattr(batch, name)[tokens], getattr(each, source))
        assert batch.position_ids[tokens].tolist() == list(range(len(each)))
        assert set(batch.sequence_ids[tokens].tolist()) == {number}
    assert (~batch.attention_mask.numpy() == padding).all()
    assert (batch.input_ids.numpy()[padding] == PAD).all()
    assert (batch.sequence_ids.numpy()[padding] == -1).all()
    for name in ("loss_mask", "logprobs", "advantages", "position_ids"):
        assert not getattr(batch, name).numpy()[padding].any()
    assert batch.input_ids.shape[1] % layout["multiple_of"] == 0
