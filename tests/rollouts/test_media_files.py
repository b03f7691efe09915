"""Media of episodes as files, as `rollouts traj export --images --sounds` writes them."""

import io

import numpy as np
import pytest
import soundfile
from PIL import Image
from sounds import sound_file

from renderers import MediaPolicy, MediaSource
from renderers.errors import MediaError
from renderers.media.decoding import array_to_raw
from renderers.media.samples import samples_source
from rollouts.cli.traj.media_files import file_contents

NOISE = np.random.default_rng(7).integers(0, 256, (20, 30, 3), dtype=np.uint8)
RATE = 8000
SAMPLES = np.sin(np.arange(2 * RATE) / 3).astype(np.float32)


def encoded(format: str, **options: object) -> bytes:
    file = io.BytesIO()
    Image.fromarray(NOISE).save(file, format, **options)
    return file.getvalue()


@pytest.mark.parametrize(
    ("suffix", "data"),
    [
        ("png", encoded("PNG")),
        ("jpg", encoded("JPEG")),
        ("tif", encoded("TIFF")),
        ("flac", sound_file(SAMPLES, RATE, "FLAC")),
        ("mp3", sound_file(SAMPLES, RATE, "MP3")),
        ("bin", b"not an image at all"),
    ],
)
def test_files_are_exported_unchanged(suffix: str, data: bytes) -> None:
    assert file_contents(MediaSource.of(data)) == (suffix, data)


@pytest.mark.parametrize("shape", [(5, 7, 3), (5, 7, 4), (5, 7)])
def test_raw_pixels_become_a_png_of_the_same_pixels(shape: tuple[int, ...]) -> None:
    array = np.random.default_rng(1).integers(0, 256, shape, dtype=np.uint8)
    suffix, data = file_contents(MediaSource.of(array_to_raw(array)))
    with Image.open(io.BytesIO(data)) as image:
        assert (suffix, image.format) == ("png", "PNG")
        np.testing.assert_array_equal(np.asarray(image), array)


def test_samples_become_a_wav_of_the_same_samples() -> None:
    stereo = np.stack([SAMPLES, SAMPLES], 1)
    suffix, data = file_contents(samples_source(stereo, RATE, MediaPolicy()))
    samples, rate = soundfile.read(io.BytesIO(data), dtype="float32")
    assert (suffix, rate) == ("wav", RATE)
    assert np.array_equal(samples, stereo)


def test_damaged_pixels_are_an_error() -> None:
    with pytest.raises(MediaError):
        file_contents(MediaSource.of(array_to_raw(NOISE)[:-1]))
