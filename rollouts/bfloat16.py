"""Arrays of bfloat16, a type that numpy does not have."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from renderers.bfloat16 import bfloat16_to_float32
from transport import wire_type


@wire_type("rollouts.Bfloat16Array")
@dataclass(frozen=True, slots=True, eq=False)
class Bfloat16Array:
    """An array of bfloat16, as numpy has none: `bits`, uint16; `unpack` widens to float32 of the same shape."""

    bits: np.ndarray

    @property
    def nbytes(self) -> int:
        return self.bits.nbytes

    def unpack(self) -> np.ndarray:
        floats = bfloat16_to_float32(self.bits)
        floats.setflags(write=False)
        return floats
