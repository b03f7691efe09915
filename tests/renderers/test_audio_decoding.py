"""Files of sound -> mono samples at a rate, equal to what transformers decodes."""

import io
from pathlib import Path

import numpy as np
import pytest
import soundfile
import soxr
from hypothesis import given, settings
from hypothesis import strategies as st
from media_parts import POLICY, video_file
from sounds import RATE, decoded, ffmpeg_file, int16, sound, sound_file, tone
from transformers.audio_utils import load_audio

from renderers.errors import MediaError
from renderers.media.audio_decoding import audio_info
from renderers.media.sniffing import sniff

SNDFILE = [
    ("WAV", "PCM_U8", 8000, 1),
    ("WAV", "PCM_16", 44100, 2),
    ("WAV", "PCM_32", 22050, 8),
    ("WAV", "FLOAT", 16000, 1),
    ("WAV", "ALAW", 8000, 1),
    ("WAV", "IMA_ADPCM", 8000, 1),
    ("RF64", "PCM_16", 48000, 2),
    ("W64", "PCM_16", 48000, 2),
    ("FLAC", "PCM_16", 96000, 2),
    ("OGG", "VORBIS", 44100, 2),
    ("OGG", "OPUS", 48000, 2),
    ("MP3", "MPEG_LAYER_III", 44100, 2),
    ("AIFF", "PCM_16", 44100, 2),
]
FFMPEG = [
    ("adts", "aac", "audio/aac"),
    ("ipod", "aac", "audio/mp4"),
    ("mp4", "alac", "video/mp4"),
    ("mov", "pcm_s24le", "video/quicktime"),
    ("webm", "libopus", "video/webm"),
    ("matroska", "flac", "video/x-matroska"),
    ("matroska", "pcm_f64le", "video/x-matroska"),
    ("avi", "mp3", "video/x-msvideo"),
]


def by_transformers(data: bytes, rate: int, directory: Path) -> np.ndarray:
    path = directory / "sound"
    path.write_bytes(data)
    samples: np.ndarray = load_audio(str(path), rate, backend="soundfile")
    return samples


@pytest.mark.parametrize(("format", "subtype", "rate", "channels"), SNDFILE)
def test_a_file_is_decoded_mixed_and_resampled_as_by_transformers(
    format: str, subtype: str, rate: int, channels: int, tmp_path: Path
) -> None:
    samples = tone(2.01, rate, channels)  # several blocks at most of the rates
    data = sound_file(samples, rate, format, subtype)
    for wanted in (RATE, 24000, rate):
        assert np.array_equal(decoded(data, wanted), by_transformers(data, wanted, tmp_path))
    info = audio_info(sound(data), POLICY)
    assert info[1:] == (rate, channels, sniff(data))
    assert info.seconds == pytest.approx(2.01, abs=0.07)  # ADPCM is written in blocks


@pytest.mark.slow
@settings(max_examples=30)
@given(
    st.sampled_from([8000, 11025, 16000, 22050, 44100, 47999, 48000]),
    st.floats(0.05, 60).map(lambda seconds: round(seconds, 3)) | st.just(0.05),
    st.integers(1, 6),
    st.sampled_from(["PCM_16", "PCM_U8", "FLOAT"]),
    st.sampled_from([RATE, 24000]),
)
def test_any_length_rate_and_number_of_channels_is_decoded_as_soundfile_and_soxr_do(
    rate: int, seconds: float, channels: int, subtype: str, wanted: int
) -> None:
    seconds = seconds if channels * rate < 50_000 else seconds / 8
    count = max(1, round(seconds * rate))
    samples = np.random.default_rng(count).uniform(-1, 1, (count, channels)).astype("f4")
    data = sound_file(samples, rate, "WAV", subtype)
    exact, _ = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)
    mono = exact.mean(axis=1) if channels > 1 else exact[:, 0]
    expected = mono if rate == wanted else soxr.resample(mono, rate, wanted, quality="HQ")
    got = decoded(data, wanted)
    assert len(got) == -(-count * wanted // rate)
    assert np.array_equal(got[: len(expected)], expected[: len(got)])
    assert not got[len(expected) :].any()


@pytest.mark.parametrize(("format", "codec", "media_type"), FFMPEG)
def test_what_ffmpeg_reads_is_the_sound_that_was_written(format: str, codec: str, media_type: str) -> None:
    rate = 48000
    written = int16(tone(0.5, rate, 2))
    data = ffmpeg_file(written, rate, format, codec)
    info = audio_info(sound(data), POLICY)
    assert info[1:] == (rate, 2, media_type)
    assert info.seconds == pytest.approx(0.5, abs=0.05)
    mono = decoded(data, rate)
    expected = (written / np.float32(32768)).mean(axis=1)
    if codec in ("alac", "pcm_s24le", "flac", "pcm_f64le"):
        assert len(mono) == len(expected)
        assert np.abs(mono - expected).max() < 1e-6
    else:  # a lossy codec delays the sound, and lengthens it to whole frames
        assert 0 <= len(mono) - len(expected) < 2 * 1152 + 1024
        assert np.correlate(mono, expected, "valid").max() > 0.9 * (expected**2).sum()
    assert len(decoded(data, RATE)) == -(-len(mono) * RATE // rate)


@pytest.mark.parametrize("rate", [22050, 44100])
def test_an_mp3_without_a_header_for_the_whole_is_read_as_by_transformers(rate: int, tmp_path: Path) -> None:
    samples = int16(tone(4, rate))
    data = ffmpeg_file(samples, rate, "mp3", "libmp3lame", {"write_xing": "0"})
    assert np.array_equal(decoded(data, rate), by_transformers(data, rate, tmp_path))
    assert audio_info(sound(data), POLICY).seconds == len(decoded(data, rate)) / rate


@pytest.mark.slow
def test_an_mp3_whose_length_is_guessed_too_short_is_refused() -> None:
    samples = int16(tone(4, 44100, 2) * np.repeat([1, 0], 88200)[:, None])
    variable = {"global_quality": "600", "flags": "+qscale"}
    data = ffmpeg_file(samples, 44100, "mp3", "libmp3lame", {"write_xing": "0", "id3v2_version": "0"}, **variable)
    with pytest.raises(MediaError, match=r"variable bitrate without its length in a header.*re-encode it"):
        decoded(data)
    with_header = ffmpeg_file(samples, 44100, "mp3", "libmp3lame", **variable)
    assert len(decoded(with_header, 44100)) == len(samples)


def test_a_wav_whose_writer_did_not_know_its_length_is_read_to_its_end() -> None:
    data = bytearray(sound_file(tone()))
    for unknown in (b"\xff\xff\xff\xff", b"\0\xf0\xff\x7f"):
        data[4:8] = data[40:44] = unknown
        assert np.array_equal(decoded(bytes(data)), decoded(sound_file(tone())))


def test_a_video_without_a_sound_is_refused() -> None:
    with pytest.raises(MediaError, match=r"video/mp4\) hold no sound stream; check where they come from"):
        decoded(video_file("mp4", "mpeg4"))
