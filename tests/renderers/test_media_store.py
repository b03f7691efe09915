"""The media store: bounded memory, a directory that many processes share, and nothing served that is not whole."""

from __future__ import annotations

import logging
import os
import random
import signal
import stat
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from PIL import Image

from renderers import MediaItem, MediaSource, MediaStore
from renderers.errors import MediaStoreError
from renderers.media.pixel_scale import PixelScale
from renderers.media.raw import array_to_raw, image_to_raw
from renderers.media.source_directory import SourceDirectory, source_files, stray_files

KB = 1024


def source(name: str, nbytes: int = 0) -> MediaSource:
    return MediaSource.of(name.encode().ljust(nbytes, b"."))


def item(name: str, of: MediaSource, nbytes: int) -> MediaItem:
    return MediaItem("image", name, of, {"pixel_values": np.zeros(nbytes, dtype=np.uint8)}, 1, PixelScale())


def image(name: str, nbytes: int) -> MediaItem:
    """An item whose arrays and source together hold `nbytes`."""
    return item(name, source(name, 10), nbytes - 10)


def directory_of(store_path: Path) -> dict[str, bytes]:
    return {file.digest: file.path.read_bytes() for file in source_files(store_path)}


# Memory.


def test_the_store_forgets_the_least_recently_used_when_it_is_full() -> None:
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


def test_an_item_held_under_its_hash_is_the_one_to_use() -> None:
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


def test_an_item_larger_than_the_store_is_handed_back_but_not_kept() -> None:
    store = MediaStore(max_bytes=20 * KB)
    kept = store.put(image("small", 17 * KB))
    large = image("large", 21 * KB)
    assert store.put(large) is large
    assert store.get("large") is None
    assert store.get("small") is kept


def test_a_source_larger_than_the_store_is_handed_back_but_not_kept() -> None:
    store = MediaStore(max_bytes=20 * KB)
    kept = store.add_source(source("small", 17 * KB))
    large = source("large", 21 * KB)
    assert store.add_source(large) is large
    assert store.source(large.digest) is None
    assert store.source(kept.digest) is kept


def test_a_view_is_copied_so_that_the_store_pins_no_frame_and_sees_no_change() -> None:
    frame = bytearray(b"frame: image")
    store = MediaStore()
    held = store.add_source(MediaSource.of(memoryview(frame)[7:]))
    frame[7:] = b"IMAGE"
    assert held.data == b"image"
    held.verify()
    frame.clear()  # a BufferError if a view were left


