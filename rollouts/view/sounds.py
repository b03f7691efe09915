"""Sounds, decoded and encoded again for display, and their waveforms.

The page never receives the bytes of a source: what a browser plays are WAV files that are written here.
"""

from __future__ import annotations

import base64
from typing import Any, Final

import numpy as np

from renderers import MediaSource
from renderers.media.audio_decoding import audio_info, decode_audio
from renderers.media.policy import MediaPolicy
from renderers.media.samples import wav_bytes

# Of a longer sound the page has the beginning.
_PLAYED_SECONDS: Final = 60


def display_sound(source: MediaSource, policy: MediaPolicy) -> dict[str, Any]:
    """A sound for the page, as JSON.

    `seconds`, `rate`, `channels` and `format` are those of the source. `peaks` are the largest magnitudes in 240 equal
    parts of the sound in mono, 0 to 1 of `peak`, the largest one. `wave` is base64 of a WAV file: its first 60 seconds,
    16 bits, mono, at most 16 kHz. Raises `MediaError`.
    """
    info = audio_info(source, policy)
    # What models of speech hear; a second is 32 kB. Browsers play no sound of less than 3000 Hz.
    rate = int(np.clip(info.sampling_rate, 8000, 16000))
    samples = decode_audio(source, policy, rate)
    played = np.clip(samples[: _PLAYED_SECONDS * rate], -1, 1) * 32767
    largest = peaks(samples, 240)
    peak = float(largest.max())
    return {
        "seconds": info.seconds,
        "rate": info.sampling_rate,
        "channels": info.channels,
        "format": info.format,
        "peak": peak,
        "peaks": (largest / (peak or 1)).round(3).tolist(),
        "played": min(info.seconds, _PLAYED_SECONDS),
        "wave": base64.b64encode(wav_bytes(played.round().astype(np.int16), rate)).decode(),
    }


def peaks(samples: np.ndarray, columns: int) -> np.ndarray:
    """float64 (columns,): the largest magnitude in each of `columns` parts of about equal length of a mono sound."""
    starts = np.arange(columns) * len(samples) // columns  # a sound of fewer samples has some of them twice
    return np.maximum.reduceat(np.abs(samples, dtype=np.float64), starts)
