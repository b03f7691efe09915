"""What was resolved before is found without work, and nothing else is ever found."""

from __future__ import annotations

import gc
import io
import os
import threading
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from renderers.media.item import MediaSource
from renderers.media.store import FileState, MediaStore, ReferenceCache

KB = 1024
URL = "https://images.example/a.png"


def fresh_bytes(text: str) -> bytes:
    """A bytes object of its own, whatever equal ones exist."""
    return text.encode()


@pytest.fixture
def cache() -> ReferenceCache:
    return ReferenceCache(64 * KB)


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files written by the test count as old: the clock is ahead of the file system's."""
    real = time.time_ns
    monkeypatch.setattr("renderers.media.store.time.time_ns", lambda: real() + 10**10)


# Bytes.


def test_the_very_bytes_that_became_a_source_are_known(cache: ReferenceCache) -> None:
    data = fresh_bytes("image")
    source = MediaSource.of(data)
    assert cache.get(data) is None
    cache.put(data, source)
    assert cache.get(data) is source
    assert cache.get(fresh_bytes("image")) is None, "equality of bytes would cost a comparison of megabytes"


def test_equal_bytes_in_another_object_are_found_after_they_were_cached(cache: ReferenceCache) -> None:
    source = MediaSource.of(fresh_bytes("image"))
    other = fresh_bytes("image")
    cache.put(other, source)
    assert cache.get(other) is source
    assert cache.get(source.data) is None


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


def test_bytes_that_only_the_cache_keeps_alive_cannot_be_confused_either(cache: ReferenceCache) -> None:
    source = MediaSource.of(b"the same image, whoever read it")
    for number in range(2000):
        copy = bytes(bytearray(source.data))
        found = cache.get(copy)
        assert found is None
        cache.put(copy, source)
        assert cache.get(copy) is source
        assert cache.get(b"%033d" % number) is None


def test_an_id_is_accepted_only_for_the_same_bytes_object(cache: ReferenceCache) -> None:
    data = fresh_bytes("image")
    source = MediaSource.of(data)
    cache.put(data, source)
    object.__setattr__(source, "data", b"other bytes")  # so that the source lives on without them
    assert cache.get(data) is None


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
        memoryview(b"image"),
        np.zeros((2, 2, 3), dtype=np.uint8),
        IMAGE,
        io.BytesIO(b"image"),
        Path("image.png"),
        "image.png",
        "file:///image.png",
        OddBytes(b"image"),
        OddStr("data:,image"),
        ("image.png", 1, 2, 3, 4, 5),
        None,
        7,
    ],
    ids=lambda value: type(value).__name__,
)
def test_mutable_values_are_never_cached(cache: ReferenceCache, value: Any) -> None:
    source = MediaSource.of(b"image")
    assert cache.put(value, source) is source
    assert cache.get(value) is None
    assert len(cache) == 0


def test_a_change_of_a_bytearray_is_seen(cache: ReferenceCache) -> None:
    buffer = bytearray(b"image")
    source = MediaSource.of(bytes(buffer))
    cache.put(buffer, source)
    buffer[0] = 0
    assert cache.get(buffer) is None


# Strings.


def test_equal_but_distinct_data_urls_are_known(cache: ReferenceCache) -> None:
    source = MediaSource.of(b"image")
    one, other = (b"data:image/png;base64,cGljdHVyZQ==".decode() for _ in range(2))
    assert one is not other
    cache.put(one, source)
    assert cache.get(other) is source
    assert cache.get(one[:-1]) is None
    assert cache.get("DATA:" + one[5:]) is None


def test_a_source_that_nothing_else_holds_is_not_kept_alive_for_a_data_url_or_bytes(cache: ReferenceCache) -> None:
    data = fresh_bytes("image")
    for value in ("data:,image", data, fresh_bytes("image")):
        source = MediaSource.of(fresh_bytes("image"))
        cache.put(value, source)
        assert cache.get(value) is source
        del source
        assert cache.get(value) is None


