"""Media of episodes as files: `rollouts traj export --level full` writes each once, and damages no other file."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import soundfile
from PIL import Image
from sounds import sound_file

from renderers import MediaPolicy, MediaSource
from renderers.errors import MediaError
from renderers.media.decoding import array_to_raw, frames_to_raw
from renderers.media.samples import samples_source
from rollouts.cli.traj.media_files import export_medium

NOISE = np.random.default_rng(7).integers(0, 256, (20, 30, 3), dtype=np.uint8)
RATE = 8000
SAMPLES = np.sin(np.arange(2 * RATE) / 3).astype(np.float32)
ISO_VIDEO = b"\0\0\0\x18ftypisom\0\0\2\0isommp41"


def encoded(format: str, **options: object) -> bytes:
    file = io.BytesIO()
    Image.fromarray(NOISE).save(file, format, **options)
    return file.getvalue()


@pytest.mark.parametrize(
    ("suffix", "data"),
    [
        ("png", encoded("PNG")),
        ("jpg", encoded("JPEG")),
        ("webp", encoded("WEBP")),
        ("gif", encoded("GIF", save_all=True, append_images=[Image.fromarray(NOISE[::-1])])),
        ("tif", encoded("TIFF")),
        ("mp4", ISO_VIDEO),
        ("flac", sound_file(SAMPLES, RATE, "FLAC")),
        ("mp3", sound_file(SAMPLES, RATE, "MP3")),
        ("bin", b"not an image at all"),
    ],
)
def test_files_are_exported_unchanged(suffix: str, data: bytes, tmp_path: Path) -> None:
    source = MediaSource.of(data)
    path = export_medium(source, tmp_path)
    assert path.name == f"{source.digest[:16]}.{suffix}"
    assert path.read_bytes() == data


@pytest.mark.parametrize("shape", [(5, 7, 3), (5, 7, 4), (5, 7)])
def test_raw_pixels_become_a_png_of_the_same_pixels(shape: tuple[int, ...], tmp_path: Path) -> None:
    array = np.random.default_rng(1).integers(0, 256, shape, dtype=np.uint8)
    with Image.open(export_medium(MediaSource.of(array_to_raw(array)), tmp_path)) as image:
        np.testing.assert_array_equal(np.asarray(image), array)


def test_raw_video_becomes_an_animated_png_of_the_same_frames(tmp_path: Path) -> None:
    frames = np.stack([NOISE, NOISE, NOISE, NOISE[::-1], NOISE])
    with Image.open(export_medium(MediaSource.of(frames_to_raw(frames, fps=4.0)), tmp_path)) as image:
        assert image.n_frames == len(frames)  # type: ignore[attr-defined]
        for number, frame in enumerate(frames):
            image.seek(number)
            np.testing.assert_array_equal(np.asarray(image.convert("RGB")), frame)
            assert image.info["duration"] == 250


def test_samples_become_a_wav_of_the_same_samples(tmp_path: Path) -> None:
    stereo = np.stack([SAMPLES, SAMPLES], 1)
    path = export_medium(samples_source(stereo, RATE, MediaPolicy()), tmp_path)
    samples, rate = soundfile.read(path, dtype="float32")
    assert (path.suffix, rate) == (".wav", RATE)
    assert np.array_equal(samples, stereo)


def test_exporting_again_changes_nothing_and_another_file_is_never_overwritten(tmp_path: Path) -> None:
    raw = MediaSource.of(array_to_raw(NOISE))
    path = export_medium(raw, tmp_path)
    assert export_medium(raw, tmp_path) == path
    path.write_bytes(encoded("PNG")[:-30])
    with pytest.raises(MediaError, match="exists with other contents and was not changed"):
        export_medium(raw, tmp_path)
    assert path.read_bytes() == encoded("PNG")[:-30]


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (MediaSource(MediaSource.of(b"other").digest, encoded("PNG")), "not exported: .* the bytes changed on the way"),
        (MediaSource.of(array_to_raw(NOISE)[:-1]), "not exported: "),
    ],
)
def test_damaged_media_are_not_exported(source: MediaSource, reason: str, tmp_path: Path) -> None:
    with pytest.raises(MediaError, match=reason):
        export_medium(source, tmp_path)
    assert not list(tmp_path.iterdir())
