"""Hostile, broken and absurd files of sound: refused by name, within the limits of time and memory."""

import struct
import sys
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sounds import RATE, decoded, ffmpeg_file, int16, sound, sound_file, tone

from renderers import MediaPolicy
from renderers.errors import (
    MediaError,
    MediaLimitError,
)
from renderers.installation import install_command
from renderers.media.audio_decoding import audio_info, decode_audio

LIMITED = MediaPolicy(max_audio_seconds=20)


def with_field(data: bytes, at: int, layout: str, value: int) -> bytes:
    packed = struct.pack(layout, value)
    return data[:at] + packed + data[at + len(packed) :]


def wav(channels: int = 1, rate: int = RATE, size: int = 64) -> bytes:
    """A WAV of zeros in int16, whatever its header says; `size` is that of its data."""
    header = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, channels, rate, rate * 2 * channels % 2**32, 2 * channels, 16)
    body = b"WAVE" + header + b"data" + struct.pack("<I", size) + bytes(size)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def flac_of_silence(seconds: float, declared: int) -> bytes:
    """`declared` is the number of samples in its header; 0 means unknown. A second of silence takes some 50 bytes."""
    data = sound_file(np.zeros(round(seconds * RATE), np.int16), RATE, "FLAC", "PCM_S8")
    return with_field(data, 22, ">I", declared)  # the lower 32 of 36 bits of STREAMINFO


FILES = {
    "wav": sound_file(tone(0.2)),
    "flac": sound_file(tone(0.2), format="FLAC"),
    "mp3": sound_file(tone(0.2), format="MP3"),
    "vorbis": sound_file(tone(0.2), format="OGG"),
    "opus": sound_file(tone(0.2), format="OGG", subtype="OPUS"),
    "aiff": sound_file(tone(0.2), format="AIFF"),
    "aac": ffmpeg_file(int16(tone(0.2)), RATE, "adts", "aac"),
    "m4a": ffmpeg_file(int16(tone(0.2)), RATE, "ipod", "aac"),
    "webm": ffmpeg_file(int16(tone(0.2, 48000)), 48000, "webm", "libopus"),
    "mkv": ffmpeg_file(int16(tone(0.2)), RATE, "matroska", "flac"),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kept", [0.3, 0.6])
def test_a_truncated_file_is_no_shorter_sound(name: str, kept: float) -> None:
    data = FILES[name]
    assert len(decoded(data)) >= 0.2 * RATE
    with pytest.raises(MediaError, match="is corrupt"):
        decoded(data[: int(len(data) * kept)])


@pytest.mark.slow
@settings(max_examples=100)
@given(
    st.sampled_from(sorted(FILES)), st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=12)
)
def test_a_damaged_file_is_a_sound_or_a_named_error(name: str, changes: list[tuple[float, int]]) -> None:
    data = bytearray(FILES[name])
    for place, value in changes:
        data[int(place**3 * (len(data) - 1))] = value  # mostly in the header
    policy = MediaPolicy(max_audio_seconds=60, timeout=2)
    try:
        source = sound(bytes(data), policy)
        samples = decode_audio(source, policy, RATE)
        audio_info(source, policy)
    except MediaError:  # whatever else is raised fails the test
        return
    assert samples.dtype == np.float32
    assert 0 < len(samples) <= 61 * RATE
    assert np.isfinite(samples).all()


@pytest.mark.parametrize("declared", [600 * RATE, 0, 2**32 - 1])
def test_a_small_file_that_holds_many_minutes_costs_no_more_than_the_limit(declared: int) -> None:
    data = flac_of_silence(600, declared)
    assert len(data) < 50_000
    source = sound(data, LIMITED)
    tracemalloc.start()
    with pytest.raises(MediaLimitError, match=r"seconds of sound, more than max_audio_seconds=20"):
        decode_audio(source, LIMITED, RATE)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * 21 * RATE + 2 * 2**20  # 21 seconds at the wanted rate, and a few blocks


