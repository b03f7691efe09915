"""Prefix trees: each distinct token, image and sound is computed once, and the results are those of separate rows."""

import copy
import functools
from dataclasses import replace

import numpy as np
import peft
import pytest
import torch
import transformers
from audio_models import AUDIO_MODELS
from family_rows import LoadedFamily, loaded_family
from hypothesis import given
from hypothesis import strategies as st
from model_families import MEDIA_FAMILIES, TEXT, TEXT_MODELS, text_config, with_seed
from prefix_trees import (
    computed,
    computed_rows,
    difference,
    distinct_items,
    distinct_tokens,
    media_group,
    of_a_wide_model,
    sample,
    text_group,
)
from trainer_checks import SMALL, gradients, random_weights
from transformers import AutoModelForCausalLM

from renderers import PlaceholderRange
from rollouts.engines.local import LocalEngine
from rollouts.errors import ArgumentError, SampleError, UnsupportedModelError
from rollouts.models import forward, forward_pass
from rollouts.models.forward_pass import ForwardPass
from rollouts.models.packing_support import shares_prefixes
from rollouts.training import TrainingBatch, candidate_logprobs, token_logprobs
from rollouts.training.trainer import Trainer

#: Models with layers that carry a state along the row, or whose positions are not given.
WITHOUT_TREES = ("bloom", "mamba", "qwen3_5")
#: Models that encode sounds at their places in the rows.
ENCODED_IN_PLACE = ("qwen2_audio", "music_flamingo", "phi4_multimodal")
LAYOUTS = pytest.mark.parametrize("layout", ["padded", "packed"])


@functools.cache
def text_model(name):
    return with_seed(lambda: AutoModelForCausalLM.from_config(text_config(name)))


def assert_equal_and_once(model, samples, layout, shares=True, once=True):
    """`share_prefixes` changes only what is computed; with `shares` it is every distinct token once."""
    with of_a_wide_model():
        tree = computed(model, samples, layout)
    separate = computed(model, samples, layout, share_prefixes=False)
    assert difference(tree, separate) < 1e-5
    assert separate.tokens == sum(map(len, samples))
    assert tree.tokens < separate.tokens
    if shares:
        assert tree.tokens == distinct_tokens(samples)
    if once:
        assert tree.items == separate.items == distinct_items(samples)


@LAYOUTS
@pytest.mark.parametrize("name", TEXT_MODELS)
def test_a_text_model_computes_each_distinct_token_once_with_the_values_and_gradients_of_separate_rows(name, layout):
    assert_equal_and_once(text_model(name), text_group(), layout, shares=name not in WITHOUT_TREES)


SEEN = [
    pytest.param(name, marks=() if name in ("qwen2_5_vl", "gemma3") else pytest.mark.slow) for name in MEDIA_FAMILIES
]
HEARD = [pytest.param(name, marks=pytest.mark.slow) for name in AUDIO_MODELS]


@LAYOUTS
@pytest.mark.parametrize("name", [*SEEN, *HEARD])
def test_a_model_computes_each_distinct_image_and_sound_once_with_the_values_of_separate_rows(name, layout):
    family = loaded_family(name)
    assert_equal_and_once(
        family.model, media_group(family), layout, name not in WITHOUT_TREES, name not in ENCODED_IN_PLACE
    )


def test_a_model_without_trees_computes_samples_that_begin_others_in_the_rows_of_these():
    """Equal samples and turns of one conversation: that needs no mask, so that layers with a state can do it."""
    model, ids = text_model("mamba"), np.random.default_rng(0).integers(3, 300, 40)
    turns = [sample(ids[:end], trained=begin) for begin, end in ((5, 12), (15, 30), (32, 40), (32, 40))]
    assert_equal_and_once(model, turns, "padded")


# Random trees.