def test_stats_count_what_the_store_did() -> None:
    store = MediaStore(max_bytes=40 * KB)
    store.put(image("a", 20 * KB))
    store.get("a")
    store.get("b")
    store.source("none")
    store.put(image("c", 20 * KB))
    stats = store.stats
    assert (stats.hits, stats.misses, stats.directory_errors) == (1, 2, 0)
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


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Run `work(0)` to `work(count - 1)` at once; what one of them raises is raised."""
    errors: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("with_directory", [False, True])
def test_threads_share_a_store_without_passing_its_bound(with_directory: bool, tmp_path: Path) -> None:
    store = MediaStore(60 * KB, directory=tmp_path / "store" if with_directory else None)

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
    assert store.stats.directory_errors == 0


def test_a_store_of_its_own_remembers_references_in_a_quarter_of_its_bytes() -> None:
    store = MediaStore(max_bytes=80 * KB)
    assert store.references.max_bytes == 20 * KB
    assert MediaStore().references is not store.references


def test_a_store_that_nobody_uses_is_freed_at_once() -> None:
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
def test_a_process_grows_by_the_bound_and_at_most_a_quarter_of_it() -> None:
    growth, held, items = grown(32 * 2**20, 2000)
    assert items < 200
    assert 23 * 2**20 < held <= 32 * 2**20
    assert 25 * 2**20 < growth <= 40 * 2**20
    unbounded, _, items = grown(2**40, 400)
    assert items == 400
    assert unbounded > 100 * 2**20, "the measure would not notice a store that forgets nothing"


# Digests.

SHAPES = st.tuples(st.integers(1, 3), st.integers(1, 3), st.sampled_from([1, 3, 4]))


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    shape = draw(SHAPES)
    values = draw(st.lists(st.integers(0, 2), min_size=int(np.prod(shape)), max_size=int(np.prod(shape))))
    return np.array(values, dtype=np.uint8).reshape(shape)


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


# The directory.


def test_a_source_is_found_by_another_store_on_the_same_directory(tmp_path: Path) -> None:
    added = MediaStore(directory=tmp_path / "store").add_source(source("image"))
    other = MediaStore(directory=str(tmp_path / "store"))
    found = other.source(added.digest)
    assert found == added
    assert found.data == b"image"
    assert other.source(added.digest) is found
    assert other.source(source("unknown").digest) is None


def test_what_memory_forgot_is_found_in_the_directory(tmp_path: Path) -> None:
    store = MediaStore(max_bytes=10 * KB, directory=tmp_path)
    added = [store.add_source(source(str(number), 2 * KB)).digest for number in range(20)]
    assert store.stats.evictions > 0
    assert [store.source(digest).data for digest in added] == [source(str(n), 2 * KB).data for n in range(20)]


def test_the_source_of_an_item_is_written_even_if_memory_cannot_hold_it(tmp_path: Path) -> None:
    store = MediaStore(max_bytes=10 * KB, directory=tmp_path)
    for size in (KB, 30 * KB):
        store.put(item(f"{size}", source(f"{size}", 20 * KB), size))
    assert len(directory_of(tmp_path)) == 2
    assert len(store) == 0


def test_files_lie_under_the_first_digits_of_their_digest_and_are_the_users_own(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        added = MediaStore(directory=tmp_path / "deep" / "store").add_source(source("image"))
    finally:
        os.umask(old)
    path = tmp_path / "deep" / "store" / added.digest[:2] / added.digest
    assert path.read_bytes() == b"image"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.parent.parent.stat().st_mode) == 0o700


def flip_a_bit(data: bytes) -> bytes:
    return bytes([*data[:100], data[100] ^ 4, *data[101:]])


@pytest.mark.parametrize(
    "damage",
    [lambda data: data[:-1], lambda data: b"", flip_a_bit, lambda data: data + b"\0", lambda data: data[::-1]],
    ids=["truncated", "empty", "bit", "longer", "other"],
)
def test_a_damaged_file_is_never_served_and_can_be_written_again(
    damage: Callable[[bytes], bytes], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sound = MediaStore(directory=tmp_path).add_source(MediaSource.of(os.urandom(5000)))
    ((path),) = (file.path for file in source_files(tmp_path))
    path.write_bytes(damage(bytes(sound.data)))
    store = MediaStore(directory=tmp_path)
    assert store.source(sound.digest) is None
    assert not path.exists()
    assert store.stats.directory_errors == 1
    assert sound.digest in caplog.text
    store.add_source(sound)
    assert MediaStore(directory=tmp_path).source(sound.digest) == sound


def test_a_file_under_anothers_name_is_not_served(tmp_path: Path) -> None:
    one, other = (MediaStore(directory=tmp_path).add_source(source(name)) for name in "ab")
    paths = {file.digest: file.path for file in source_files(tmp_path)}
    os.replace(paths[one.digest], paths[other.digest])
    store = MediaStore(directory=tmp_path)
    assert store.source(other.digest) is None
    assert store.source(one.digest) is None


def test_a_sound_file_that_replaced_a_damaged_one_meanwhile_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = MediaStore(directory=tmp_path).add_source(source("image"))
    ((path),) = (file.path for file in source_files(tmp_path))
    path.write_bytes(b"damaged")
    directory = SourceDirectory(tmp_path)
    remove = directory._remove_damaged

    def another_process_is_faster(damaged: Path, opened: os.stat_result) -> None:
        replacement = tmp_path / "replacement"
        replacement.write_bytes(bytes(sound.data))
        os.replace(replacement, damaged)
        remove(damaged, opened)

    monkeypatch.setattr(directory, "_remove_damaged", another_process_is_faster)
    assert directory.read(sound.digest) is None
    monkeypatch.undo()
    assert directory.read(sound.digest) == sound


# Only decoys in the test's own folder: a store that took one of these names would remove the file as damaged.
HOSTILE_NAMES = ["", "..", "./../outside", "OUTSIDE", "a" * 63, "A" * 64, "g" * 64, "a" * 64 + "\n", "a/" * 32]


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_a_name_that_is_no_digest_touches_no_file(name: str, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"secret")
    store = MediaStore(directory=tmp_path / "store")
    name = name.replace("OUTSIDE", str(outside))
    before = sorted(tmp_path.rglob("*"))
    assert store.source(name) is None
    with pytest.raises(MediaStoreError, match="sha256"):
        store.add_source(MediaSource(name, b"data"))
    assert sorted(tmp_path.rglob("*")) == before
    assert outside.read_bytes() == b"secret"
    assert store.stats.directory_errors == 0, "something was opened"


def test_a_directory_that_cannot_be_is_an_error_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(MediaStoreError, match="directory of a media store"):
            MediaStore(directory=path)
    with pytest.raises(MediaStoreError, match="pass directory"):
        MediaStore(max_directory_bytes=1000)


def test_a_folder_in_a_files_place_is_counted_and_costs_nothing_else(tmp_path: Path) -> None:
    added = source("image")
    (tmp_path / added.digest[:2] / added.digest / "folder").mkdir(parents=True)
    store = MediaStore(directory=tmp_path)
    assert store.add_source(added) is added
    assert store.source(added.digest) is added
    assert store.stats.directory_errors == 1
    assert MediaStore(directory=tmp_path).source(added.digest) is None


def test_a_directory_that_is_deleted_under_a_store_is_made_again_or_counted(tmp_path: Path) -> None:
    store = MediaStore(directory=tmp_path / "store")
    added = store.add_source(source("image"))
    ((path),) = (file.path for file in source_files(tmp_path / "store"))
    path.unlink()
    path.parent.rmdir()
    again = MediaStore(directory=tmp_path / "store")
    again.add_source(added)
    assert path.exists()
    path.unlink()
    path.parent.rmdir()
    (tmp_path / "store").rmdir()
    last = store.add_source(source("last"))
    assert store.source(last.digest) is last
    assert store.stats.directory_errors == 1


def age(directory: Path, digest: str, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(directory / digest[:2] / digest, (then, then))


def test_the_least_recently_used_files_make_room(tmp_path: Path) -> None:
    filler = MediaStore(directory=tmp_path)
    digests = [filler.add_source(source(str(number), 1000)).digest for number in range(8)]
    for number, digest in enumerate(digests):
        age(tmp_path, digest, 1000 - number)
    store = MediaStore(directory=tmp_path, max_directory_bytes=8500)
    assert store.source(digests[0]) is not None, "a read counts as a use"
    added = store.add_source(source("new", 1000)).digest
    # 9000 bytes are more than 8500: down to nine tenths of that, 7650, the oldest first.
    assert set(directory_of(tmp_path)) == {digests[0], *digests[3:], added}
    assert store.stats.directory_errors == 0


def test_the_bound_holds_after_every_write_of_one_process(tmp_path: Path) -> None:
    store = MediaStore(directory=tmp_path, max_directory_bytes=10_000)
    for number in range(60):
        store.add_source(source(str(number), 100 + 37 * number % 900))
        assert sum(map(len, directory_of(tmp_path).values())) <= 10_000
    assert len(directory_of(tmp_path)) > 5
    large = store.add_source(source("large", 10_001))
    assert large.digest not in directory_of(tmp_path)
    assert store.source(large.digest) is large


def test_what_killed_writers_left_is_removed_once_it_is_old(tmp_path: Path) -> None:
    added = source("image")
    shard = tmp_path / added.digest[:2]
    shard.mkdir()
    for name, seconds in ((".old.tmp", 7200), (".young.tmp", 60), ("note", 7200)):
        (shard / name).write_bytes(b"half a pic")
        os.utime(shard / name, (time.time() - seconds,) * 2)
    MediaStore(directory=tmp_path).add_source(added)
    assert sorted(path.name for path in shard.iterdir()) == sorted([".young.tmp", "note", added.digest])
    assert sorted(path.name for path in stray_files(tmp_path)) == [".young.tmp", "note"]


# A file system that says no. Real ones, in processes of their own.


def run_script(script: str, *arguments: object, prefix: tuple[str, ...] = ()) -> str:
    run = subprocess.run(
        [*prefix, sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


REFUSED = """
    import logging, os, sys
    from pathlib import Path
    from renderers import MediaItem, MediaSource, MediaStore
    import numpy as np

    warnings = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("renderers").addHandler(handler)
    directory = Path(sys.argv[1])
    PREPARE
    store = MediaStore(directory=directory)
    kept = [store.put(MediaItem("image", str(number), MediaSource.of(bytes([number]) * 200_000),
                                {"pixel_values": np.zeros(10, np.uint8)}, 1, None)) for number in range(6)]
    assert all(store.get(item.mm_hash) is item for item in kept)
    assert all(store.source(item.source.digest) is item.source for item in kept)
    for file in directory.rglob("*"):
        assert file.is_dir() or len(file.name) == 64, f"{file} was left behind"
    assert len(warnings) == 1 and "cannot write" in warnings[0], warnings
    assert CHECK, store.stats
    print(store.stats.directory_errors, *warnings)
