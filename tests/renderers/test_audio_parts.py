"""The value of an audio part -> its source: forms, refusals with a cure, and what is cached."""

import base64
import struct
from typing import Any

import numpy as np
import pytest
import torch
from media_parts import NOISE, PNG, POLICY, data_url, image, pixels, video
from sounds import RATE, int16, sound, sound_file, tone

from renderers import MediaPolicy, MediaSource, MediaStore
from renderers.errors import (
    MediaError,
    MediaLimitError,
)
from renderers.media.decoding import frames_to_raw
from renderers.media.reference import load_source, source_of_part
from renderers.media.samples import raw_samples

WAV = sound_file(tone())
SAMPLES = tone(0.1, channels=2)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "input_audio", "input_audio": {"data": base64.b64encode(WAV).decode(), "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": data_url(WAV, "audio/wav")}},
        {"type": "audio", "audio": WAV},
        {"type": "audio", "audio": MediaSource.of(WAV)},
        {"type": "audio", "audio": {"bytes": WAV, "path": "of/the/dataset.wav"}},
        {"type": "audio", "base64": base64.b64encode(WAV).decode()},
    ],
)
def test_every_form_of_a_file_is_the_same_source(part: dict[str, Any]) -> None:
    assert source_of_part(part, POLICY).data == WAV


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (SAMPLES, SAMPLES),
        (SAMPLES[::-2, 0], SAMPLES[::-2, :1]),
        (SAMPLES.astype(">f8"), SAMPLES),
        (int16(SAMPLES).astype(">i2"), int16(SAMPLES)),
        (torch.from_numpy(int16(SAMPLES).T.copy()), int16(SAMPLES)),
        (torch.from_numpy(SAMPLES.T).double().requires_grad_(), SAMPLES),
        (torch._neg_view(torch.from_numpy(-SAMPLES.T)), SAMPLES),
        (torch.from_numpy(SAMPLES.T).bfloat16(), torch.from_numpy(SAMPLES).bfloat16().float().numpy()),
    ],
)
def test_arrays_keep_their_samples_in_the_source(value: Any, expected: np.ndarray) -> None:
    for source in (
        sound(value, sampling_rate=8000),
        sound({"array": value, "sampling_rate": 8000, "path": None}),
        sound(value, sampling_rate=np.int64(8000)),
    ):
        assert source.raw_modality == "audio"
        samples, rate = raw_samples(source)
        assert rate == 8000
        assert samples.dtype == (np.int16 if expected.dtype == np.int16 else np.float32)
        assert np.array_equal(samples, expected)
    assert sound(value, sampling_rate=8000) != sound(value, sampling_rate=8001)


@pytest.mark.parametrize(
    ("value", "rate", "reason"),
    [
        (SAMPLES, None, r"not None; put it .*\"sampling_rate\": 16000"),
        (SAMPLES, 0, "whole number of hertz from 1 to 768000, not 0"),
        (SAMPLES, 16000.5, "not 16000.5"),
        (SAMPLES, True, "not True"),
        (SAMPLES, 10**9, "not 1000000000"),
        (SAMPLES[:0], RATE, r"empty sound: an array of shape \(0, 2\) has no samples; leave the part out"),
        (np.float32(0), RATE, "a sound is the bytes of a file"),
        (SAMPLES[None], RATE, r"\(1, 1600, 2\)"),
        (SAMPLES.T[:, :50], RATE, None),
        (np.zeros((2, 9), "f4"), RATE, r"an array \(2, 9\) has its channels first; transpose it"),
        (torch.zeros(4000, 2), RATE, r"an array \(4000, 2\) has its channels last; transpose it"),
        (np.zeros((16, 2), np.int32), RATE, "not int32; convert them first"),
        (np.zeros(16, np.complex64), RATE, "not complex64"),
        (torch.zeros(2, 16, device="meta"), RATE, "holds data, not torch.strided on meta"),
        (
            np.array([0, np.nan, np.inf]),
            RATE,
            "sample 1 of channel 0 is nan; floats are finite.*look where it was computed",
        ),
        (int16(SAMPLES).astype("f4"), RATE, "floats are finite and from -1 to 1: divide what was int16 by 32768"),
        (object(), None, "not object"),
        ({"sampling_rate": 8000}, None, r"array and sampling_rate, bytes, or path, not \['sampling_rate'\]"),
        (
            {"array": SAMPLES, "sampling_rate": 8000},
            RATE,
            "two sampling rates, 8000 beside the array and 16000 in the part",
        ),
        (WAV, RATE, "a file has its own. Leave sampling_rate out"),
        (b"", None, "zero bytes of media"),
        (None, None, "the part has no audio, url, path or base64"),
    ],
)
def test_what_is_no_sound_is_refused_with_what_to_pass(value: Any, rate: Any, reason: str | None) -> None:
    if reason is None:  # so few samples that channels come first cannot be told apart; kept as they are
        policy = MediaPolicy(max_audio_channels=64)
        assert raw_samples(sound(value, policy, sampling_rate=rate)).data.shape == (2, 50)
        return
    with pytest.raises(MediaError, match=reason):
        sound(value, sampling_rate=rate)


