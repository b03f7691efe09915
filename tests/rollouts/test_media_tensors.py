"""Tensors of the media of a batch: each item's rows, in the order of the samples."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from training_samples import PAD, image, sample, sound

from renderers.media.item import TensorField
from renderers.vision.patches import StillPatches
from rollouts.errors import SampleError
from rollouts.training import TrainingBatch, concatenated_media


def still_image(patches, seed):
    packed = np.random.default_rng(seed).integers(0, 256, (patches, 3, 4), dtype=np.uint8)
    item = image(patches)
    return replace(item, tensors={**item.tensors, "pixel_values": StillPatches(packed, 2)})


def with_tensors(item, **tensors):
    return replace(item, tensors={**item.tensors, **tensors})


def batch_of(*items_of_samples):
    return TrainingBatch.from_samples([sample(9, images=items) for items in items_of_samples], pad_id=PAD)


def test_patches_that_are_stored_once_are_written_for_every_time_slot():
    one, two, three = still_image(4, 1), still_image(8, 2), still_image(4, 3)
    batch = batch_of([one, two], [], [three])
    pixels = concatenated_media(batch, "pixel_values")
    slots = pixels.numpy().reshape(16, 3, 2, 4)
    stored = np.concatenate([item.tensors["pixel_values"].packed for item in (one, two, three)])
    assert pixels.dtype == torch.uint8
    assert (slots == stored[:, :, None]).all()


def test_grids_are_rows_and_a_name_that_no_item_has_gives_nothing():
    batch = batch_of([image(4), image(8)], [])
    assert concatenated_media(batch, "image_grid_thw").tolist() == [[1, 2, 2], [1, 2, 4]]
    assert concatenated_media(batch, "video_grid_thw") is None


def test_arrays_that_do_not_concatenate_are_named_with_their_cure():
    floats = with_tensors(image(4), pixel_values=np.ones((4, 12), np.float32))
    text = (
        r"pixel_values has float32 rows of shape \(12,\) and uint8 rows of shape \(12,\); take the arrays of each item"
    )
    with pytest.raises(SampleError, match=text):
        concatenated_media(batch_of([floats], [image(4)]), "pixel_values")


def test_features_of_sounds_are_stacked_and_padded_as_their_fields_say():
    short, long = sound(3, seed=1), sound(5, seed=2)
    batch = batch_of([short, long], [], [long])
    features, mask = (concatenated_media(batch, name) for name in ("input_features", "feature_attention_mask"))
    assert features.shape == (3, 4, 5)
    assert torch.equal(features[0, :, :3], torch.from_numpy(short["input_features"]))
    assert (features[0, :, 3:] == 0).all()
    assert mask.tolist() == [[1, 1, 1, 0, 0], [1] * 5, [1] * 5]
    unpadded = replace(long, fields=dict.fromkeys(long.tensors, TensorField("batched")))
    other = replace(short, fields=unpadded.fields)
    with pytest.raises(SampleError, match=r"input_features: .*was not seen to pad them.*take the arrays of each"):
        concatenated_media(batch_of([other, unpadded]), "input_features")
