"""`diagnose_mismatch`: each fault is planted in the sampler or the trainer and confirmed by computing it again."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from family_rows import LoadedFamily
from planted_mismatches import (
    ImagesInSomeEpisodes,
    after_tokens,
    normalised_twice,
    random_image,
    report_processed_logprobs,
    sampled,
    scored,
    user,
    with_items,
    with_pixels,
    with_prompt,
)
from transformers import AutoModelForImageTextToText

from renderers.media.item import PixelScale
from renderers.vision.patches import normalised
from rollouts import StepResult
from rollouts.errors import ArgumentError
from rollouts.training import Hypothesis, TrainingBatch, diagnose_mismatch, diagnosis_text, replace_tokens
from rollouts.training.mismatch import Cause

FEW = range(9)


@pytest.fixture(scope="module")
def model(tiny_model_dir):
    return AutoModelForImageTextToText.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def exact(model, renderer):
    """Samples of a sampler without a fault."""
    return sampled(model, renderer, seeds=FEW)


def diagnosed(model, samples, logprobs=None, **options):
    return diagnose_mismatch(model, TrainingBatch.from_samples(samples, pad_id=0), logprobs, **options)


def confirmed(diagnosis):
    """Names of the causes; every examined sample is explained by one of them."""
    assert diagnosis.unexplained == ()
    assert all(found.after < 1e-5 < found.before for found in diagnosis.causes if found.samples == found.explained)
    return [(found.cause, found.name) for found in diagnosis.causes]


def test_a_batch_without_mismatch_has_no_affected_sample_and_no_cause(model, exact):
    diagnosis = diagnosed(model, exact)
    assert (diagnosis.side, diagnosis.affected, diagnosis.causes) == (None, 0, ())
    assert diagnosis_text(diagnosis).startswith("0 samples differ by more than 2e-04 nats on average")


def not_normalised(item):
    values = item["pixel_values"].astype(np.float32) / 255
    return with_pixels(item, values)


def normalised_by_clip(item):
    mean, std = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
    values = item["pixel_values"].astype(np.float32) / 255
    by_channel = values.reshape(len(values), 3, -1)
    mean, std = (np.array(each, np.float32)[:, None] for each in (mean, std))
    return with_pixels(item, ((by_channel - mean) / std).reshape(values.shape))


def without_images(request):
    ids = list(request.prompt_ids)
    for _, at in reversed(request.media):
        del ids[at.offset : at.end]
    return with_prompt(request, ids, [])


def without_first_token(request):
    return with_prompt(request, request.prompt_ids[1:], [(item, at.shifted(-1)) for item, at in request.media])


def of_items(change):
    return lambda request: with_items(request, change)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("request_of", "cause", "name"),
    [
        (
            of_items(normalised_by_clip),
            Cause.OTHER_NORMALISATION,
            "images normalised with CLIP's image_mean and image_std",
        ),
        (of_items(normalised_twice), Cause.DOUBLED_NORMALISATION, "images rescaled and normalised again"),
        (of_items(not_normalised), Cause.MISSING_NORMALISATION, "images rescaled but not normalised"),
        (of_items(lambda item: None), Cause.DROPPED_IMAGE, "images dropped, their placeholder tokens kept as text"),
        (without_images, Cause.DROPPED_IMAGE, "images dropped with their placeholder tokens"),
        (lambda request: after_tokens(request, [request.prompt_ids[0]]), Cause.WRONG_TEMPLATE, "the first token twice"),
        (without_first_token, Cause.WRONG_TEMPLATE, "without the first token"),
    ],
)
def test_faults_of_all_requests_are_told_apart(model, renderer, request_of, cause, name):
    diagnosis = diagnosed(model, sampled(model, renderer, request=request_of, seeds=FEW))
    affected = 9 if cause is Cause.WRONG_TEMPLATE else 6
    assert confirmed(diagnosis) == [(cause, name)]
    assert (diagnosis.side, diagnosis.affected) == ("sampler", affected)
    text = diagnosis_text(diagnosis)
    assert f"{cause}: {name}, in {len(diagnosis.examined)} samples" in text
    assert f"cure: {cause.cure}" in text


@pytest.mark.slow
def test_an_image_of_another_sample_is_named_with_the_samples_that_have_it(model, renderer):
    items = [
        renderer.render(ImagesInSomeEpisodes().reset(seed)).multi_modal_data.media_items["image"][0] for seed in (1, 4)
    ]
    other = {one.mm_hash: another for one, another in (items, items[::-1])}
    samples = sampled(
        model,
        renderer,
        request=lambda request: with_items(request, lambda item: other.get(item.mm_hash, item)),
        seeds=FEW,
    )
    diagnosis = diagnosed(model, samples)
    assert confirmed(diagnosis) == [(Cause.SWAPPED_IMAGE, "an image of another sample")]
    assert sorted(diagnosis.report.compared.names[index].split("/")[0] for index in diagnosis.examined) == ["e1", "e4"]


@pytest.mark.slow
@pytest.mark.parametrize("scale", [None, PixelScale()])
def test_pixels_without_a_recorded_scale_are_tested_with_the_scale_that_is_given(model, renderer, scale):
    def without_scale(sample):
        floats = [(with_pixels(item, normalised(item, "pixel_values")), at) for item, at in sample.media]
        return replace(sample, media=tuple(floats))

    samples = sampled(model, renderer, request=lambda request: with_items(request, normalised_twice), seeds=FEW)
    diagnosis = diagnosed(model, [without_scale(sample) for sample in samples], pixel_scale=scale)
    assert [found.cause for found in diagnosis.causes] == ([Cause.DOUBLED_NORMALISATION] if scale else [])


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3", "idefics3"])
def test_doubled_normalisation_is_named_for_other_architectures(family, tmp_path):
    loaded = LoadedFamily(family, tmp_path)

    def twice(item):
        return with_pixels(item, (item["pixel_values"] - 0.5) / 0.5)

    samples = sampled(loaded.model, loaded.renderer, request=lambda request: with_items(request, twice), seeds=range(3))
    diagnosis = diagnosed(loaded.model, samples, pixel_scale=PixelScale())
    assert confirmed(diagnosis) == [(Cause.DOUBLED_NORMALISATION, "images normalised twice")]


class TwoImages:
    """Two images in the first turn of each episode."""

    def reset(self, seed):
        return [user("Which?", [random_image(seed), random_image(seed + 100)])]

    def step(self, assistant):
        return StepResult([user("Again?")])


def test_exchanged_images_of_a_sample_are_named(model, renderer):
    def exchanged(request):
        (one, first), (other, second) = request.media
        return with_prompt(request, request.prompt_ids, [(other, first), (one, second)])

    samples = sampled(model, renderer, request=exchanged, seeds=range(2), environment=TwoImages)
    diagnosis = diagnosed(model, samples)
    assert confirmed(diagnosis) == [(Cause.SWAPPED_IMAGE, "images of a sample in another order")]


def test_one_dropped_image_of_two_is_named(model, renderer):
    samples = sampled(
        model,
        renderer,
        request=lambda request: with_prompt(request, request.prompt_ids, request.media[1:]),
        seeds=range(2),
        environment=TwoImages,
    )
    assert [cause for cause, _ in confirmed(diagnosed(model, samples))] == [Cause.DROPPED_IMAGE]


@pytest.mark.slow
def test_a_hypothesis_of_the_caller_names_another_template(model, renderer):
    system = renderer.render_ids([{"role": "system", "content": "You are a helpful assistant."}])
    samples = sampled(model, renderer, request=lambda request: after_tokens(request, system), seeds=FEW)
    unexplained = diagnosed(model, samples)
    assert unexplained.causes == ()
    assert len(unexplained.unexplained) == len(unexplained.examined) == 8
    assert "8 samples are explained by no hypothesis" in diagnosis_text(unexplained)

    with_system = Hypothesis(
        "with a system message", Cause.WRONG_TEMPLATE, lambda sample, items: [replace_tokens(sample, 0, 0, system)]
    )
    diagnosis = diagnosed(model, samples, hypotheses=[with_system])
    assert confirmed(diagnosis) == [(Cause.WRONG_TEMPLATE, "with a system message")]


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.5, 1.7])
def test_the_temperature_of_a_sampler_that_divides_by_it_is_fitted(model, renderer, temperature, monkeypatch):
    report_processed_logprobs(monkeypatch)
    diagnosis = diagnosed(model, sampled(model, renderer, temperature=temperature, seeds=FEW))
    assert confirmed(diagnosis) == [(Cause.WRONG_TEMPERATURE, f"a temperature of {temperature}")]


def test_the_trainer_has_the_fault_where_the_sampler_agrees_and_its_log_probabilities_do_not(model, exact):
    changed = [
        replace(sample, media=tuple((normalised_twice(item), at) for item, at in sample.media)) for sample in exact
    ]
    _, logprobs = scored(model, changed)
    diagnosis = diagnosed(model, exact, logprobs)
    assert diagnosis.side == "trainer"
    assert [cause for cause, _ in confirmed(diagnosis)] == [Cause.DOUBLED_NORMALISATION]


@pytest.mark.slow
def test_two_faults_in_different_samples_are_both_named(model, renderer):
    def change(request):
        if request.media:
            return with_items(request, normalised_twice)
        return after_tokens(request, [request.prompt_ids[0]])

    diagnosis = diagnosed(model, sampled(model, renderer, request=change, seeds=FEW), max_samples=9)
    assert [cause for cause, _ in confirmed(diagnosis)] == [Cause.DOUBLED_NORMALISATION, Cause.WRONG_TEMPLATE]


@pytest.mark.parametrize("scale", [1e-5, 1e-2])
def test_noise_is_no_hypothesis(model, exact, scale):
    rng = np.random.default_rng(0)
    noisy = [
        replace(sample, logprobs=np.where(sample.loss_mask, sample.logprobs + scale * noise, 0).astype(np.float32))
        for sample in exact
        for noise in [rng.standard_t(2, len(sample))]
    ]
    diagnosis = diagnosed(model, noisy, max_samples=3)
    assert diagnosis.causes == ()
    assert diagnosis.affected == (0 if scale < 1e-4 else len(exact))


def test_a_log_probability_that_is_not_finite_is_unexplained(model, exact):
    _, logprobs = scored(model, exact)
    logprobs[0][torch.from_numpy(exact[0].loss_mask).nonzero()[0]] = float("nan")
    diagnosis = diagnosed(model, exact, logprobs)
    assert (diagnosis.side, diagnosis.examined, diagnosis.unexplained) == ("trainer", (0,), (0,))


# Arguments.


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"tolerance": 0}, "tolerance is 0; pass a number of nats above 0"),
        ({"max_samples": 0}, "max_samples is 0; pass an integer of at least 1"),
        ({"logprobs": torch.zeros(1, 2)}, r"shape of logprobs is \(1, 2\)"),
    ],
)
def test_arguments_that_cannot_be_meant_are_refused(model, exact, options, reason):
    with pytest.raises(ArgumentError, match=reason):
        diagnosed(model, exact[:1], **options)


def test_a_hypothesis_whose_variants_have_other_trained_tokens_is_refused_by_name(model, exact):
    def untrained(sample, items):
        return [replace(sample, loss_mask=np.zeros_like(sample.loss_mask), weight_spans=())]

    shifted = [replace(exact[0], logprobs=exact[0].logprobs - exact[0].loss_mask.astype(np.float32))]
    with pytest.raises(ArgumentError, match=r"a variant of 'mine' is .*; keep the 24 trained tokens"):
        diagnosed(model, shifted, hypotheses=[Hypothesis("mine", Cause.WRONG_TEMPLATE, untrained)])


def test_replaced_tokens_move_what_is_after_them_and_nothing_else_changes(exact):
    sample = next(sample for sample in exact if sample.media)
    ((item, at), *_) = sample.media
    longer = replace_tokens(sample, 1, 2, [7, 8, 9])
    assert longer.token_ids.tolist() == [*sample.token_ids[:1], 7, 8, 9, *sample.token_ids[2:]]
    assert longer.media[0] == (item, at.shifted(2))
    assert longer.token_ids[longer.loss_mask].tolist() == sample.token_ids[sample.loss_mask].tolist()
    assert longer.logprobs[longer.loss_mask].tolist() == sample.logprobs[sample.loss_mask].tolist()
    first = int(np.flatnonzero(sample.loss_mask)[0])
    assert replace_tokens(sample, at.offset, at.end).media == sample.media[1:] or len(sample.media) > 1
    for bounds, reason in [
        ((at.offset + 1, at.end), "it cuts the placeholder"),
        ((first - 1, first + 1), f"token {first} of it is trained"),
        ((3, 2), "pass bounds inside"),
        ((0, len(sample) + 1), "pass bounds inside"),
    ]:
        with pytest.raises(ArgumentError, match=reason):
            replace_tokens(sample, *bounds)
