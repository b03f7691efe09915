"""Sounds as samples, and files of them."""

import io
from typing import Any

import av
import numpy as np
import soundfile
from media_parts import POLICY

from renderers import MediaPolicy, MediaSource
from renderers.media.audio_decoding import decode_audio
from renderers.media.reference import source_of_part

RATE = 16000


def tone(seconds: float = 0.5, rate: int = RATE, channels: int = 1, frequency: float = 440) -> np.ndarray:
    """float32 (samples, channels): each channel an overtone, with some noise."""
    times = np.arange(round(seconds * rate)) / rate
    noise = np.random.default_rng(0).standard_normal((len(times), channels))
    return (0.4 * np.sin(2 * np.pi * np.outer(times, frequency * np.arange(1, channels + 1))) + 0.02 * noise).astype(
        "f4"
    )


def sound_file(samples: np.ndarray, rate: int = RATE, format: str = "WAV", subtype: str | None = None) -> bytes:
    """A file that libsndfile writes."""
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format=format, subtype=subtype)
    return buffer.getvalue()


def ffmpeg_file(
    samples: np.ndarray, rate: int, format: str, codec: str, options: dict[str, str] | None = None, **coding: str
) -> bytes:
    """A file of int16 samples (samples, channels) that FFmpeg writes."""
    layout = "stereo" if samples.shape[1] == 2 else "mono"
    frame = av.AudioFrame.from_ndarray(samples.reshape(1, -1), format="s16", layout=layout)
    frame.sample_rate, frame.pts = rate, 0
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=format, options=options or {}) as container:
        stream: Any = container.add_stream(codec, rate=rate, layout=layout, options=coding)
        context = stream.codec_context
        resampler = av.AudioResampler(context.format, layout, rate, frame_size=context.frame_size or None)
        for piece in resampler.resample(frame) + resampler.resample(None):
            container.mux(stream.encode(piece))
        container.mux(stream.encode())
    return buffer.getvalue()


def int16(samples: np.ndarray) -> np.ndarray:
    return np.round(samples * 32767).astype(np.int16)


def sound(value: Any, policy: MediaPolicy = POLICY, **part: Any) -> MediaSource:
    return source_of_part({"type": "audio", "audio": value, **part}, policy)


def decoded(value: Any, rate: int = RATE, policy: MediaPolicy = POLICY, **part: Any) -> np.ndarray:
    return decode_audio(sound(value, policy, **part), policy, rate)
