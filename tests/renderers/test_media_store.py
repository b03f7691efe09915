"""The media store: a bounded cache of sources and items in memory."""

import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from renderers import MediaItem, MediaSource, MediaStore
from renderers.media.item import PixelScale

KB = 1024


def source(name: str, nbytes: int = 0) -> MediaSource:
    return MediaSource.of(name.encode().ljust(nbytes, b"."))


def item(name: str, of: MediaSource, nbytes: int) -> MediaItem:
    return MediaItem("image", name, of, {"pixel_values": np.zeros(nbytes, dtype=np.uint8)}, 1, PixelScale())


def test_a_source_is_counted_once_however_many_items_were_made_of_it() -> None:
    store = MediaStore()
    shared = source("image", 100 * KB)
    store.put(item("one processor", shared, KB))
    alone = store.nbytes
    store.put(item("another processor", source("image", 100 * KB), KB))
    assert 100 * KB < alone < 105 * KB
    assert store.nbytes - alone < 3 * KB


def test_a_memoryview_is_copied_so_that_its_memory_can_be_freed_and_changed() -> None:
    frame = bytearray(b"frame: image")
    store = MediaStore()
    held = store.add_source(MediaSource.of(memoryview(frame)[7:]))
    frame[7:] = b"IMAGE"
    assert held.data == b"image"
    held.verify()
    frame.clear()  # a BufferError if a view were left


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

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(work, range(6)))
    assert store.source(source("0", 2 * KB).digest) is None or store.source(source("1", 2 * KB).digest) is None
