"""The mismatch report: figures worked out by hand, groups, outliers, text and thresholds."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from renderers import PlaceholderRange
from rollouts.engines.protocol import WeightSpan
from rollouts.errors import RolloutsError
from rollouts.training import TrainingBatch, TrainingSample
from rollouts.training.mismatch import (
    MismatchReport,
    check_mismatch,
    merge_reports,
    mismatch_report,
    report_text,
)
from transport import decode, encode


def sample(mask, sampler, *, name="s", media=(), versions=()):
    """A row of ids 10, 11...; `sampler` are the log-probabilities of the trained tokens."""
    mask = np.array(mask, dtype=bool)
    logprobs = np.zeros(len(mask), np.float32)
    logprobs[mask] = sampler
    ids = np.arange(10, 10 + len(mask), dtype=np.int32)
    return TrainingSample(ids, mask, logprobs, np.zeros_like(logprobs), media, versions, name)


def compared(samples, trainer, **layout):
    """The report of samples whose trained tokens have the log-probabilities `trainer`, one list a sample."""
    options = {key: layout.pop(key) for key in ("trainer_version",) if key in layout}
    batch = TrainingBatch.from_samples(samples, pad_id=0, **layout)
    logprobs = torch.full(batch.loss_mask.shape, 99.0)
    for number, values in enumerate(trainer):
        logprobs[batch.loss_mask & (batch.sequence_ids == number)] = torch.tensor(values)
    return mismatch_report(batch, logprobs, **options)


def figures(report):
    groups = (report.by_turn, report.by_modality, report.by_lag, report.by_image, report.by_sample)
    return report.statistics, groups, [(one.sample, one.position, one.difference) for one in report.outliers]


def test_figures_are_over_trained_tokens_only_and_name_the_worst_sample():
    samples = [sample([0, 1, 1], [-1.0, -2.0], name="a"), sample([0, 1], [-3.0], name="b")]
    report = compared(samples, [[-1.5, -2.0], [-2.0]])
    assert (report.tokens, report.max_abs, report.outliers[0].sample) == (3, 1.0, "b")
    assert report.mean_abs == pytest.approx(0.5)
    assert report.statistics.k1 == pytest.approx((0.5 + 0.0 - 1.0) / 3)
    k3 = [math.exp(-0.5) - 1 + 0.5, 0.0, math.exp(1.0) - 1 - 1.0]
    assert report.statistics.k3 == pytest.approx(sum(k3) / 3)
    assert [(group.label, group.statistics.max_abs) for group in report.by_sample] == [("a", 0.5), ("b", 1.0)]


def test_a_log_probability_that_is_not_a_number_counts_as_infinite_and_passes_no_threshold():
    report = compared([sample([0, 1, 1], [-1.0, -1.0], name="a")], [[math.nan, -1.0]])
    assert report.max_abs == report.mean_abs == report.statistics.k3 == math.inf
    assert report.outliers[0].sample == "a"
    assert report.outliers[0].difference == math.inf
    with pytest.raises(RolloutsError, match="max_abs inf is above"):
        check_mismatch(report, max_abs=1e9)


def test_groups_are_turns_and_version_lags():
    versions = (WeightSpan("3", 0, 1), WeightSpan("5", 1, 3))
    first = sample([0, 1, 0, 1, 1], [0, 0, 0], versions=versions)
    report = compared([first, sample([0, 1], [0], versions=(WeightSpan("5", 0, 1),))], [[-0.1, -0.2, -0.4], [-0.8]])
    assert [(g.label, g.statistics.tokens) for g in report.by_turn] == [("turn 0", 2), ("turn 1", 2)]
    assert [g.statistics.max_abs for g in report.by_turn] == pytest.approx([0.8, 0.4])
    assert [(g.label, g.statistics.tokens) for g in report.by_lag] == [("lag 0", 3), ("lag 2", 1)]
    later = compared([first], [[-0.1, -0.2, -0.4]], trainer_version=6)
    assert [g.label for g in later.by_lag] == ["lag 1", "lag 3"]


def test_versions_without_an_order_are_groups_by_name_and_have_no_lag():
    report = compared([sample([0, 1], [0], versions=(WeightSpan("step-a", 0, 1),))], [[-0.1]])
    assert [g.label for g in report.by_lag] == ["version step-a"]
    assert compared([sample([0, 1], [0])], [[-0.1]]).by_lag == ()
    too_long = compared([sample([0, 1], [0], versions=(WeightSpan("9" * 5000, 0, 1),))], [[-0.1]])
    assert [g.label[:11] for g in too_long.by_lag] == ["version 999"]


def test_a_token_belongs_to_the_last_image_or_video_before_it(renderer):
    colours = [np.full((32, 32, 3), value, np.uint8) for value in (10, 200)]
    parts = [{"type": "image", "image": colour} for colour in colours]
    rendered = renderer.render([{"role": "user", "content": parts}])
    first, second = (item for item, _ in rendered.multi_modal_data.items_with_ranges())
    placed = ((first, PlaceholderRange(2, 4)), (second, PlaceholderRange(7, 4)))
    mask = [0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1]
    shown = sample(mask, [0, 0, 0], media=placed)
    report = compared([shown, sample([0, 1], [0])], [[-0.1, -0.2, -0.4], [-0.8]])
    assert report.compared.item.tolist() == [-1, 0, 1, -1]
    assert [(g.label, g.statistics.tokens) for g in report.by_modality] == [("text", 2), ("image", 2)]
    assert [g.label for g in report.by_image] == [first.mm_hash, second.mm_hash]
    merged = merge_reports([compared([sample([0, 1], [0])], [[-0.8]]), compared([shown], [[-0.1, -0.2, -0.4]])])
    assert [(g.label, g.statistics.max_abs) for g in merged.by_image] == [
        (g.label, g.statistics.max_abs) for g in report.by_image
    ]


FLOATS = st.floats(-20, 0, width=32)


@pytest.mark.slow
@given(st.lists(st.lists(st.tuples(FLOATS, FLOATS), min_size=1, max_size=5), min_size=1, max_size=6), st.data())
def test_merged_reports_equal_the_report_of_the_whole_batch(values, data):
    samples = [
        sample([0, *[1] * len(row)], [s for s, _ in row], name=str(i), versions=(WeightSpan(str(i % 3), 0, len(row)),))
        for i, row in enumerate(values)
    ]
    trainer = [[t for _, t in row] for row in values]
    cut = data.draw(st.integers(0, len(samples)))
    parts = [slice(0, cut), slice(cut, None)]
    whole = compared(samples, trainer)
    merged = merge_reports([compared(samples[part], trainer[part]) for part in parts if samples[part]])
    assert figures(merged) == figures(whole)


def test_a_report_crosses_the_wire():
    report = compared([sample([0, 1, 1], [-1, -2], name="a")], [[-1.5, -2.0]], trainer_version="4")
    received = decode(encode(report))
    assert figures(received) == figures(report)
    assert received.trainer_version == "4"
    assert merge_reports([]).tokens == MismatchReport().tokens == 0
    assert repr(received) == "<MismatchReport: 2 tokens, mean 2.5e-01, max 5.0e-01, k3 5.3e-02 nats>"


def test_outliers_are_decoded_in_their_context_with_repeated_tokens_once(renderer, tiny_model_dir):
    tokenizer = Tokenizer.from_file(str(tiny_model_dir / "tokenizer.json"))
    ids = tokenizer.encode("ab<|image_pad|><|image_pad|><|image_pad|><|image_pad|>cdxyz").ids
    mask = np.zeros(len(ids), bool)
    mask[-2] = True
    shown = replace(sample(mask, [-1.0], name="e7"), token_ids=np.array(ids, np.int32))
    report = compared([shown], [[-3.0]])
    (outlier,) = report.outliers
    assert (outlier.sample, outlier.position, outlier.difference) == ("e7", len(ids) - 2, 2.0)
    text = report_text(report, decode=renderer.tokenizer.decode)
    assert "sample e7, turn 0, token 9: ab<|image_pad|>(x4)cdx[[y]]z" in text
    assert f"[[ {ids[-2]} ]]" in report_text(report)


def test_the_largest_differences_are_the_outliers():
    report = compared([sample([0, *[1] * 20], [-1.0] * 20)], [[-1.0 - 0.01 * i for i in range(20)]])
    assert [outlier.position for outlier in report.outliers] == list(range(20, 12, -1))
    assert compared([sample([0, 1], [-1.0])], [[-1.0]]).outliers == ()


def test_an_empty_report_is_printed():
    report = mismatch_report(TrainingBatch.from_samples([sample([0, 0], [])], pad_id=0), torch.zeros(1, 2))
    assert (report.tokens, report.max_abs, report.outliers, report.by_turn) == (0, 0.0, (), ())
    assert "0 sampled tokens" in report_text(report)
    check_mismatch(report, max_abs=1e-6)


# Thresholds.


def test_a_figure_above_its_threshold_is_an_error():
    report = compared([sample([0, 1, 1], [-1.0, -2.0], name="a")], [[-1.5, -2.0]])
    check_mismatch(report, max_abs=0.5, mean_abs=0.3, k3=1.0)
    with pytest.raises(RolloutsError, match=r"over 2 tokens: max_abs 5.00e-01 is above 4.00e-01 nats; .*sample a"):
        check_mismatch(report, max_abs=0.4, mean_abs=0.3)
