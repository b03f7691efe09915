"""Samples with sounds: each trainer's type carries them, or refuses them by name with the reason."""

import io
import sys
from types import ModuleType

import numpy as np
import pytest
import torch
from transformers import Qwen2AudioForConditionalGeneration

from renderers import build_training_sample
from renderers.media.samples import wav_bytes
from rollouts.training import TrainingBatch, sample_from_rendered, sft_loss, token_logprobs
from rollouts.training.adapters import (
    AdapterError,
    dataset_row,
    row_features,
    sample_from_row,
    skyrl_training_batch,
    trl_grpo_inputs,
    trl_sft_batch,
    verl_data_proto,
)

RATE = 16_000


def tone(seed, seconds=0.4):
    return np.random.default_rng(seed).uniform(-0.5, 0.5, round(seconds * RATE)).astype(np.float32)


@pytest.fixture(scope="module")
def samples(hearing):
    """A sample of text, one with an array of samples, one with an array of stereo int16 at 44.1 kHz and a file."""
    stereo = (np.random.default_rng(3).uniform(-0.5, 0.5, (9000, 2)) * 32767).astype(np.int16)
    given = [
        [],
        [{"audio": tone(1), "sampling_rate": RATE}],
        [{"audio": stereo, "sampling_rate": 44_100}, {"audio": wav_bytes(tone(2), RATE)}],
    ]
    made = []
    for number, sounds in enumerate(given):
        parts = [*({"type": "audio", **sound} for sound in sounds), {"type": "text", "text": "?"}]
        messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": "yes"}]
        made.append(sample_from_rendered(build_training_sample(hearing, messages), name=str(number)))
    return made


@pytest.mark.slow
def test_a_collated_batch_of_sounds_has_the_loss_of_our_log_probabilities(samples, tiny_audio_dir):
    model = Qwen2AudioForConditionalGeneration.from_pretrained(tiny_audio_dir, dtype=torch.float32).eval()
    collated = trl_sft_batch(samples, pad_id=0, type_ids=None)
    assert collated["input_features"].shape[0] == collated["feature_attention_mask"].shape[0] == 3
    batch = TrainingBatch.from_samples(samples, pad_id=0)
    with torch.no_grad():
        ours = sft_loss(token_logprobs(model, batch), batch.loss_mask)
        assert model(**collated).loss.item() == pytest.approx(ours.item(), abs=1e-4)


def test_rows_of_a_dataset_keep_sounds_as_files_that_datasets_can_decode(samples, hearing):
    datasets = pytest.importorskip("datasets")
    soundfile = pytest.importorskip("soundfile")
    rows = datasets.Dataset.from_list([dataset_row(sample) for sample in samples], features=row_features())
    for row, sample in zip(rows, samples, strict=True):
        back = sample_from_row(row, hearing.processors)
        assert back.token_ids.tolist() == sample.token_ids.tolist()
        assert [at for _, at in back.media] == [at for _, at in sample.media]
        for (item, _), (original, _) in zip(back.media, sample.media, strict=True):
            assert all(np.array_equal(item[name], original[name]) for name in original)
    decoded, rate = soundfile.read(io.BytesIO(rows[1]["sounds"][0]["bytes"]), dtype="float32")
    assert (rate, decoded.tolist()) == (RATE, tone(1).tolist())
    with pytest.raises(AdapterError, match=r"sounds: .* each of 1 ranges"):
        sample_from_row({**rows[1], "sounds": []}, hearing.processors)


def test_verl_has_the_features_of_each_row(samples, load_without_init, monkeypatch):
    ray = ModuleType("ray")
    ray.ObjectRef = object
    monkeypatch.setitem(sys.modules, "ray", ray)
    types = load_without_init("verl.protocol", "verl", "verl.utils")
    inputs = verl_data_proto(samples, pad_id=0, mrope=False, types=types).non_tensor_batch["multi_modal_inputs"]
    assert [len(row.get("input_features", ())) for row in inputs] == [0, 1, 2]


@pytest.mark.parametrize("adapter", [trl_grpo_inputs, skyrl_training_batch])
def test_types_with_fields_for_images_only_refuse_sounds_by_name(samples, adapter):
    with pytest.raises(AdapterError, match="sample 1: media: its media have the tensor input_features; the type has"):
        adapter(samples, pad_id=0)
