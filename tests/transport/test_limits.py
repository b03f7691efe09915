"""Limits are integers, and arguments for limits are DecodeLimits."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from transport import (
    CompactDecoder,
    DecodeLimits,
    RecordReader,
    RecordWriter,
    decode,
    decode_frames,
    encode,
    encode_frames,
    repair_record_file,
)
from transport.link import LinkServer
from transport.link.limits import LinkLimits


@pytest.mark.parametrize("value", [math.nan, math.inf, 1.5, "5", None, True, -1, np.float64(3)], ids=repr)
@pytest.mark.parametrize(
    ("limits", "name"),
    [(DecodeLimits, "max_total_bytes"), (DecodeLimits, "max_depth"), (LinkLimits, "send_bytes"), (LinkLimits, "peers")],
)
def test_a_limit_that_is_no_integer_from_0_is_refused(limits: type, name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{limits.__name__}\.{name} is .* must be"):
        limits(**{name: value})


def test_integers_of_numpy_are_limits() -> None:
    assert DecodeLimits(max_frames=np.int64(5)) == DecodeLimits(max_frames=5)
    assert LinkLimits(peers=np.uint8(5)) == LinkLimits(peers=5)


def test_waiting_for_not_a_number_of_seconds_is_refused_and_does_not_hang() -> None:
    with LinkServer("tcp://127.0.0.1:*") as server, pytest.raises(ValueError, match="timeout is nan"):
        server.recv(timeout=math.nan)


def test_limits_of_another_type_are_an_error_that_names_them(tmp_path: Path) -> None:
    path = tmp_path / "records.mmr"
    with RecordWriter(path) as writer:
        writer.append(1)
    calls: list[Callable[..., Any]] = [
        lambda limits: decode(encode(1), limits=limits),
        lambda limits: decode_frames(encode_frames(1), limits=limits),
        lambda limits: CompactDecoder(limits=limits),
        lambda limits: RecordReader(path, limits=limits),
        lambda limits: repair_record_file(path, limits=limits),
    ]
    for call in calls:
        for limits in (None, 5, {}):
            with pytest.raises(TypeError, match="must be a DecodeLimits"):
                call(limits)
