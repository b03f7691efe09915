"""SkyRL's own TrainingInputBatch and TensorList, holding our samples."""

import numpy as np
import pytest
import torch

from renderers.vision.patches import normalised
from rollouts.training.adapters import AdapterError, skyrl_training_batch


@pytest.fixture
def types(load_without_init):
    return load_without_init(
        "skyrl.backends.skyrl_train.training_batch", "skyrl", "skyrl.backends", "skyrl.backends.skyrl_train"
    )


def test_images_are_tensor_lists_that_batch_operations_keep_with_their_rows(types, make_sample):
    samples = [make_sample(1, images=1), make_sample(2, images=3)]
    batch = skyrl_training_batch(samples, pad_id=0, dtype=torch.bfloat16, types=types)
    assert isinstance(batch, types.TrainingInputBatch)
    assert [len(rows) for rows in batch["image_grid_thw"].tensors] == [1, 3]
    for row, sample in enumerate(samples):
        floats = np.concatenate([normalised(item, "pixel_values") for item, _ in sample.media])
        assert torch.equal(batch["pixel_values"][row], torch.from_numpy(floats).bfloat16())
    longer = types.TrainingInputBatch.cat([batch, batch[1:2]])
    assert torch.equal(longer.chunk(2)[1]["pixel_values"][0], batch["pixel_values"][1])
    padded = types.pad_training_input_batch(batch, 2)
    assert not padded["loss_mask"][2:].any()


def test_a_sample_without_a_trained_token_has_no_response(make_sample):
    sample = make_sample(1)
    sample.loss_mask[:] = False
    with pytest.raises(AdapterError, match="episode-1/0: loss_mask: no token is trained"):
        skyrl_training_batch([sample], pad_id=0, types=np)


def test_a_trainer_that_cannot_be_imported_is_an_error_that_names_its_module(make_sample, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "skyrl", None)
    with pytest.raises(ImportError, match=r"skyrl\.backends\.skyrl_train\.training_batch cannot be imported"):
        skyrl_training_batch([make_sample(1)], pad_id=0)
