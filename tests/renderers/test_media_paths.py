"""Which paths a policy allows to read, and how files are opened."""

import os
import threading
from pathlib import Path
from typing import Any

import pytest
from media_parts import NOISE, PNG, below, encoded, image, pixels

from renderers import MediaPolicy
from renderers.errors import (
    MediaError,
    MediaFetchError,
    MediaLimitError,
    MediaPolicyError,
)


def test_a_path_below_an_allowed_directory_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / "real" / "deep"
    deep.mkdir(parents=True)
    (deep / "a.png").write_bytes(PNG)
    (tmp_path / "alias").symlink_to(tmp_path / "real")
    (deep / "link.png").symlink_to("a.png")
    monkeypatch.chdir(tmp_path)
    for allowed in (tmp_path, tmp_path / "real", tmp_path / "alias", deep, Path("."), Path("/")):
        for path in ("real/deep/a.png", "alias/deep/a.png", "real/deep/../deep/a.png", "real/deep/link.png"):
            for value in (path, Path(path), str(tmp_path / path), (tmp_path / "x" / ".." / path).as_uri()):
                assert image(value, MediaPolicy(allowed_directories=("/nowhere", allowed))).data == PNG


@pytest.fixture
def closet(tmp_path: Path) -> tuple[Path, Path]:
    """An allowed directory, and a file beside it that is not to be read."""
    allowed = tmp_path / "allowed"
    allowed.mkdir()
    secret = tmp_path / "secret.png"
    secret.write_bytes(PNG)
    return allowed, secret


@pytest.mark.parametrize(
    "reference",
    [
        "{allowed}/../secret.png",
        "{allowed}",
        "{allowed}-not/a.png",
        "{allowed}/out.png",
        "{allowed}/outdir/secret.png",
        "file://{allowed}/%2e%2e/secret.png",
        "/proc/self/root{secret}",
        "~/secret.png",
    ],
)
def test_a_path_that_leads_elsewhere_is_refused_alike_whether_or_not_it_exists(
    closet: tuple[Path, Path], reference: str
) -> None:
    allowed, secret = closet
    (allowed / "out.png").symlink_to(secret)
    (allowed / "outdir").symlink_to(secret.parent)
    policy = below(allowed)
    messages = []
    for present in (True, False):
        if not present:
            secret.unlink()
        with pytest.raises(MediaPolicyError, match="allowed_directories") as caught:
            image(reference.format(allowed=allowed, secret=secret), policy)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


@pytest.mark.parametrize("swapped", ["file", "directory"])
def test_a_link_put_in_place_between_check_and_opening_leads_nowhere(
    closet: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, swapped: str
) -> None:
    allowed, secret = closet
    inner = allowed / "inner"
    inner.mkdir()
    honest = inner / secret.name
    honest.write_bytes(encoded(NOISE[:5]))
    assert pixels(honest, below(allowed)).shape == (5, 30, 3)
    real = os.path.realpath

    def swap(path: Any, **options: Any) -> str:
        resolved = real(path, **options)
        if resolved == str(honest):
            honest.unlink()
            if swapped == "file":
                honest.symlink_to(secret)
            else:
                inner.rmdir()
                inner.symlink_to(secret.parent)
        return resolved

    monkeypatch.setattr(os.path, "realpath", swap)
    with pytest.raises((MediaPolicyError, MediaFetchError)) as caught:
        image(honest, below(allowed))
    assert "symbolic link" in str(caught.value) or "Not a directory" in str(caught.value)
    assert honest.read_bytes() == PNG  # who opens by name now gets the other file


def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "directory").mkdir()
    done: list[str] = []

    def read() -> None:
        for name in ("fifo", "directory"):
            with pytest.raises(MediaFetchError, match=f"{name}.*not a regular file"):
                image(tmp_path / name, below(tmp_path))
            done.append(name)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(10)
    assert done == ["fifo", "directory"]
    with pytest.raises(MediaFetchError, match="not a regular file"):
        image("/dev/zero", below(Path("/dev")))


def test_files_are_bounded_in_size_even_those_that_announce_none(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(PNG)
    assert image(path, below(tmp_path, max_bytes=len(PNG))).data == PNG
    with pytest.raises(MediaLimitError, match=f"more than max_bytes={len(PNG) - 1}"):
        image(path, below(tmp_path, max_bytes=len(PNG) - 1))
    assert os.stat("/proc/self/maps").st_size == 0
    with pytest.raises(MediaLimitError, match="more than max_bytes=10"):
        image("/proc/self/maps", below(Path("/proc"), max_bytes=10))
    path.write_bytes(b"")
    with pytest.raises(MediaError, match="empty"):
        image(path, below(tmp_path))


def test_a_file_url_of_another_machine_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PNG)
    with pytest.raises(MediaPolicyError, match="another machine"):
        image(f"file://elsewhere.test{tmp_path}/a.png", below(tmp_path))