"""


def refused(prepare: str, check: str) -> str:
    return REFUSED.replace("PREPARE", prepare).replace("CHECK", check)


def test_a_system_that_refuses_to_write_costs_files_and_nothing_else(tmp_path: Path) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))"
    out = run_script(refused(limit, "store.stats.directory_errors == 6"), tmp_path)
    assert "too large" in out


def own_mount(options: str, directory: Path) -> tuple[str, ...]:
    """A command prefix that mounts a file system for the command alone, or a skip."""
    probe = subprocess.run(
        ["unshare", "-m", "sh", "-c", f"mount -t tmpfs -o {options} none {directory}"], capture_output=True, text=True
    )
    if probe.returncode:
        pytest.skip(f"no file system can be mounted here: {probe.stderr.strip()}")
    return ("unshare", "-m", "sh", "-c", f'mount -t tmpfs -o {options} none {directory} && exec "$0" "$@"')


@pytest.mark.skipif(sys.platform != "linux", reason="mounts a tmpfs")
def test_a_full_disk_costs_files_and_nothing_else(tmp_path: Path) -> None:
    script = refused("pass", "0 < store.stats.directory_errors < 6 and any(directory.rglob('?' * 64))")
    out = run_script(script, tmp_path, prefix=own_mount("size=700k", tmp_path))
    assert "No space left" in out


@pytest.mark.skipif(sys.platform != "linux", reason="mounts a tmpfs")
def test_a_read_only_file_system_serves_and_takes_nothing(tmp_path: Path) -> None:
    prepare = (
        "first = MediaStore(directory=directory).add_source(MediaSource.of(b'was there'))\n"
        "    os.system(f'mount -o remount,ro {directory}') == 0 or sys.exit('no remount')\n"
        "    assert MediaStore(directory=directory).source(first.digest) == first"
    )
    script = refused(prepare, "store.stats.directory_errors == 6")
    assert "Read-only" in run_script(script, tmp_path, prefix=own_mount("size=4m", tmp_path))


def test_a_directory_that_belongs_to_someone_else_is_read_and_costs_nothing_else() -> None:
    # Not under tmp_path: only its owner may enter that. Root is refused nothing, so root becomes nobody.
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        first = MediaStore(directory=directory).add_source(source("was there"))
        for path in (directory, *directory.rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)
        prepare = (
            "os.geteuid() == 0 and os.seteuid(65534)\n"
            f"    assert MediaStore(directory=directory).source({first.digest!r}).data == b'was there'"
        )
        try:
            out = run_script(refused(prepare, "store.stats.directory_errors == 6"), directory)
        finally:
            for path in (directory, *directory.rglob("*")):
                path.chmod(0o755)
        assert "Permission denied" in out


def test_trouble_is_logged_once_and_counted_every_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    added = [source(f"{number}") for number in range(5)]
    for one in added:
        (tmp_path / one.digest[:2]).write_bytes(b"a file where a folder should be")
    store = MediaStore(directory=tmp_path)
    with caplog.at_level(logging.INFO, "renderers"):
        for one in added:
            store.add_source(one)
    assert store.stats.directory_errors == 5
    assert len(caplog.records) == 1


# Several processes.

HAMMER = """
    import random, sys
    from renderers import MediaSource, MediaStore

    directory, seed, bound = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    choose = random.Random(seed)
    store = MediaStore(100_000, directory=directory, max_directory_bytes=bound or None)
    found = 0
    print("ready", flush=True)
    for turn in range(600):
        number = choose.randrange(60)
        data = random.Random(number).randbytes(1000 + 700 * number)
        source = store.add_source(MediaSource.of(data))
        assert source.data == data
        other = store.source(MediaSource.of(random.Random(other_number := choose.randrange(60)).randbytes(
            1000 + 700 * other_number)).digest)
        if other is not None:
            other.verify()
            found += 1
    assert found > 50, found
    print(store.stats.directory_errors)
