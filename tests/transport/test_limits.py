"""Limits are integers, and arguments for limits are DecodeLimits."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from transport import (
    DecodeLimits,
    RecordReader,
    RecordWriter,
    decode,
    decode_frames,
    encode,
    encode_frames,
    repair_record_file,
)


@pytest.mark.parametrize("value", [math.nan, math.inf, 1.5, "5", None, True, -1, np.float64(3)], ids=repr)
@pytest.mark.parametrize("name", ["max_total_bytes", "max_depth"])
def test_a_limit_that_is_no_integer_from_0_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"DecodeLimits\.{name} is .* must be"):
        DecodeLimits(**{name: value})


def test_integers_of_numpy_are_limits() -> None:
    assert DecodeLimits(max_frames=np.int64(5)) == DecodeLimits(max_frames=5)


def test_limits_of_another_type_are_an_error_that_names_them(tmp_path: Path) -> None:
    path = tmp_path / "records.mmr"
    with RecordWriter(path) as writer:
        writer.append(1)
    calls: list[Callable[..., Any]] = [
        lambda limits: decode(encode(1), limits=limits),
        lambda limits: decode_frames(encode_frames(1), limits=limits),
        lambda limits: RecordReader(path, limits=limits),
        lambda limits: repair_record_file(path, limits=limits),
    ]
    for call in calls:
        for limits in (None, 5, {}):
            with pytest.raises(TypeError, match="must be a DecodeLimits"):
                call(limits)