def test_a_url_keeps_the_source_of_its_first_fetch(cache: ReferenceCache) -> None:
    first = MediaSource.of(b"first")
    assert cache.put(URL, first) is first
    digest = first.digest
    del first
    found = cache.get(URL)
    assert found is not None
    assert found.digest == digest
    assert cache.put(URL, MediaSource.of(b"second")) is found
    assert cache.get(URL) is found
    assert cache.get(URL + "?v=2") is None


def test_of_two_concurrent_fetches_of_a_url_the_first_to_finish_is_cached() -> None:
    class LookedBefore(ReferenceCache):
        """Both threads had looked before either was done."""

        def get(self, value: object) -> MediaSource | None:
            return None

    cache = LookedBefore(64 * KB)
    first = MediaSource.of(b"first")
    assert cache.put(URL, first) is first
    assert cache.put(URL, MediaSource.of(b"second")) is first


def test_a_url_larger_than_the_cache_is_known_while_its_source_lives(cache: ReferenceCache) -> None:
    source = MediaSource.of(bytes(65 * KB))
    cache.put(URL, source)
    assert cache.get(URL) is source
    assert cache.nbytes < KB
    del source
    assert cache.get(URL) is None


def test_a_url_whose_source_the_store_has_evicted_is_not_found() -> None:
    store = MediaStore(512 * KB)
    source = store.add_source(MediaSource.of(b"first"))
    store.references.put(URL, source)
    del source
    for number in range(40):  # pushes the source out of memory and out of `seen`
        data = b"%020000d" % number
        store.references.put(f"{URL}?{number}", store.add_source(MediaSource.of(data)))
    assert store.stats.evictions > 0
    assert store.references.get(URL) is None


# Files.


def now(path: str | Path) -> FileState | None:
    return FileState.from_status(path, os.stat(path))


@pytest.mark.usefixtures("settled")
def test_a_file_is_found_until_it_changes(cache: ReferenceCache, tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(b"one")
    source = MediaSource.of(b"one")
    cache.put(now(path), source)
    assert cache.get(now(path)) is source
    assert cache.get(now(str(path))) is source

    before = path.stat()
    path.write_bytes(b"two")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert cache.get(now(path)) is None, "changed in place, with its size and time put back"

    (tmp_path / "b.png").write_bytes(b"one")
    assert cache.get(now(tmp_path / "b.png")) is None


def test_a_file_that_has_just_changed_is_not_found(cache: ReferenceCache, tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(b"one")
    assert now(path) is None
    cache.put(now(path), MediaSource.of(b"one"))
    assert cache.get(now(path)) is None
    assert now(os.__file__) is not None


# Bounds.


def test_the_least_recently_used_is_evicted_first() -> None:
    cache = ReferenceCache(8 * KB)
    source = MediaSource.of(b"image")
    urls = [f"data:,{number}" + "x" * 800 for number in range(4)]
    for url in urls[:3]:
        cache.put(url, source)
    assert cache.get(urls[0]) is source
    cache.put(urls[3], source)
    assert [cache.get(url) is not None for url in urls] == [True, False, True, True]


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


@pytest.mark.slow
def test_memory_stays_within_the_bound() -> None:
    cache = ReferenceCache(2**20)
    source = MediaSource.of(b"image")
    tracemalloc.start()
    try:
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        for number in range(5000):
            cache.put(f"data:,{number}" + "x" * (10_000 if number % 2 else 20), source)
            cache.put(b"%05d" % number + bytes(5000 * (number % 3)), source)
            cache.put(f"{URL}?{number}", MediaSource.of(b"%d" % number + bytes(1000 * (number % 5))))
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert 2**19 < cache.nbytes <= 2**20
    assert 2**19 < grown <= 2**20


def test_threads_find_what_they_cached_and_nothing_else() -> None:
    cache = ReferenceCache(32 * KB)
    wrong: list[str] = []

    def work(worker: int) -> None:
        for number in range(1500):
            name = f"{(number * 7 + worker) % 90}"
            source = MediaSource.of(name.encode())
            for value in (f"data:,{name}", f"http://h.example/{name}", source.data):
                meant = cache.put(value, source)
                found = cache.get(value)
                if meant.data != name.encode() or (found is not None and found.data != name.encode()):
                    wrong.append(name)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert 0 < cache.nbytes <= cache.max_bytes