def test_media_in_a_part_of_another_type_are_refused_with_the_right_type() -> None:
    for load, data, told in (
        (image, WAV, r'is a sound \(audio/wav\), not.*part of type "audio"'),
        (video, sound(SAMPLES, sampling_rate=RATE).data, 'part of type "audio"'),
        (sound, PNG, r'is an image \(image/png\), not a sound; pass it in a part of type "image"'),
        (sound, frames_to_raw(NOISE[None]), 'raw video, not a sound; pass it in a part of type "video"'),
    ):
        with pytest.raises(MediaError, match=told):
            load(data)


def test_limits_hold_before_an_array_is_copied_and_for_cached_sounds() -> None:
    hours = np.broadcast_to(np.float32(0), (10**12,))  # 4 TB, if it were copied
    with pytest.raises(MediaLimitError, match=r"6.25e\+07 seconds of sound, more than max_audio_seconds=1800"):
        sound(hours, sampling_rate=RATE)
    with pytest.raises(MediaLimitError, match="9 channels, more than max_audio_channels=8"):
        sound(np.zeros((100, 9), "f4"), sampling_rate=RATE)
    store, short = MediaStore(), MediaPolicy(max_audio_seconds=0.05)
    source = load_source({"type": "audio", "audio": SAMPLES, "sampling_rate": RATE}, POLICY, store)
    part = {"type": "audio", "audio": bytes(source.data)}
    load_source(part, POLICY, store)
    with pytest.raises(MediaLimitError, match=r"0\.1 seconds of sound, more than max_audio_seconds=0\.05"):
        load_source(part, short, store)


@pytest.mark.parametrize("at", [0, 4, 12, 27, -1])
def test_source_bytes_that_contradict_their_header_are_refused(at: int) -> None:
    data = bytes(sound(SAMPLES, sampling_rate=RATE).data)
    broken = data[:at] if at else data[:4]
    with pytest.raises(MediaError, match=r"raw samples|zero bytes"):
        sound(broken)
    with pytest.raises(MediaError, match=r"type b'q9.*hold 12800 bytes, not 0"):
        sound(data[:4] + b"q9\0\0" + data[8:])
    for channels, rate in ((2**31, RATE), (1, 2**32 - 1)):
        with pytest.raises(MediaError, match=rf"{channels} channels and 0 samples at {rate} Hz.* at most 1024 ch"):
            raw_samples(MediaSource.of(struct.pack("<4s4sIIQ", b"mmpa", b"i2", channels, rate, 0)))
    assert pixels(PNG).shape == NOISE.shape


def test_a_decoder_of_torchcodec_is_refused_with_the_column_to_load() -> None:
    class AudioDecoder:
        def get_all_samples(self) -> None: ...

    with pytest.raises(MediaError, match=r"not the AudioDecoder of torchcodec.*Audio\(decode=False\)"):
        sound(AudioDecoder())
