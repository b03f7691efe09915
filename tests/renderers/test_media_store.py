"""The media store: a bounded cache of sources and items in memory."""

from __future__ import annotations

import random
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from PIL import Image
from stored_media import KB, image, in_threads, item, source

from renderers import MediaSource, MediaStore
from renderers.media.decoding import array_to_raw, image_to_raw

# Memory.


def test_a_full_store_evicts_the_least_recently_used() -> None:
    store = MediaStore(max_bytes=40 * KB)
    first, _, _ = (store.put(image(name, 10 * KB)) for name in "abc")
    assert 30 * KB < store.nbytes < 40 * KB
    assert store.get("a") is first
    fourth = store.put(image("d", 12 * KB))
    assert [store.get(name) for name in "abcd"] == [first, None, store.get("c"), fourth]
    assert len(store) == 3


def test_a_source_is_counted_once_however_many_items_were_made_of_it() -> None:
    store = MediaStore()
    shared = source("image", 100 * KB)
    store.put(item("one processor", shared, KB))
    alone = store.nbytes
    store.put(item("another processor", source("image", 100 * KB), KB))
    assert 100 * KB < alone < 105 * KB
    assert store.nbytes - alone < 3 * KB


def test_equal_sources_become_one_object() -> None:
    store = MediaStore()
    first, second = source("image"), source("image")
    assert first.data is not second.data
    assert store.add_source(first) is first
    assert store.add_source(second) is first
    assert store.put(item("a", second, KB)).source is first
    assert store.source(first.digest) is first


def test_put_returns_the_item_that_is_stored_under_the_hash() -> None:
    store = MediaStore()
    first = store.put(image("a", KB))
    assert store.put(image("a", KB)) is first
    assert len(store) == 1


def test_a_source_outlives_the_items_made_of_it() -> None:
    store = MediaStore(max_bytes=40 * KB)
    old = store.put(image("old", 20 * KB))
    store.put(image("new", 18 * KB))
    assert store.get("old") is None
    assert store.source(old.source.digest) is old.source


def test_an_item_larger_than_the_store_is_returned_but_not_stored() -> None:
    store = MediaStore(max_bytes=20 * KB)
    kept = store.put(image("small", 17 * KB))
    large = image("large", 21 * KB)
    assert store.put(large) is large
    assert store.get("large") is None
    assert store.get("small") is kept


def test_a_source_larger_than_the_store_is_returned_but_not_stored() -> None:
    store = MediaStore(max_bytes=20 * KB)
    kept = store.add_source(source("small", 17 * KB))
    large = source("large", 21 * KB)
    assert store.add_source(large) is large
    assert store.source(large.digest) is None
    assert store.source(kept.digest) is kept


def test_a_memoryview_is_copied_so_that_its_memory_can_be_freed_and_changed() -> None:
    frame = bytearray(b"frame: image")
    store = MediaStore()
    held = store.add_source(MediaSource.of(memoryview(frame)[7:]))
    frame[7:] = b"IMAGE"
    assert held.data == b"image"
    held.verify()
    frame.clear()  # a BufferError if a view were left


def test_stats_count_hits_misses_and_evictions() -> None:
    store = MediaStore(max_bytes=40 * KB)
    store.put(image("a", 20 * KB))
    store.get("a")
    store.get("b")
    store.source("none")
    store.put(image("c", 20 * KB))
    stats = store.stats
    assert (stats.hits, stats.misses) == (1, 2)
    assert stats.evictions >= 1
    with pytest.raises(AttributeError):
        stats.hits = 0  # type: ignore[misc]


