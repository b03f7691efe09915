"""Packing: budgets hold, nothing is lost or doubled, ranks get equal work, and what is cut or left out is reported."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prefix_trees import distinct_tokens
from training_samples import image, sample, samples_of, sound

from rollouts.training import pack_samples
from rollouts.training.truncation import truncate_sample

MAX_TOKENS, MAX_PATCHES = 12, 24
MEDIA = st.lists(st.sampled_from([("image", 4), ("image", 8), ("video", 4)]), max_size=3)


@st.composite
def mixed_samples(draw):
    drawn = draw(st.lists(st.tuples(st.integers(8, MAX_TOKENS), MEDIA), min_size=1, max_size=14))
    return [
        sample(length, images=[image(patches, modality=modality) for modality, patches in media], name=f"s{number}")
        for number, (length, media) in enumerate(drawn)
    ]


def rows_of(plan):
    return [row for step in plan.steps for row in step]


def patches_of(row):
    return sum(int(np.prod(item[f"{item.modality}_grid_thw"])) for each in row for item, _ in each.media)


def distinct_patches(row):
    items = {
        (each.token_ids[: at.end].tobytes(), *hashes(each, at.end)): item for each in row for item, at in each.media
    }
    return sum(int(np.prod(item[f"{item.modality}_grid_thw"])) for item in items.values())


def hashes(each, end):
    return [item.mm_hash for item, at in each.media if at.offset < end]


def modalities_of(row):
    return {item.modality for each in row for item, _ in each.media}


def is_stand_in(each):
    return each.name == "padding"


@settings(max_examples=60, deadline=None)
@given(mixed_samples(), st.integers(1, 4), st.booleans(), st.sampled_from([None, MAX_PATCHES]), st.booleans())
def test_every_sample_is_in_one_row_and_no_row_exceeds_a_budget(samples, ranks, uniform, max_patches, share):
    """Samples of one length have the same tokens, so that some of them share these, and images."""
    budgets = {"max_tokens": MAX_TOKENS, "max_patches": max_patches}
    plan = pack_samples(samples, **budgets, ranks=ranks, uniform_modality=uniform, share_prefixes=share)
    rows = rows_of(plan)
    assert Counter(each.name for row in rows for each in row if not is_stand_in(each)) == Counter(
        s.name for s in samples
    )
    assert all((distinct_tokens(row) if share else sum(map(len, row))) <= MAX_TOKENS for row in rows)
    assert max_patches is None or all(
        (distinct_patches(row) if share else patches_of(row)) <= max_patches for row in rows
    )
    assert {len(step) for step in plan.steps} == {ranks}
    assert not plan.truncations
    assert not plan.left_out


@settings(max_examples=60, deadline=None)
@given(mixed_samples(), st.integers(1, 4))
def test_with_uniform_modality_all_ranks_of_a_step_run_the_same_vision_towers(samples, ranks):
    """Ranks with and without images in one step wait for each other forever under FSDP."""
    plan = pack_samples(samples, max_tokens=MAX_TOKENS, ranks=ranks, uniform_modality=True)
    for step in plan.steps:
        assert len({frozenset(modalities_of(row)) for row in step}) == 1


def test_a_group_stays_in_one_row_whose_shared_tokens_count_once():
    """Four groups of eight, of 20 tokens that they share and 5 of their own: each is a tree of 60 tokens."""
    prompts = samples_of([20] * 4)
    groups = [
        [continued(prompt, sample(5, seed=10 + n), f"{index}") for n in range(8)]
        for index, prompt in enumerate(prompts)
    ]
    mixed = [group[n] for n in range(8) for group in groups]
    plan = pack_samples(mixed, max_tokens=60, ranks=2, hidden_size=4096)
    assert sorted([each.name for each in row] for row in rows_of(plan)) == [[str(index)] * 8 for index in range(4)]
    assert (plan.tokens, plan.distinct_tokens, plan.filled) == (800, 240, 1.0)
    assert "; 800 tokens, 240 of them distinct; " in plan.summary()
    separate = pack_samples(mixed, max_tokens=60, ranks=2, share_prefixes=False)
    assert (separate.tokens, separate.distinct_tokens) == (800, 800)
    assert all(sum(map(len, row)) <= 60 for row in rows_of(separate))


def test_one_group_is_divided_among_ranks_that_would_have_no_work():
    prompt = sample(20)
    group = [continued(prompt, sample(5, seed=10 + n), str(n)) for n in range(8)]
    assert [len(row) for row in rows_of(pack_samples(group, max_tokens=100, ranks=8))] == [1] * 8


def continued(prompt, completion, name):
    columns = {each: np.concatenate([getattr(prompt, each), getattr(completion, each)]) for each in COLUMNS}
    return replace(prompt, **columns, name=name)


def test_the_rows_of_several_images_are_spread_before_an_image_is_repeated():
    samples = [sample(4, images=[image(seed=n)], name=str(n)) for n in range(4)]
    plan = pack_samples(samples, max_tokens=16, ranks=4, uniform_modality=True)
    assert sorted([each.name for each in row] for row in rows_of(plan)) == [["0"], ["1"], ["2"], ["3"]]


@pytest.mark.parametrize("mask", [True, False])
def test_the_frames_of_sounds_and_the_patches_of_images_share_a_budget(mask):
    """A sound has as many frames as its mask, or as its features have columns of frequencies."""
    heard = [sample(20, images=[sound(40, mask=mask, seed=n)], name=str(n)) for n in range(3)]
    seen = sample(20, images=[image(24)], name="seen")
    rows = rows_of(pack_samples([*heard, seen], max_tokens=100, max_patches=64))
    assert sorted(len(row) for row in rows) == [1, 1, 2]
    assert len(rows_of(pack_samples([*heard, seen], max_tokens=100, max_patches=63))) == 4


def test_a_sample_that_is_truncated_ends_before_a_sound_that_does_not_fit_as_a_whole():
    whole = sample(20, images=[sound(8, tokens=3), sound(8, tokens=4, seed=1)], trained=(1, 20))
    for limit, kept in ((20, 2), (8, 2), (7, 1), (4, 1), (3, 0)):
        shorter, truncation = truncate_sample(whole, limit)
        assert len(shorter) == {2: limit, 1: 4, 0: 1}[kept]
        assert truncation.media == (2, kept) == (2, len(shorter.media))
    assert len(truncate_sample(whole, 20, max_patches=8)[0]) == 4


# Balance.


def test_rows_of_equal_tokens_are_balanced_by_their_attention():
    """A row of one sample of 8,000 tokens costs five times as much as one of eight samples of 1,000."""
    lengths = [*[1000] * 16, 8000, *[1000] * 16, 8000]
    plan = pack_samples(samples_of(lengths), max_tokens=8000, ranks=2, hidden_size=64)
    assert [[len(row) for row in step] for step in plan.steps] == [[1, 1], [8, 8], [8, 8]]
    assert plan.imbalance == 0


# Samples that do not fit.


def test_dropped_samples_are_counted_and_the_others_go_on():
    plan = pack_samples(samples_of([9, 4, 20, 5]), max_tokens=8, too_long="drop")
    assert sorted(each.name for row in rows_of(plan) for each in row) == ["s1", "s3"]
    assert [row.name for row in plan.left_out] == ["s0", "s2"]
    assert plan.left_out[0].reason.startswith("it has 9 tokens")
    assert plan.summary().endswith("2 left out")


def test_truncation_reports_a_lost_stop_token():
    """prime-rl #3075: the stop token is cut off, and the model learns never to stop."""
    rows = [sample(10, name="cut", trained=(6, 10)), sample(8, name="fits", trained=(6, 8))]
    plan = pack_samples(rows, max_tokens=8, too_long="truncate")
    (truncation,) = plan.truncations
    assert (truncation.name, truncation.tokens, truncation.trained) == ("cut", (10, 8), (4, 2))
    assert truncation.lost_last_trained
    assert "1 samples truncated, 1 of them without their last trained token" in plan.summary()


def test_a_sample_without_a_trained_token_after_truncation_is_left_out():
    plan = pack_samples([sample(10, name="answer at the end"), *samples_of([3])], max_tokens=8, too_long="truncate")
    assert not plan.truncations
    assert plan.left_out[0].reason.endswith("truncated, it has no trained token")


COLUMNS = ("token_ids", "loss_mask", "logprobs", "advantages")
