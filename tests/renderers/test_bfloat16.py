"""Conversions between float32 and bfloat16 against torch."""

from __future__ import annotations

import numpy as np
import torch

from renderers.vision.patches import bfloat16_to_float32, float32_to_bfloat16


def test_float32_is_rounded_as_torch_rounds_it() -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32)
    ties = (np.arange(2**16, dtype=np.uint32) << np.uint32(16)) | np.uint32(0x8000)
    floats = np.concatenate([bits, ties, ties - 1, ties + 1]).view(np.float32)
    expected = torch.from_numpy(floats).to(torch.bfloat16).view(torch.uint16).numpy()
    ours = float32_to_bfloat16(floats)
    assert ours.dtype == np.uint16
    is_nan = np.isnan(floats)
    np.testing.assert_array_equal(ours[~is_nan], expected[~is_nan])
    assert np.isnan(bfloat16_to_float32(ours[is_nan])).all()
    assert np.isnan(torch.from_numpy(expected[is_nan]).view(torch.bfloat16).float().numpy()).all()


def test_every_bfloat16_is_widened_to_the_equal_float32_and_comes_back() -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    floats = bfloat16_to_float32(bits)
    np.testing.assert_array_equal(floats, torch.from_numpy(bits).view(torch.bfloat16).float().numpy())
    finite = ~np.isnan(floats)
    np.testing.assert_array_equal(float32_to_bfloat16(floats)[finite], bits[finite])


def test_shapes_stay_also_of_scalars_and_of_views() -> None:
    assert float32_to_bfloat16(np.float32(1).reshape(())).shape == ()
    view = np.ones((4, 6), np.float32)[::2, ::3]
    assert float32_to_bfloat16(view).tolist() == [[0x3F80, 0x3F80]] * 2
    assert bfloat16_to_float32(np.full((2, 1, 3), 0x3F80, np.uint16)).tolist() == [[[1.0] * 3]] * 2
