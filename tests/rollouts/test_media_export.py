"""`rollouts media export`: media written as files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from media_stores import (
    NOISE,
    RAW,
    animation,
    encoded,
    encoded_video,
    one_error,
    run,
    solid_image,
    store_of,
    stored_file,
    trajectory_file,
)
from PIL import Image
from typer.testing import CliRunner

from renderers import MediaSource, MediaStore
from renderers.media.decoding import array_to_raw, frames_to_raw
from rollouts.cli.main import app


def pixels(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image)


def test_encoded_files_are_exported_unchanged_and_once_each(tmp_path: Path) -> None:
    files = {
        "png": solid_image((1, 2, 3)),
        "jpg": solid_image((1, 2, 3), format="JPEG"),
        "webp": solid_image((1, 2, 3), format="WEBP"),
        "gif": animation(),
        "tif": solid_image((1, 2, 3), format="TIFF"),
        "mp4": encoded_video(),
        "bin": b"not an image at all",
    }
    path = trajectory_file(tmp_path / "t.mmr", e1=[tuple(files.values())], e2=[tuple(files.values())])
    result = run("export", path, "--out", tmp_path / "new" / "out")
    assert result.exit_code == 0, result.output
    written = {file.name: file.read_bytes() for file in (tmp_path / "new" / "out").iterdir()}
    assert written == {f"{MediaSource.of(data).digest[:16]}.{suffix}": data for suffix, data in files.items()}


@pytest.mark.parametrize("shape", [(5, 7, 3), (5, 7, 4), (5, 7)])
def test_raw_pixels_become_a_png_of_the_same_pixels(shape: tuple[int, ...], tmp_path: Path) -> None:
    array = np.random.default_rng(1).integers(0, 256, shape, dtype=np.uint8)
    (digest,) = store_of(tmp_path / "store", array_to_raw(array))
    run("export", tmp_path / "store", "--out", tmp_path)
    np.testing.assert_array_equal(pixels(tmp_path / f"{digest[:16]}.png"), array)


def test_raw_video_becomes_an_animated_png_of_the_same_frames(tmp_path: Path) -> None:
    frames = np.stack([NOISE, NOISE, NOISE, NOISE[::-1], NOISE])
    (digest,) = store_of(tmp_path / "store", frames_to_raw(frames, fps=4.0))
    run("export", tmp_path / "store", "--out", tmp_path)
    with Image.open(tmp_path / f"{digest[:16]}.png") as image:
        assert image.n_frames == len(frames)  # type: ignore[attr-defined]
        for number, frame in enumerate(frames):
            image.seek(number)
            np.testing.assert_array_equal(np.asarray(image.convert("RGB")), frame)
            assert image.info["duration"] == 250


def test_exporting_again_changes_nothing_and_another_file_is_never_overwritten(tmp_path: Path) -> None:
    image_data = solid_image((1, 2, 3))
    digests = store_of(tmp_path / "store", image_data, RAW)
    out = tmp_path / "out"
    assert run("export", tmp_path / "store", "--out", out).exit_code == 0
    recompressed = out / f"{digests[1][:16]}.png"
    with Image.open(recompressed) as image:
        image.load()
    image.save(recompressed, compress_level=0)
    held = recompressed.read_bytes()
    assert run("export", tmp_path / "store", "--out", out).exit_code == 0
    assert recompressed.read_bytes() == held, "the same pixels are the same image"

    other = out / f"{digests[0][:16]}.png"
    other.write_bytes(solid_image((9, 9, 9)))
    result = run("export", tmp_path / "store", "--out", out)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: {digests[0]}: ")
    assert "other contents" in result.stderr
    assert other.read_bytes() == solid_image((9, 9, 9))


def test_damaged_media_are_not_exported(tmp_path: Path) -> None:
    digests = store_of(tmp_path / "store", solid_image((1, 2, 3)), solid_image((4, 5, 6)))
    stored_file(tmp_path / "store", digests[0]).write_bytes(solid_image((7, 8, 9)))
    result = run("export", tmp_path / "store", "--out", tmp_path / "out", "--contact-sheet", tmp_path / "sheet.png")
    assert result.exit_code == 1
    assert digests[0] in result.stderr
    assert [file.name for file in (tmp_path / "out").iterdir()] == [f"{digests[1][:16]}.png"]
    assert (tmp_path / "sheet.png").exists()


def test_a_full_disk_leaves_no_partial_file(tmp_path: Path) -> None:
    (digest,) = store_of(tmp_path / "store", encoded(Image.fromarray(np.tile(NOISE, (20, 20, 1))), "BMP"))
    script = (
        "import resource, sys\n"
        "from rollouts.cli.main import main\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        f"sys.argv = ['rollouts', 'media', 'export', {str(tmp_path / 'store')!r}, '--out', {str(tmp_path / 'out')!r}]\n"
        "main()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 1
    file = tmp_path / "out" / f"{digest[:16]}.bmp"
    assert done.stderr == f"error: {digest}: not exported: {file}: File too large\n"
    assert not (tmp_path / "out").exists()


def test_an_output_path_that_cannot_be_written_is_one_error_line(tmp_path: Path) -> None:
    path = trajectory_file(tmp_path / "t.mmr", e=[(RAW,)])
    assert "cannot be created" in one_error(run("export", path, "--out", path))
    result = run("export", path, "--out", tmp_path / "out", "--contact-sheet", tmp_path / "none" / "sheet.png")
    assert result.exit_code == 2
    assert "sheet.png cannot be written: No such file or directory" in result.stderr


def test_postscript_in_a_store_does_not_start_an_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called, bin_dir = tmp_path / "called", tmp_path / "bin"
    bin_dir.mkdir()
    ghostscript = bin_dir / "gs"
    ghostscript.write_text(f"#!/bin/sh\ntouch {called}\nexit 1\n")
    ghostscript.chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_dir}:{os.environ['PATH']}")
    postscript = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n%%EOF\n"
    store = MediaStore(directory=tmp_path / "store")
    store.add_source(MediaSource.of(postscript))
    out, sheet = tmp_path / "out", tmp_path / "sheet.png"
    CliRunner().invoke(
        app, ["media", "export", str(tmp_path / "store"), "--out", str(out), "--contact-sheet", str(sheet)]
    )
    CliRunner().invoke(app, ["media", "ls", str(tmp_path / "store")])
    assert sheet.is_file()
    assert not called.exists()
