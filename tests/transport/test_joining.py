"""join_buffers() gives the bytes that bytes.join() gives, also on huge pages."""

from __future__ import annotations

import numpy as np
import pytest

from transport import decode, encode
from transport.wire import container as joining
from transport.wire.container import join_buffers

MIB = 1 << 20


@pytest.mark.parametrize("size", [0, 1, 4 * MIB - 1, 4 * MIB, 4 * MIB + 4097])
@pytest.mark.parametrize("advise", [True, False])
def test_buffers_of_every_kind_are_joined_as_bytes_join_does(
    size: int, advise: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not advise:
        monkeypatch.setattr(joining, "_find_madvise", lambda: None)
    rest = np.random.default_rng(1).bytes(size)
    parts = [b"", b"head", bytearray(b"\0" * 7), np.arange(9.0).data, memoryview(rest), np.empty((0, 3)).data]
    expected = b"head" + b"\0" * 7 + np.arange(9.0).tobytes() + rest
    made = join_buffers(parts)
    assert type(made) is bytes
    assert made == expected
    assert hash(made) == hash(expected)
    assert made[-1:] == expected[-1:]


def test_large_containers_decode_and_outlive_their_parts() -> None:
    arrays = [np.full((700, 1000), number, np.float32) for number in range(4)]
    buffer = encode(arrays)
    del arrays
    assert [int(array[-1, -1]) for array in decode(buffer)] == [0, 1, 2, 3]
    assert bytes(bytearray(buffer)) == buffer