class StoreMachine(RuleBasedStateMachine):
    """The store against a list that says in which order things were used."""

    MAX = 24 * KB
    SIZES = (0, KB, 3 * KB, 9 * KB, 23 * KB)

    @initialize()
    def start(self) -> None:
        self.store = MediaStore(self.MAX)
        self.used: list[tuple[str, str]] = []  # (kind, name), the least recently used first
        self.sizes: dict[tuple[str, str], int] = {}

    def use(self, kind: str, name: str) -> None:
        if (kind, name) in self.used:
            self.used.remove((kind, name))
            self.used.append((kind, name))

    def add(self, kind: str, name: str, nbytes: int) -> None:
        if (kind, name) not in self.used:
            self.used.append((kind, name))
            self.sizes[kind, name] = nbytes + KB
        self.use(kind, name)
        while sum(self.sizes[entry] for entry in self.used) > self.MAX:
            self.used.pop(0)

    @rule(image=st.integers(0, 5), processor=st.sampled_from("pq"))
    def put(self, image: int, processor: str) -> None:
        made_of = source(f"{image}", 10 + self.SIZES[image % 5] // 2)
        name = f"{image}-{processor}"
        given = item(name, made_of, self.SIZES[(image + 1) % 5])
        kept = self.store.put(given)
        assert kept.mm_hash == name
        assert kept.source.digest == made_of.digest
        if given.nbytes + made_of.nbytes + 2 * KB <= self.MAX:
            self.add("source", made_of.digest, made_of.nbytes)
            self.add("item", name, given.nbytes)
            self.use("source", made_of.digest)

    @rule(image=st.integers(0, 5), processor=st.sampled_from("pq"))
    def get(self, image: int, processor: str) -> None:
        name = f"{image}-{processor}"
        found = self.store.get(name)
        assert (found is not None) == (("item", name) in self.used)
        if found is not None:
            self.use("item", name)
            self.use("source", found.source.digest)

    @rule(image=st.integers(0, 5))
    def add_source(self, image: int) -> None:
        made = source(f"{image}", 10 + self.SIZES[image % 5] // 2)
        assert self.store.add_source(made).data == made.data
        self.add("source", made.digest, made.nbytes)

    @rule(image=st.integers(0, 5))
    def find_source(self, image: int) -> None:
        digest = source(f"{image}", 10 + self.SIZES[image % 5] // 2).digest
        assert (self.store.source(digest) is not None) == (("source", digest) in self.used)
        self.use("source", digest)

    @invariant()
    def what_is_held_is_what_is_counted(self) -> None:
        if hasattr(self, "store"):
            assert self.store.nbytes == sum(self.sizes[entry] for entry in self.used) <= self.MAX
            assert len(self.store) == sum(kind == "item" for kind, _ in self.used)


StoreMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestStoreMachine = StoreMachine.TestCase


def test_threads_share_a_store_without_exceeding_its_bound() -> None:
    store = MediaStore(60 * KB)

    def work(worker: int) -> None:
        choose = random.Random(worker)
        for _ in range(300):
            number = choose.randrange(40)
            made_of = store.add_source(source(str(number), 2 * KB))
            kept = store.put(item(f"{number}-{choose.choice('pq')}", made_of, 3 * KB))
            assert kept.source.data == made_of.data
            found = store.get(f"{number}-p")
            assert found is None or found.source.digest == made_of.digest
            read = store.source(source(str(choose.randrange(40)), 2 * KB).digest)
            assert read is None or read.verify() is None
            assert store.nbytes <= store.max_bytes

    in_threads(6, work)
    assert store.stats.evictions > 0


def test_each_store_caches_references_in_a_quarter_of_its_bytes() -> None:
    store = MediaStore(max_bytes=80 * KB)
    assert store.references.max_bytes == 20 * KB
    assert MediaStore().references is not store.references


def test_an_unreferenced_store_is_freed_at_once() -> None:
    held = source("image")
    store = MediaStore()
    store.add_source(held)
    before = sys.getrefcount(held)
    del store
    assert sys.getrefcount(held) < before


RESIDENT = textwrap.dedent(
    """
    import gc, io, sys
    import numpy as np
    from PIL import Image
    from renderers import MediaItem, MediaSource, MediaStore

    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    noise = np.random.default_rng(0).integers(0, 256, (700, 700, 3), dtype=np.uint8)

    def encoded(number):
        side = (100, 300, 240, 160, 400)[number % 5]
        pixels = noise[number % 97 : number % 97 + side, number % 89 : number % 89 + side].copy()
        pixels[0, 0] = number % 251, number // 251 % 251, number // 251 // 251
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "JPEG", quality=80)
        return file.getvalue()

    def show(store, number):
        source = store.add_source(MediaSource.of(encoded(number)))
        store.references.put(source.data, source)
        store.references.put(f"https://h.example/{number}", source)
        size = (256 + 32 * (number % 7),) * 2
        pixels = np.asarray(Image.open(io.BytesIO(source.data)).convert("RGB").resize(size)).copy()
        store.put(MediaItem("image", f"{number}", source, {"pixel_values": pixels}, 1, None))

    for number in range(40):
        show(MediaStore(1), number)
    gc.collect()
    before = highest = resident()
    store = MediaStore(int(sys.argv[1]))
    for number in range(int(sys.argv[2])):
        show(store, number)
        if number % 20 == 0:
            highest = max(highest, resident())
    print(highest - before, store.nbytes, len(store))
    """
)


def grown(max_bytes: int, images: int) -> tuple[int, int, int]:
    """(growth of a process in bytes, bytes the store says it holds, items) after so many distinct images."""
    run = subprocess.run(
        [sys.executable, "-c", RESIDENT, str(max_bytes), str(images)], capture_output=True, text=True, check=True
    )
    growth, held, items = map(int, run.stdout.split())
    return growth, held, items


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the resident size from /proc")
@pytest.mark.slow
def test_a_process_grows_by_the_bound_and_at_most_a_quarter_of_it() -> None:
    growth, held, items = grown(32 * 2**20, 800)
    assert items < 200
    assert 23 * 2**20 < held <= 32 * 2**20
    assert 25 * 2**20 < growth <= 40 * 2**20
    unbounded, _, items = grown(2**40, 300)
    assert items == 300
    assert unbounded > 100 * 2**20, "the measure would not notice a store that forgets nothing"


# Digests.

SHAPES = st.tuples(st.integers(1, 3), st.integers(1, 3), st.sampled_from([1, 3, 4]))


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    shape = draw(SHAPES)
    values = draw(st.lists(st.integers(0, 2), min_size=int(np.prod(shape)), max_size=int(np.prod(shape))))
    return np.array(values, dtype=np.uint8).reshape(shape)


@pytest.mark.slow
@settings(max_examples=300)
@given(one=arrays(), other=arrays(), same=st.booleans())
def test_digests_of_images_are_equal_exactly_when_their_pixels_are(
    one: np.ndarray, other: np.ndarray, same: bool
) -> None:
    other = one.copy() if same else other
    equal = one.shape == other.shape and one.tobytes() == other.tobytes()
    of_one, of_other = (MediaSource.of(array_to_raw(array)) for array in (one, other))
    assert (of_one.digest == of_other.digest) == (of_one == of_other) == equal
    seen = Image.fromarray(one[:, :, 0] if one.shape[2] == 1 else one)
    assert MediaSource.of(image_to_raw(seen)).digest == of_one.digest