"""


@pytest.fixture
def workers() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def start(script: str, *arguments: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for worker in started:
        worker.kill()
        worker.communicate()


@pytest.mark.parametrize("bound", [0, 400_000])
def test_processes_share_a_directory_and_one_of_them_may_be_killed(
    bound: int, tmp_path: Path, workers: Callable[..., subprocess.Popen[str]]
) -> None:
    running = [workers(HAMMER, tmp_path, seed, bound) for seed in range(4)]
    for worker in running:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n"
    doomed = running.pop()
    while not directory_of(tmp_path):
        assert doomed.poll() is None or any(tmp_path.iterdir())
    doomed.send_signal(signal.SIGKILL)
    for worker in running:
        out, err = worker.communicate(timeout=120)
        assert worker.returncode == 0, err
        assert out.strip() == "0", "a rename or a removal of another process counted as an error"
    held = directory_of(tmp_path)
    assert len(held) > 5
    for digest, data in held.items():
        assert MediaSource.of(data).digest == digest
    if bound:
        assert sum(map(len, held.values())) <= bound * (1 + 4 / 10)


KILLED = """
    import os, signal, sys
    from renderers import MediaSource, MediaStore

    def killed(*names):
        os.kill(os.getpid(), signal.SIGKILL)

    os.replace = killed  # the last moment at which the file is not there yet
    MediaStore(directory=sys.argv[1]).add_source(MediaSource.of(b"image" * 1000))
"""


def test_a_writer_killed_in_mid_write_leaves_nothing_that_could_be_read(tmp_path: Path) -> None:
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path)], capture_output=True)
    assert run.returncode == -signal.SIGKILL
    ((leftover),) = stray_files(tmp_path)
    assert leftover.stat().st_size == 5000, "it was not killed where it should have been"
    whole = MediaSource.of(b"image" * 1000)
    store = MediaStore(directory=tmp_path)
    assert not directory_of(tmp_path)
    assert store.source(whole.digest) is None
    store.add_source(whole)
    assert MediaStore(directory=tmp_path).source(whole.digest) == whole