@st.composite
def trees(draw, images):
    """Lists of pieces, each a token of three, a placeholder token that was sampled, or one of `images`; every
    list continues the beginning of an earlier one."""
    pieces = st.lists(st.sampled_from(["a", "b", "c", "literal", *images]), max_size=9)
    drawn = [draw(pieces)]
    for _ in range(draw(st.integers(0, 5))):
        before = draw(st.sampled_from(drawn))
        drawn.append([*before[: draw(st.integers(0, len(before)))], *draw(pieces)])
    return drawn


def sample_of_pieces(pieces, placed, literal):
    """All pieces but images are trained; two tokens behind them always."""
    ids, media = [3], []
    for piece in pieces:
        if piece in placed:
            tokens, item, placeholder = placed[piece]
            media.append((item, placeholder.shifted(len(ids) - placeholder.offset)))
            ids.extend(tokens)
        else:
            ids.append({"a": 70, "b": 71, "c": 72, "literal": literal}[piece])
    return sample([*ids, 73, 74], media)


def bare(rendered):
    """The tokens of an image, the item and its range; with one run of features, without the text around it."""
    ((item, at),) = rendered.media
    at = PlaceholderRange(at.runs[0][0], at.num_embeds) if len(at.runs) == 1 else at
    return rendered.token_ids[at.offset : at.end].tolist(), item, at


@pytest.mark.slow
@LAYOUTS
@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3", "idefics3"])
def test_random_trees_have_the_values_and_gradients_of_separate_rows(name, layout):
    """Forks anywhere, images that touch, one sample the beginning of another, equal samples, a single one."""
    family = loaded_family(name)
    rendered = [family.row("x", [family.pixels(32, 48)]).sample for _ in range(2)]
    items = [bare(each) for each in rendered]
    literal = rendered[0].token_ids[items[0][2].runs[0][0]]

    @given(trees(["first", "second"]))
    def check(drawn):
        samples = [
            sample_of_pieces(each, dict(zip(["first", "second"], items, strict=True)), literal) for each in drawn
        ]
        separate = computed(family.model, samples, layout, share_prefixes=False)
        with of_a_wide_model():
            assert difference(computed(family.model, samples, layout), separate) < 1e-5

    check()


# The power of the comparisons: what is planted is found.


def sibling_is_visible(monkeypatch):
    masks = forward.packed_masks

    def planted(architecture, rows, token_types):
        causal = torch.ones(rows.input_ids.shape[1:] * 2, dtype=torch.bool).tril()
        return {kind: mask.masked_fill(causal, 0.0) for kind, mask in masks(architecture, rows, token_types).items()}

    monkeypatch.setattr(forward, "packed_masks", planted)


def window_counts_along_the_row(monkeypatch):
    masks = forward.packed_masks

    def planted(architecture, rows, token_types):
        made = masks(architecture, rows, token_types)
        outside = torch.ones(rows.input_ids.shape[1:] * 2, dtype=torch.bool).tril(-8)
        sliding = made["sliding_attention"]
        return {**made, "sliding_attention": sliding.masked_fill(outside, torch.finfo(sliding.dtype).min)}

    monkeypatch.setattr(forward, "packed_masks", planted)


def positions_count_along_the_row(monkeypatch):
    laid_out = forward_pass.tree_rows

    def planted(*args, **options):
        rows = laid_out(*args, **options)
        return replace(rows, position_ids=np.arange(rows.input_ids.size).reshape(1, -1))

    monkeypatch.setattr(forward_pass, "tree_rows", planted)


def images_change_places(monkeypatch):
    inputs = forward.media_inputs

    def planted(rows, *args, **options):
        made = inputs(rows, *args, **options)
        return {name: value.flip(0) for name, value in made.items()} if rows.tree else made

    monkeypatch.setattr(forward, "media_inputs", planted)


def trees_divide_images_that_touch(monkeypatch):
    monkeypatch.setattr(forward_pass, "attends_by_types", lambda architecture: False)


