"""Limits are integers from 0 up."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from transport import DecodeLimits


@pytest.mark.parametrize("value", [math.nan, math.inf, 1.5, "5", None, True, -1, np.float64(3)], ids=repr)
@pytest.mark.parametrize("name", ["max_total_bytes", "max_depth"])
def test_a_limit_that_is_no_integer_from_0_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"DecodeLimits\.{name} is .* must be"):
        DecodeLimits(**{name: value})


def test_integers_of_numpy_are_limits() -> None:
    assert DecodeLimits(max_frames=np.int64(5)) == DecodeLimits(max_frames=5)
