"""What was resolved before is found without work, and nothing else is ever found."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from renderers.media.item import MediaSource
from renderers.media.store import MediaStore, ReferenceCache

KB = 1024
URL = "https://images.example/a.png"


@pytest.fixture
def cache() -> ReferenceCache:
    return ReferenceCache(64 * KB)


# Bytes.


def test_new_bytes_at_the_address_of_freed_ones_are_not_found(cache: ReferenceCache) -> None:
    addresses: set[int] = set()
    reused = 0
    for number in range(2000):
        data = b"%0500d" % number
        reused += id(data) in addresses
        addresses.add(id(data))
        found = cache.get(data)
        assert found is None, f"{data[-5:]!r} was taken for {bytes(found.data)[-5:]!r}"
        cache.put(data, MediaSource.of(data))
        del data, found
    assert reused > 1000, "the interpreter gave no address away twice: nothing was tested"


# What can change.

IMAGE = Image.fromarray(np.zeros((2, 2, 3), dtype=np.uint8))


class OddBytes(bytes):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = bytes.__hash__


class OddStr(str):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = str.__hash__


@pytest.mark.parametrize(
    "value",
    [
        bytearray(b"image"),
        np.zeros((2, 2, 3), dtype=np.uint8),
        IMAGE,
        Path("image.png"),
        "image.png",
        OddBytes(b"image"),
        OddStr("data:,image"),
        ("image.png", 1, 2, 3, 4, 5),
    ],
    ids=lambda value: type(value).__name__,
)
def test_mutable_values_are_never_cached(cache: ReferenceCache, value: Any) -> None:
    source = MediaSource.of(b"image")
    assert cache.put(value, source) is source
    assert cache.get(value) is None
    assert len(cache) == 0


# Strings.


def test_of_two_concurrent_fetches_of_a_url_the_first_to_finish_is_cached() -> None:
    class LookedBefore(ReferenceCache):
        """Both threads had looked before either was done."""

        def get(self, value: object) -> MediaSource | None:
            return None

    cache = LookedBefore(64 * KB)
    first = MediaSource.of(b"first")
    assert cache.put(URL, first) is first
    assert cache.put(URL, MediaSource.of(b"second")) is first


def test_a_url_whose_source_the_store_has_evicted_is_not_found() -> None:
    store = MediaStore(512 * KB)
    source = store.add_source(MediaSource.of(b"first"))
    store.references.put(URL, source)
    del source
    for number in range(40):  # pushes the source out of memory and out of `seen`
        data = b"%020000d" % number
        store.references.put(f"{URL}?{number}", store.add_source(MediaSource.of(data)))
    assert store.references.get(URL) is None


# Bounds.


@settings(max_examples=60)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["data", "web", "own", "copy"]), st.integers(0, 9), st.integers(0, 1500)),
        max_size=40,
    )
)
def test_the_bytes_never_exceed_the_bound(steps: list[tuple[str, int, int]]) -> None:
    cache = ReferenceCache(4 * KB)
    alive: list[object] = []
    for kind, number, size in steps:
        data = b"%d" % number + bytes(size)
        source = MediaSource.of(bytes(bytearray(data)))
        value = {"data": f"data:,{number}{'x' * size}", "web": f"{URL}?{number}", "own": source.data, "copy": data}[
            kind
        ]
        alive += [source, value]
        meant = cache.put(value, source)
        assert cache.nbytes <= cache.max_bytes
        assert cache.get(value) in (None, meant)
    for value in alive:  # forgetting gives the bytes back
        if isinstance(value, str):
            cache.get(value)
    assert (cache.nbytes == 0) == (len(cache) == 0)
