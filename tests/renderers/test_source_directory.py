"""The directory of a media store: shared by processes, verified, bounded, and resistant to file system errors."""

from __future__ import annotations

import logging
import os
import signal
import stat
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from stored_media import KB, directory_of, item, source

from renderers import MediaSource, MediaStore
from renderers.errors import MediaError
from renderers.media.source_directory import SourceDirectory, source_files


def test_a_source_is_found_by_another_store_on_the_same_directory(tmp_path: Path) -> None:
    added = MediaStore(directory=tmp_path / "store").add_source(source("image"))
    other = MediaStore(directory=str(tmp_path / "store"))
    found = other.source(added.digest)
    assert found == added
    assert found.data == b"image"
    assert other.source(added.digest) is found
    assert other.source(source("unknown").digest) is None


def test_a_source_that_memory_evicted_is_found_in_the_directory(tmp_path: Path) -> None:
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
def test_a_damaged_file_is_never_returned_and_can_be_written_again(
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


def test_a_file_under_the_name_of_another_is_not_returned(tmp_path: Path) -> None:
    one, other = (MediaStore(directory=tmp_path).add_source(source(name)) for name in "ab")
    paths = {file.digest: file.path for file in source_files(tmp_path)}
    os.replace(paths[one.digest], paths[other.digest])
    store = MediaStore(directory=tmp_path)
    assert store.source(other.digest) is None
    assert store.source(one.digest) is None


def test_an_intact_file_that_has_replaced_a_damaged_one_is_not_removed(
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
def test_a_name_that_is_not_a_digest_accesses_no_file(name: str, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"secret")
    store = MediaStore(directory=tmp_path / "store")
    name = name.replace("OUTSIDE", str(outside))
    before = sorted(tmp_path.rglob("*"))
    assert store.source(name) is None
    with pytest.raises(MediaError, match="sha256"):
        store.add_source(MediaSource(name, b"data"))
    assert sorted(tmp_path.rglob("*")) == before
    assert outside.read_bytes() == b"secret"
    assert store.stats.directory_errors == 0, "something was opened"


def test_an_impossible_directory_is_an_error_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(MediaError, match="directory of a media store"):
            MediaStore(directory=path)
    with pytest.raises(MediaError, match="pass directory"):
        MediaStore(max_directory_bytes=1000)


def test_a_folder_in_the_place_of_a_file_is_counted_as_an_error_only(tmp_path: Path) -> None:
    added = source("image")
    (tmp_path / added.digest[:2] / added.digest / "folder").mkdir(parents=True)
    store = MediaStore(directory=tmp_path)
    assert store.add_source(added) is added
    assert store.source(added.digest) is added
    assert store.stats.directory_errors == 1
    assert MediaStore(directory=tmp_path).source(added.digest) is None


def test_a_deleted_directory_is_created_again_or_counted_as_an_error(tmp_path: Path) -> None:
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


def test_the_least_recently_used_files_are_removed_first(tmp_path: Path) -> None:
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


def test_temporary_files_of_killed_writers_are_removed_when_they_are_old(tmp_path: Path) -> None:
    added = source("image")
    shard = tmp_path / added.digest[:2]
    shard.mkdir()
    for name, seconds in ((".old.tmp", 7200), (".young.tmp", 60), ("note", 7200)):
        (shard / name).write_bytes(b"half a pic")
        os.utime(shard / name, (time.time() - seconds,) * 2)
    MediaStore(directory=tmp_path).add_source(added)
    assert sorted(path.name for path in shard.iterdir()) == sorted([".young.tmp", "note", added.digest])


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


def test_refused_writes_lose_files_and_nothing_else(tmp_path: Path) -> None:
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
def test_a_full_disk_loses_files_and_nothing_else(tmp_path: Path) -> None:
    script = refused("pass", "0 < store.stats.directory_errors < 6 and any(directory.rglob('?' * 64))")
    out = run_script(script, tmp_path, prefix=own_mount("size=700k", tmp_path))
    assert "No space left" in out


@pytest.mark.skipif(sys.platform != "linux", reason="mounts a tmpfs")
def test_a_read_only_file_system_is_read_and_not_written(tmp_path: Path) -> None:
    prepare = (
        "first = MediaStore(directory=directory).add_source(MediaSource.of(b'was there'))\n"
        "    os.system(f'mount -o remount,ro {directory}') == 0 or sys.exit('no remount')\n"
        "    assert MediaStore(directory=directory).source(first.digest) == first"
    )
    script = refused(prepare, "store.stats.directory_errors == 6")
    assert "Read-only" in run_script(script, tmp_path, prefix=own_mount("size=4m", tmp_path))


def test_a_directory_of_another_user_is_read_and_causes_no_error() -> None:
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


def test_file_system_errors_are_logged_once_and_counted_every_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
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
@pytest.mark.slow
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
        # Not `communicate`, which does not see what `readline` has read ahead.
        assert worker.stdout is not None
        out = worker.stdout.read()
        _, err = worker.communicate(timeout=120)
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
    (leftover,) = (path for path in tmp_path.rglob("*") if path.is_file())
    assert leftover.stat().st_size == 5000, "it was not killed where it should have been"
    whole = MediaSource.of(b"image" * 1000)
    store = MediaStore(directory=tmp_path)
    assert not directory_of(tmp_path)
    assert store.source(whole.digest) is None
    store.add_source(whole)
    assert MediaStore(directory=tmp_path).source(whole.digest) == whole
