"""Sounds on a page: what is played is decoded here, and the waveform is that of the samples."""

import base64
import io
import json
import wave

import numpy as np
import pytest
from viewer_episodes import media_episode, read_blocks, sound_source, video

from rollouts.view import write_html


def shown(data, tmp_path):
    """What the page has of a sound."""
    write_html([media_episode(("audio", data))], tmp_path / "page.html")
    blocks = read_blocks(tmp_path / "page.html")
    return next(json.loads(text) for name, text in blocks.items() if name.startswith("audio-"))


def played(medium):
    """float64 (samples,) of the WAV file that the browser gets, and its rate."""
    with wave.open(io.BytesIO(base64.b64decode(medium["sound"]["wave"]))) as file:
        assert (file.getnchannels(), file.getsampwidth()) == (1, 2)
        return np.frombuffer(file.readframes(file.getnframes()), "<i2") / 32767, file.getframerate()


def test_of_a_long_sound_the_first_60_seconds_are_played_and_the_waveform_is_whole(tmp_path):
    rate = 8_000
    samples = np.zeros(90 * rate, np.float32)
    samples[-rate:] = 0.25  # the last of 90 seconds
    sound = shown(sound_source(samples, rate), tmp_path)["sound"]
    assert (sound["seconds"], sound["played"], sound["peak"]) == (90, 60, 0.25)
    assert len(base64.b64decode(sound["wave"])) == 44 + 2 * 60 * rate
    loud = [index for index, peak in enumerate(sound["peaks"]) if peak == 1]
    assert loud == list(range(237, 240))  # 240 * 89 / 90 = 237.3


def test_samples_beyond_1_are_clipped_and_silence_has_no_peak(tmp_path):
    data, _ = played(shown(sound_source(np.array([0, 3, -3], np.float32), 16_000), tmp_path))
    assert data.tolist() == [0, 1, -1]
    sound = shown(sound_source(np.zeros(800, np.int16), 16_000), tmp_path)["sound"]
    assert (sound["peak"], set(sound["peaks"])) == (0, {0})


@pytest.mark.parametrize(
    "data",
    [
        b"RIFF\xff\xff\xff\xffWAVEfmt \x10\0\0\0",
        b"<html><script>alert(1)</script></html>",
        b"mmpaf4\0\0" + bytes(16),
    ],
)
def test_a_sound_that_cannot_be_decoded_has_no_bytes_on_the_page(data, tmp_path):
    medium = shown(data, tmp_path)
    assert "sound" not in medium
    assert medium["error"].startswith("it cannot be decoded: ")
    assert base64.b64encode(data).decode() not in (tmp_path / "page.html").read_text()


def test_a_file_that_is_used_as_a_video_and_as_a_sound_has_a_block_for_each(tmp_path):
    data = video(3)
    write_html([media_episode(("video", data), ("audio", data))], tmp_path / "page.html")
    names = [name.partition("-")[0] for name in read_blocks(tmp_path / "page.html")]
    assert {"video", "audio"} <= set(names)