@pytest.mark.parametrize(
    "plant",
    [
        sibling_is_visible,
        window_counts_along_the_row,
        positions_count_along_the_row,
        images_change_places,
        trees_divide_images_that_touch,
    ],
)
def test_a_planted_fault_is_found(plant, monkeypatch):
    family = loaded_family("gemma3")
    samples = media_group(family)
    placed = {each: bare(family.row("x", [family.pixels(32, 48)]).sample) for each in ("one", "two")}
    samples += [sample_of_pieces(pieces, placed, 0) for pieces in (["a", "one", "b"], ["a", "one", "two"])]
    separate = computed(family.model, samples, share_prefixes=False)
    with of_a_wide_model():
        assert difference(computed(family.model, samples), separate) < 1e-5
        plant(monkeypatch)
        assert difference(computed(family.model, samples), separate) > 1e-3


# What cannot be shared, or should not.


def shapes(of):
    return [rows.input_ids.shape for rows in of.rows]


@LAYOUTS
def test_samples_that_share_nothing_are_computed_in_the_usual_rows(layout):
    rng = np.random.default_rng(0)
    samples = [sample(rng.integers(3, 300, length)) for length in (20, 30, 25)]
    tree = computed(text_model("llama"), samples, layout)
    assert shapes(tree) == [{"padded": (3, 30), "packed": (1, 75)}[layout]]
    assert tree.rows[0].tree is None


def test_a_beginning_that_is_short_beside_the_rest_is_computed_again():
    """One row of all samples would cost attention more than 20 tokens do."""
    rng = np.random.default_rng(0)
    samples = [sample(np.append(np.arange(20), rng.integers(3, 300, 500))) for _ in range(4)]
    assert shapes(computed(text_model("llama"), samples)) == [(4, 520)]


def test_a_tree_is_divided_at_branches_into_rows_of_at_most_max_row_tokens():
    model, samples = text_model("llama"), text_group()
    separate = computed(model, samples, share_prefixes=False)
    with of_a_wide_model():
        whole, divided = computed(model, samples), computed(model, samples, max_row_tokens=80)
    assert shapes(whole)[0][1] > 80 >= shapes(divided)[0][1]
    assert distinct_tokens(samples) == whole.tokens < divided.tokens < separate.tokens
    assert difference(divided, separate) < 1e-5
    for wrong in (0, -1, 1.5):
        with pytest.raises(ArgumentError, match="max_row_tokens"):
            computed(model, samples, max_row_tokens=wrong)


def test_rows_may_be_padded_to_the_widths_that_attention_on_a_gpu_wants(monkeypatch):
    model, samples = text_model("gemma2"), text_group()
    separate = computed(model, samples, share_prefixes=False)
    laid_out = forward_pass.tree_rows
    monkeypatch.setattr(forward_pass, "tree_rows", lambda *args, **more: laid_out(*args, **{**more, "multiple_of": 64}))
    tree = computed(model, samples)
    assert shapes(tree)[0][1] % 64 == 0
    assert difference(tree, separate) < 1e-5


def test_llama_4_which_scales_scores_along_the_row_gets_rows_that_end_before_that():
    config = text_config("llama4_text")
    config.floor_scale, config.no_rope_layers = 70, [0, 1]
    model = with_seed(lambda: AutoModelForCausalLM.from_config(config))
    samples = text_group()
    separate = computed(model, samples, share_prefixes=False)
    with of_a_wide_model():
        tree = computed(model, samples)
    assert max(map(len, samples)) < shapes(tree)[0][1] < 70
    assert difference(tree, separate) < 1e-5
    samples.append(sample(np.random.default_rng(0).integers(3, 300, 80)))
    assert computed(model, samples).rows[0].tree is None


