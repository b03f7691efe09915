"""Likely causes by signature: each cause is planted in the sampler of real episodes; noise has none."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from planted_mismatches import (
    after_tokens,
    next_tokens_logprobs,
    normalised_twice,
    random_image,
    report_processed_logprobs,
    sampled,
    scored,
    user,
    with_items,
    with_prompt,
    zeros_for_logprobs,
)
from transformers import AutoModelForImageTextToText, Qwen3MoeConfig, Qwen3MoeForCausalLM

from rollouts import StepResult
from rollouts.engines.protocol import WeightSpan
from rollouts.training import TrainingBatch, diagnose_mismatch, diagnosis_text
from rollouts.training.mismatch import Cause, ComparedTokens, mismatch_report, report_text
from rollouts.training.mismatch.compared import concat_tokens
from rollouts.training.mismatch.signatures import likely_causes

FLOAT32 = 1e-4


@pytest.fixture(scope="module")
def model(tiny_model_dir):
    return AutoModelForImageTextToText.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def other_weights(tiny_model_dir):
    return perturbed(AutoModelForImageTextToText.from_pretrained(tiny_model_dir, dtype=torch.float32).eval(), 0.02)


def perturbed(model, share):
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter += share * parameter.abs().mean() * noise
    return model


def causes(model, samples, **options):
    batch, logprobs = scored(model, samples)
    return mismatch_report(batch, logprobs, **options).likely_causes


def named(model, samples, **options):
    return [likely.cause for likely in causes(model, samples, **options)]


@pytest.fixture(scope="module")
def exact(model, renderer):
    """Samples of a sampler without a fault."""
    return sampled(model, renderer)


def test_no_cause_is_named_where_the_sampler_has_no_fault(model, exact):
    batch, logprobs = scored(model, exact)
    report = mismatch_report(batch, logprobs, noise=FLOAT32, mixture_of_experts=True)
    assert report.max_abs < 1e-5
    assert report.likely_causes == ()


def test_doubled_normalisation_is_named_where_all_images_and_no_text_differ(model, renderer):
    samples = sampled(model, renderer, request=lambda request: with_items(request, normalised_twice))
    (likely,) = causes(model, samples)
    assert likely.cause is Cause.DOUBLED_NORMALISATION
    assert likely.others == (Cause.DROPPED_IMAGE, Cause.SWAPPED_IMAGE)
    assert "tokens before the first one and samples without do not" in likely.evidence


def test_swapped_images_are_named_where_some_images_differ_with_the_image_at_which_it_begins(model, renderer):
    first = [item for seed in (1, 2) for item in prompt_items(renderer, seed)]
    other = {one.mm_hash: replace(another, mm_hash="x" + another.mm_hash) for one, another in (first, first[::-1])}
    samples = sampled(
        model, renderer, request=lambda request: with_items(request, lambda item: other.get(item.mm_hash, item))
    )
    (likely,) = causes(model, samples)
    assert (likely.cause, likely.others) == (Cause.SWAPPED_IMAGE, (Cause.DROPPED_IMAGE,))
    assert all(item.mm_hash[:12] in likely.evidence for item in first)


def prompt_items(renderer, seed):
    from planted_mismatches import ImagesInSomeEpisodes

    return renderer.render(ImagesInSomeEpisodes().reset(seed)).multi_modal_data.media_items["image"]


def test_a_prompt_with_more_text_is_named_wrong_template_and_other_weights_are_not_excluded(model, renderer):
    system = renderer.render_ids([{"role": "system", "content": "You are a helpful assistant."}])
    samples = sampled(model, renderer, request=lambda request: after_tokens(request, system))
    likely = causes(model, samples)
    assert [each.cause for each in likely] == [Cause.WRONG_TEMPLATE, Cause.STALE_WEIGHTS]
    assert [each.others for each in likely] == [(Cause.STALE_WEIGHTS,), (Cause.WRONG_TEMPLATE,)]


def test_a_generation_prompt_that_ends_in_other_tokens_is_named_wrong_template(model, renderer):
    samples = sampled(
        model, renderer, request=lambda request: with_prompt(request, request.prompt_ids[:-1], request.media)
    )
    (likely,) = causes(model, samples)
    assert (likely.cause, likely.others) == (Cause.WRONG_TEMPLATE, ())
    assert "the first token of a turn differs most" in likely.evidence


@pytest.mark.slow
def test_stale_weights_are_named_where_the_difference_grows_with_the_version_lag(model, other_weights, renderer, exact):
    older = sampled(other_weights, renderer)
    mixed = [
        with_version(one if number % 2 else another, "7" if number % 2 else "5")
        for number, (one, another) in enumerate(zip(exact, older, strict=True))
    ]
    (likely,) = causes(model, mixed)
    assert likely.cause is Cause.STALE_WEIGHTS
    assert "lag 0: " in likely.evidence
    assert "lag 2: " in likely.evidence


def with_version(sample, version):
    return replace(sample, weight_spans=(WeightSpan(version, 0, int(sample.loss_mask.sum())),))


def test_stale_weights_of_one_version_are_named_only_beside_a_wrong_template(model, other_weights, renderer):
    one, other = causes(model, sampled(other_weights, renderer), noise=FLOAT32)
    assert (one.cause, other.cause) == (Cause.WRONG_TEMPLATE, Cause.STALE_WEIGHTS)
    assert one.evidence == other.evidence


class ImagesInAllEpisodes:
    """Two turns; every prompt begins with an image, so that no text can be compared."""

    def reset(self, seed):
        return [user(f"Task {seed}?", [random_image(seed)])]

    def step(self, assistant):
        return StepResult([user("Again?")])


ALIKE = (
    Cause.WRONG_TEMPLATE,
    Cause.STALE_WEIGHTS,
    Cause.DOUBLED_NORMALISATION,
    Cause.DROPPED_IMAGE,
    Cause.SWAPPED_IMAGE,
)


def doubled_in_all_samples(model, renderer, **options):
    samples = sampled(
        model,
        renderer,
        request=lambda request: with_items(request, normalised_twice),
        environment=ImagesInAllEpisodes,
        **options,
    )
    batch, logprobs = scored(model, samples)
    return mismatch_report(batch, logprobs, noise=FLOAT32)


def test_wrong_images_in_every_sample_are_no_less_likely_than_a_wrong_template(model, renderer):
    report = doubled_in_all_samples(model, renderer)
    likely = report.likely_causes
    assert tuple(each.cause for each in likely) == ALIKE
    assert all({each.cause, *each.others} == set(ALIKE) for each in likely)
    (evidence,) = {each.evidence for each in likely}
    assert "so do wrong images, because nearly every token has one before it" in evidence
    text = report_text(report)
    assert text.count(evidence) == 1
    assert f"one of 5 that look alike: {', '.join(ALIKE)}" in text
    assert all(f"cure of {cause}: {cause.cure}" in text for cause in ALIKE)


def test_two_samples_without_images_are_too_few_to_exclude_wrong_images(model, renderer):
    report = doubled_in_all_samples(model, renderer)
    without = doubled_in_all_samples(model, renderer, seeds=[0]).compared
    text_only = replace(without, item=np.full_like(without.item, -1), trainer=without.sampler)
    causes_of_all = likely_causes(concat_tokens([report.compared, text_only]), noise=FLOAT32)
    assert tuple(each.cause for each in causes_of_all) == ALIKE


def differing_first_tokens(item):
    """24 turns of 12 tokens whose first token differs by 2 nats and whose others by 0.01."""
    turn_position = np.tile(np.arange(12, dtype=np.int32), 24)
    rng = np.random.default_rng(0)
    noise = rng.standard_normal(len(turn_position)) * np.where(turn_position == 0, 2.0, 0.01)
    trainer = -rng.exponential(2.0, len(turn_position))
    sample = np.repeat(np.arange(24, dtype=np.int32), 12)
    zeros = np.zeros_like(sample)
    return ComparedTokens(
        sampler=(trainer + noise).astype(np.float32),
        trainer=trainer.astype(np.float32),
        sample=sample,
        position=turn_position,
        turn=zeros,
        turn_position=turn_position,
        item=np.full_like(sample, item),
        version=zeros,
        names=tuple(map(str, range(24))),
        media_hashes=("a",),
        media_modalities=("image",),
        versions=("1",),
    )


def test_first_tokens_that_differ_most_are_a_wrong_template_or_wrong_images_where_all_samples_have_images():
    assert [each.cause for each in likely_causes(differing_first_tokens(item=-1))] == [Cause.WRONG_TEMPLATE]
    alike = [Cause.WRONG_TEMPLATE, Cause.DOUBLED_NORMALISATION, Cause.DROPPED_IMAGE, Cause.SWAPPED_IMAGE]
    assert [each.cause for each in likely_causes(differing_first_tokens(item=0))] == alike


@pytest.mark.parametrize("temperature", [0.6, 1.6])
def test_a_sampler_that_divides_by_the_temperature_is_named_with_the_temperature(
    model, renderer, temperature, monkeypatch
):
    report_processed_logprobs(monkeypatch)
    (likely,) = causes(model, sampled(model, renderer, temperature=temperature))
    assert likely.cause is Cause.WRONG_TEMPERATURE
    assert f"temperature of {temperature:.2f}" in likely.evidence


def test_a_temperature_is_no_likelier_than_older_weights_where_all_tokens_are_from_such(model, renderer, monkeypatch):
    report_processed_logprobs(monkeypatch)
    behind = [with_version(sample, "3") for sample in sampled(model, renderer, temperature=0.6)]
    likely = causes(model, behind, trainer_version="5")
    assert [each.cause for each in likely] == [
        Cause.WRONG_TEMPERATURE,
        Cause.PROCESSED_LOGPROBS,
        Cause.STALE_WEIGHTS,
    ]
    assert len({each.evidence for each in likely}) == 1
    (likely,) = causes(model, behind, trainer_version="3")
    assert likely.cause is Cause.WRONG_TEMPERATURE


def test_older_weights_that_look_like_a_temperature_are_named_stale_beside_tokens_of_equal_weights(
    model, renderer, exact, monkeypatch
):
    report_processed_logprobs(monkeypatch)
    behind = [with_version(sample, "3") for sample in sampled(model, renderer, temperature=0.6)]
    (likely,) = causes(model, [*behind * 4, *(with_version(sample, "5") for sample in exact[:3])], trainer_version="5")
    assert likely.cause is Cause.STALE_WEIGHTS


def test_log_probabilities_after_top_p_are_named_processed(model, renderer, monkeypatch):
    report_processed_logprobs(monkeypatch)
    (likely,) = causes(model, sampled(model, renderer, top_p=0.9))
    assert likely.cause is Cause.PROCESSED_LOGPROBS
    assert "a share of up to 10% was cut off" in likely.evidence


@pytest.mark.parametrize(
    ("completion", "cause"),
    [(next_tokens_logprobs, Cause.SHIFTED_LOGPROBS), (zeros_for_logprobs, Cause.MISSING_LOGPROBS)],
)
def test_shifted_and_missing_log_probabilities_are_named(model, renderer, completion, cause):
    assert named(model, sampled(model, renderer, completion=completion)) == [cause]


# Models that route tokens to experts.


class TextOnly:
    """Two turns without images."""

    def reset(self, seed):
        return [user(f"Task {seed}?")]

    def step(self, assistant):
        return StepResult([user("Again?")])


@pytest.fixture(scope="module")
def experts():
    config = Qwen3MoeConfig(
        vocab_size=288,
        hidden_size=64,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        initializer_range=0.1,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Qwen3MoeForCausalLM(config).eval()


@pytest.fixture(scope="module")
def other_routing(experts, renderer):
    """Samples of a sampler whose routers have weights in bfloat16, so that near ties select other experts."""
    sampler = copy.deepcopy(experts)
    with torch.no_grad():
        for name, parameter in sampler.named_parameters():
            if name.endswith("mlp.gate.weight"):
                parameter.copy_(parameter.bfloat16())
    return sampled(sampler, renderer, environment=TextOnly)


def test_routing_to_other_experts_is_named_for_a_model_that_routes(experts, other_routing):
    (likely,) = causes(experts, other_routing, noise=FLOAT32, mixture_of_experts=True)
    assert likely.cause is Cause.MOE_ROUTING
    assert causes(experts, other_routing) == ()


def test_the_diagnosis_knows_from_the_configuration_that_a_model_routes_and_suggests_it(experts, other_routing):
    diagnosis = diagnose_mismatch(experts, TrainingBatch.from_samples(other_routing, pad_id=0))
    assert diagnosis.causes == ()
    assert len(diagnosis.unexplained) == 8
    assert "the log-probabilities alone suggest MoE routing" in diagnosis_text(diagnosis)


def test_no_routing_is_named_where_a_model_that_routes_has_no_mismatch(experts, renderer):
    samples = sampled(experts, renderer, environment=TextOnly)
    assert causes(experts, samples, noise=FLOAT32, mixture_of_experts=True) == ()


# No cause where there is none.


def noise_shapes(rng, count, shape, scale):
    """Differences float64 (count,) without a cause: their scale and heaviness of tails vary, their sign does not."""
    drawn = {
        "normal": rng.standard_normal,
        "laplace": rng.laplace,
        "heavy tails": rng.standard_cauchy,
        "few tokens": lambda size: rng.standard_normal(size) * (rng.random(size) < 0.03) * 30,
        "uniform": rng.uniform,
    }[shape]
    return scale * (drawn(-1, 1, count) if shape == "uniform" else drawn(size=count))


@given(
    seed=st.integers(0, 2**32 - 1),
    shape=st.sampled_from(["normal", "laplace", "heavy tails", "few tokens", "uniform"]),
    scale=st.sampled_from([1e-7, 1e-5, 1e-3, 3e-2]),
    rows=st.integers(1, 40),
    tokens_per_row=st.integers(1, 40),
    relative=st.booleans(),
    per_row=st.booleans(),
    same_logprob=st.booleans(),
)
def test_no_cause_is_named_for_noise_of_any_shape(
    seed, shape, scale, rows, tokens_per_row, relative, per_row, same_logprob
):
    rng = np.random.default_rng(seed)
    count = rows * tokens_per_row
    sample = np.repeat(np.arange(rows), tokens_per_row)
    trainer = np.full(count, -5.0) if same_logprob else -rng.exponential(rng.choice([0.1, 1.0, 4.0]), count)
    noise = noise_shapes(rng, count, shape, scale)
    if relative:  # tokens of low probability differ more
        noise *= np.clip(np.abs(trainer), 0, 3)
    if per_row:
        noise *= np.exp(0.5 * rng.standard_normal(rows))[sample]
    noise *= min(1, 0.03 / max(np.median(np.abs(noise)), 1e-9))  # more is more than arithmetic explains
    turn_of_row = np.arange(tokens_per_row) * 2 // tokens_per_row
    turn = np.tile(turn_of_row, rows)
    tokens = ComparedTokens(
        sampler=(trainer + noise).astype(np.float32),
        trainer=trainer.astype(np.float32),
        sample=sample.astype(np.int32),
        position=np.tile(np.arange(tokens_per_row), rows).astype(np.int32),
        turn=turn.astype(np.int32),
        turn_position=np.tile(np.arange(tokens_per_row) - (tokens_per_row + 1) // 2 * turn_of_row, rows).astype(
            np.int32
        ),
        item=(sample % 4 - 1).astype(np.int32),
        version=(sample % 3).astype(np.int32),
        names=tuple(map(str, range(rows))),
        media_hashes=("a", "b", "c"),
        media_modalities=("image", "image", "video"),
        versions=("1", "2", "3"),
    )
    assert likely_causes(tokens) == ()


def test_too_few_tokens_have_no_cause_however_large_the_difference(model, renderer):
    samples = sampled(model, renderer, request=lambda request: with_items(request, normalised_twice), seeds=[1])
    batch, logprobs = scored(model, samples)
    report = mismatch_report(batch, logprobs)
    assert report.max_abs > 0.01
    assert report.likely_causes == ()
