"""Truncation: the longest beginning that fits, never a part of an image."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from training_samples import image, sample

from rollouts.engines.protocol import WeightSpan
from rollouts.training import truncate_sample


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([4, 8, 16]), max_size=4), st.integers(1, 25), st.integers(0, 40))
def test_no_image_is_cut_and_no_token_that_fits_is_lost(patches, max_tokens, max_patches):
    whole = sample(20, images=[image(count, seed=n) for n, count in enumerate(patches)], trained=(12, 20))
    shorter, truncation = truncate_sample(whole, max_tokens, max_patches)
    end = len(shorter)
    assert end <= max_tokens
    assert sum(patches[: len(shorter.media)]) <= max_patches
    assert shorter.media == whole.media[: len(shorter.media)]
    assert shorter.token_ids.tolist() == whole.token_ids[:end].tolist()
    assert truncation.tokens == (20, end)
    assert truncation.trained == (8, int(whole.loss_mask[:end].sum()))
    assert truncation.lost_last_trained == (end < 20)
    if end < min(20, max_tokens):
        _, placeholder = whole.media[len(shorter.media)]
        assert placeholder.offset == end
        assert placeholder.end > max_tokens or sum(patches[: len(shorter.media) + 1]) > max_patches


@pytest.mark.parametrize(
    ("end", "spans"), [(20, [("1", 0, 3), ("2", 3, 8)]), (15, [("1", 0, 3)]), (16, [("1", 0, 3), ("2", 3, 4)])]
)
def test_weight_spans_end_with_the_trained_tokens(end, spans):
    whole = replace(sample(20, trained=(12, 20)), weight_spans=(WeightSpan("1", 0, 3), WeightSpan("2", 3, 8)))
    shorter, _ = truncate_sample(whole, end)
    assert [(span.version, span.start, span.end) for span in shorter.weight_spans] == spans