@pytest.mark.parametrize("name", ["llama4_text", "falcon"])
def test_samples_are_not_computed_in_a_packed_row_along_which_the_model_counts(name):
    if name == "falcon":
        config = transformers.FalconConfig(
            vocab_size=300, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, alibi=True
        )
    else:
        config = text_config(name)
        config.floor_scale, config.no_rope_layers = 70, [0, 1]
    model, found = with_seed(lambda: AutoModelForCausalLM.from_config(config)), []
    for layout in ("padded", "packed"):
        batch = TrainingBatch.from_samples(text_group(), pad_id=0, layout=layout)
        with computed_rows() as rows:
            found.append(token_logprobs(model, batch, share_prefixes=False)[batch.loss_mask])
        assert not rows[0].packed
    assert (found[0] - found[1]).abs().max() < 1e-5


def test_samples_beyond_the_first_factors_of_longrope_are_refused_because_they_change_those_beside_them(tmp_path):
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    options = {**TEXT, "rope_parameters": {**rope, "original_max_position_embeddings": 16}}
    del options["head_dim"]
    config = transformers.Phi3Config(**options, vocab_size=300, original_max_position_embeddings=16)
    model = with_seed(lambda: AutoModelForCausalLM.from_config(config))
    rng = np.random.default_rng(0)
    samples = [sample(rng.integers(3, 300, count), name=f"of {count}") for count in (16, 17)]
    computed(model, samples[:1])
    with pytest.raises(SampleError, match="of 17: it has 17 tokens, and from 16 on LongRoPE"):
        computed(model, samples)
    model.save_pretrained(tmp_path)
    assert Trainer.from_pretrained(tmp_path).max_length == 16
    assert LocalEngine(model).max_model_len == 16


@pytest.mark.slow
def test_sounds_of_phi_4_are_not_shared_where_an_image_behind_them_changes_them():
    family = loaded_family("phi4_multimodal")
    picture, heard = family.pixels(56, 84), family.sound(1.0)
    rows = [family.row("x", images, sounds=[heard]).sample for images in ([], [picture], [picture])]
    tree = computed(family.model, rows)
    assert difference(tree, computed(family.model, rows, share_prefixes=False)) < 1e-5
    assert tree.rows[0].tree is None


def test_where_a_tree_fails_the_usual_rows_are_computed_and_a_warning_says_why(monkeypatch):
    model, samples = text_model("llama"), text_group()
    separate = computed(model, samples, share_prefixes=False)
    computed(model, samples)  # the model is known to compute trees

    def fail(*_):
        raise UnsupportedModelError("llama", "planted")

    monkeypatch.setattr(forward, "packed_masks", fail)
    with pytest.warns(RuntimeWarning, match=r"each sample was computed by itself: .*planted"):
        assert difference(computed(model, samples), separate) == 0


def test_errors_are_those_of_separate_rows():
    model = text_model("llama")
    prompt = np.random.default_rng(0).integers(3, 300, 30)
    rows = [sample(np.append(prompt, token), name=str(token)) for token in (310, 5, 305)]
    candidates = torch.full((3, 31, 2), 5)
    candidates[2, 8, 1] = 300
    usual = [sample(np.append(prompt, token)) for token in (6, 5, 5)]
    found = []
    for share in (True, False):
        with pytest.raises(SampleError) as of_sample:
            token_logprobs(model, TrainingBatch.from_samples(rows, pad_id=0), share_prefixes=share)
        batch = TrainingBatch.from_samples(usual, pad_id=0)
        with pytest.raises(ArgumentError) as of_candidates:
            candidate_logprobs(model, batch, candidates, share_prefixes=share)
        found.append((str(of_sample.value), str(of_candidates.value)))
    assert found[0] == found[1]
    assert "310" in found[0][0]


def test_samples_without_tokens_and_without_trained_tokens_are_in_a_tree_as_well():
    model, samples = text_model("llama"), text_group()
    untrained = [sample(each.token_ids, trained=len(each)) for each in samples]
    assert not token_logprobs(model, TrainingBatch.from_samples(untrained, pad_id=0)).any()
    empty = sample([], trained=0)
    with_empty = [empty, *samples, untrained[0], empty]
    separate = computed(model, with_empty, share_prefixes=False)
    assert difference(computed(model, with_empty), separate) < 1e-5