@pytest.mark.parametrize("channels", [9, 192, 1024])
def test_many_channels_are_refused_by_the_header(channels: int) -> None:
    with pytest.raises(MediaLimitError, match=f"{channels} channels, more than max_audio_channels=8"):
        decoded(wav(channels, size=channels * 2))


@pytest.mark.parametrize("rate", [1, 7, 768_000])
def test_the_limit_of_seconds_bounds_the_result_at_any_rate(rate: int) -> None:
    assert len(decoded(wav(rate=rate, size=2 * rate * 5))) == 5 * RATE
    with pytest.raises(MediaLimitError, match="21 seconds of sound"):
        decoded(wav(rate=rate, size=2 * rate * 21), policy=LIMITED)


@pytest.mark.parametrize(("value", "block"), [(np.nan, 0), (np.inf, 0), (-np.inf, 1)])
def test_samples_that_are_no_numbers_are_refused(value: float, block: int) -> None:
    samples = tone(5).ravel()
    samples[70_000 * block] = value
    with pytest.raises(MediaError, match=f"is corrupt: a sample after {65536 * block} is no finite number"):
        decoded(sound_file(samples, subtype="FLOAT"))
    with pytest.raises(MediaError, match="is corrupt"):
        decoded(sound_file(np.full(50, 1e300), subtype="DOUBLE"))


@pytest.mark.parametrize("name", ["mp3", "vorbis", "opus", "m4a"])
def test_joined_files_are_no_sound_of_the_first_alone(name: str) -> None:
    with pytest.raises(MediaError, match="several files joined into one, and the first alone would be read"):
        decoded(FILES[name] * 2)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (wav(size=0), "is empty: it holds no samples; leave the part out"),
        (b"RIFF\x04\0\0\0WAVE", "is corrupt"),
        (b"OggS" + bytes(99), "ends early"),
        (b"\xff\xfb\x90\x64" + bytes(999), "is corrupt"),
        (b"ID3\4\0\0\0\0\0\1\0caff" + bytes(99), r"audio/x-caf\) are not a sound in a WAV, FLAC"),
        (b"FORM\0\0\0\x1c8SVX" + bytes(99), "unknown data"),
        (b".snd" + bytes(99), r"audio/basic\) are not a sound.*convert it to one of them"),
        (b"#EXTM3U\nhttp://127.0.0.1/a.aac\n", "unknown data"),
        (b"ffconcat version 1.0\nfile /etc/passwd\n", "unknown data"),
        (ffmpeg_file(int16(tone(0.2, 8000)), 8000, "mov", "adpcm_ima_qt"), "coded as adpcm_ima_qt, which is not read"),
    ],
)
def test_what_holds_no_sound_is_refused_by_name(data: bytes, reason: str) -> None:
    with pytest.raises(MediaError, match=reason):
        decoded(data)


@pytest.mark.parametrize("name", ["wav", "mp3", "mkv"])
def test_decoding_ends_with_the_time_of_the_policy(name: str) -> None:
    policy = MediaPolicy(timeout=0)
    with pytest.raises(
        MediaLimitError, match=r"takes longer to decode than timeout=0 of the policy; re-encode it as WAV"
    ):
        decoded(FILES[name], policy=policy)


@pytest.mark.parametrize(
    ("package", "value", "part", "reason"),
    [
        ("soundfile", FILES["wav"], {}, "soundfile is not installed"),
        ("av", FILES["mkv"], {}, "PyAV decodes, which is not installed"),
        ("soxr", FILES["wav"], {}, "soxr is not installed.*or pass an array of samples at 8000 Hz"),
        ("soxr", tone(), {"sampling_rate": RATE}, "soxr is not installed"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(
    package: str, value: Any, part: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MediaError, match=reason) as caught:
        decoded(value, 8000, **part)
    assert install_command("audio") in str(caught.value)
    assert len(decoded(tone(), sampling_rate=RATE)) == len(tone())  # an array at the wanted rate needs none
