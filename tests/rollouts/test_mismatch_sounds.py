"""Faults of sounds, planted in the sampler: reports show the modality, the diagnosis computes the fault again."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from planted_mismatches import sampled, scored, with_items
from transformers import Qwen2AudioForConditionalGeneration

from rollouts import StepResult
from rollouts.training import TrainingBatch, diagnose_mismatch, mismatch_report
from rollouts.training.mismatch import Cause

RATE = 16_000
SEEDS = range(12)


class SoundsInSomeEpisodes:
    """Two turns. Of three seeds, one has no sound, one has a sound in the first turn, one has a sound in both."""

    def reset(self, seed):
        self.seed = seed
        return [user(f"Task {seed}?", [noise(seed)] * bool(seed % 3))]

    def step(self, assistant):
        return StepResult([user("Again?", [noise(seed + 1000) for seed in [self.seed] if seed % 3 == 2])])


def noise(seed):
    return np.random.default_rng(seed).uniform(-0.5, 0.5, RATE // 2).astype(np.float32)


def user(text, sounds):
    parts = [{"type": "audio", "audio": sound, "sampling_rate": RATE} for sound in sounds]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


@pytest.fixture(scope="module")
def model(tiny_audio_dir):
    model = Qwen2AudioForConditionalGeneration.from_pretrained(tiny_audio_dir, dtype=torch.float32).eval()
    with torch.no_grad():
        model.model.multi_modal_projector.linear.weight.mul_(20)  # so that sounds change the output
    return model


def rendered_item(renderer, sound):
    return renderer.render([user("x", [sound])]).multi_modal_data.media_items["audio"][0]


def with_zeros(item):
    features = {"input_features": np.zeros_like(item["input_features"])}
    return replace(item, mm_hash=f"{item.mm_hash}-zeros", tensors={**item, **features})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "tested"),
    [
        (with_zeros, "sounds replaced by zeros"),
        (lambda item: None, "sounds dropped, their placeholder tokens kept as text"),
    ],
)
def test_faults_of_all_sounds_are_seen_by_modality_and_tested(model, hearing, fault, tested):
    samples = sampled(
        model,
        hearing,
        request=lambda request: with_items(request, fault),
        environment=SoundsInSomeEpisodes,
        seeds=SEEDS,
    )
    batch, logprobs = scored(model, samples)
    report = mismatch_report(batch, logprobs)
    by_modality = {group.label: group.statistics.mean_abs for group in report.by_modality}
    assert by_modality["text"] < 1e-5 < 1e-3 < by_modality["audio"]
    examined = [sample for sample in samples if sample.name.startswith(("e1/", "e4/"))]
    diagnosis = diagnose_mismatch(model, TrainingBatch.from_samples(examined, pad_id=0))
    assert [(found.cause, found.name) for found in diagnosis.causes] == [(Cause.DROPPED_SOUND, tested)]
    assert diagnosis.unexplained == ()


@pytest.mark.slow
def test_a_sound_of_another_sample_is_named(model, hearing):
    items = [rendered_item(hearing, noise(seed)) for seed in (1, 4)]
    other = {one.mm_hash: another for one, another in (items, items[::-1])}
    samples = sampled(
        model,
        hearing,
        request=lambda request: with_items(request, lambda item: other.get(item.mm_hash, item)),
        environment=SoundsInSomeEpisodes,
        seeds=range(6),
    )
    diagnosis = diagnose_mismatch(model, TrainingBatch.from_samples(samples, pad_id=0))
    assert [(found.cause, found.name) for found in diagnosis.causes] == [
        (Cause.SWAPPED_SOUND, "a sound of another sample")
    ]
    assert diagnosis.unexplained == ()