# Targets, precision, adapters.


def test_candidates_of_samples_that_share_a_position_are_those_of_each_sample():
    model, batch = text_model("llama"), TrainingBatch.from_samples(text_group(), pad_id=0)
    candidates = torch.randint(0, 300, (*batch.input_ids.shape, 3), generator=torch.Generator().manual_seed(0))
    tree, separate = (candidate_logprobs(model, batch, candidates, share_prefixes=share) for share in (True, False))
    assert (tree - separate).abs().max() < 1e-5
    assert separate[batch.loss_mask].abs().min() > 0


def test_bfloat16_differs_as_much_as_other_layouts_of_separate_rows_do():
    model = copy.deepcopy(text_model("qwen3")).bfloat16()
    samples = text_group()
    found = [
        computed(model, samples, layout, share_prefixes=share)
        for layout, share in (("padded", True), ("padded", False), ("packed", False))
    ]
    assert found[0].rows[0].tree
    tree, padded, packed = (each.logprobs[each.logprobs != 0] for each in found)
    assert 0 < (tree - padded).abs().max() < 3 * (padded - packed).abs().max()


@pytest.mark.parametrize("name", ["gemma3", "qwen3_vl"])
def test_an_adapter_has_the_gradients_of_separate_rows(name, tmp_path):
    family = LoadedFamily(name, tmp_path)
    lora = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = peft.get_peft_model(family.model, lora)
    samples = media_group(family)
    with of_a_wide_model():
        tree = computed(model, samples)
    assert tree.rows[0].tree
    assert all("lora_" in name for name in tree.gradients)
    assert difference(tree, computed(model, samples, share_prefixes=False)) < 1e-5


@pytest.mark.parametrize("tokens", [8192, pytest.param(200, marks=pytest.mark.slow)])
def test_a_trainer_shares_the_rows_of_a_group_within_its_passes(tokens, tmp_path):
    family = loaded_family("qwen3_vl")
    data = [random_weights(each, seed) for seed, each in enumerate(media_group(family))]
    found, computed_tokens = [], []
    for share in (True, False):
        trainer = Trainer.from_pretrained(family.directory, device="cpu", tokens_per_pass=tokens, share_prefixes=share)
        trainer.create_model("a", lora=SMALL)
        with computed_rows() as rows, of_a_wide_model():
            result = trainer.forward_backward("a", data, "cross_entropy")
        found.append((result, gradients(trainer, "a", tmp_path / str(share))))
        computed_tokens.append(sum(int(each.attention_mask.sum()) for each in rows))
        assert all(each.input_ids.size <= max(tokens, *map(len, data)) for each in rows)
    (tree, of_tree), (separate, of_separate) = found
    for one, other in zip(tree.logprobs, separate.logprobs, strict=True):
        np.testing.assert_allclose(one, other, atol=3e-6, rtol=0)
    assert tree.metrics["loss:sum"] == pytest.approx(separate.metrics["loss:sum"], abs=1e-4)
    norm = np.sqrt(sum(np.square(each).sum() for each in of_separate.values()))
    assert all(np.linalg.norm(of_tree[name] - each) < 1e-5 * norm for name, each in of_separate.items())
    assert computed_tokens[0] < computed_tokens[1] == sum(map(len, data))
    assert tokens == 200 or computed_tokens[0] == distinct_tokens(data)


def test_a_model_whose_windows_are_columns_of_a_row_computes_no_trees() -> None:
    """The probe has fewer tokens than a window of GPT-Neo, so that it shows no difference."""
    config = transformers.GPTNeoConfig(
        vocab_size=64,
        hidden_size=16,
        num_layers=2,
        attention_types=[[["global", "local"], 1]],
        num_heads=2,
        window_size=32,
    )
    model = transformers.GPTNeoForCausalLM(config)
    assert not shares_prefixes(ForwardPass(model).architecture, with_media=False)
