"""float32 <-> the bit patterns of bfloat16, a type that numpy does not have."""

from __future__ import annotations

import numpy as np


def float32_to_bfloat16(floats: np.ndarray) -> np.ndarray:
    """Floats of any shape -> uint16 bit patterns of that shape: float32 rounded to nearest, ties to even.

    Equal to torch's `.to(torch.bfloat16)`; every NaN becomes 0x7FC0, as there.
    """
    floats = floats.astype(np.float32, copy=False)
    bits = floats.view(np.uint32)
    rounded = np.asarray((bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    # Rounding would carry a NaN whose upper bits are all set into zero or infinity.
    rounded[np.isnan(floats)] = 0x7FC0
    return rounded


def bfloat16_to_float32(bits: np.ndarray) -> np.ndarray:
    """uint16 bit patterns of any shape -> the float32 values they stand for, of that shape."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
