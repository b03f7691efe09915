"""Source bytes -> mono float32 samples at the rate that a processor wants.

WAV, FLAC, OGG, MP3 and AIFF are decoded by libsndfile (soundfile), the sound of MP4, M4A, WebM, MKV and AAC by FFmpeg
(PyAV); both are in the extra `audio`. As in `load_audio` of transformers and in vLLM: channels are averaged in float32,
then resampled by soxr in its quality HQ.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from renderers.errors import MediaDecodeError, MediaLimitError
from renderers.media.item import MediaSource
from renderers.media.policy import Deadline, MediaPolicy, TimedBytes
from renderers.media.samples import is_raw_audio, raw_samples
from renderers.media.sniffing import sniff
from renderers.media.video_decoding import package_version

#: The format that libsndfile is asked for, by media type.
_SNDFILE_TYPES = ("audio/wav", "audio/flac", "audio/ogg", "audio/mpeg", "audio/aiff")


class AudioInfo(NamedTuple):
    """Properties of a sound before it is mixed and resampled. `format` is its media type, or `samples` for an array."""

    seconds: float
    sampling_rate: int
    channels: int
    format: str


def decode_audio(source: MediaSource, policy: MediaPolicy, sampling_rate: int) -> np.ndarray:
    """float32 (samples,): the sound in mono at `sampling_rate` hertz.

    Raises `MediaLimitError` for a sound past the limits of the policy, `MediaDecodeError` for other data, an
    unsupported format, a corrupt file, samples that are no numbers, or a missing decoder.
    """
    samples, rate, _ = _decoded(source, policy)
    mono = samples[:, 0] if samples.shape[1] == 1 else samples.mean(axis=1, dtype=np.float32)
    if not np.isfinite(mono).all():
        raise _corrupt(source, "it has samples that are no finite numbers")
    return np.ascontiguousarray(mono) if rate == sampling_rate else _resampled(mono, rate, sampling_rate)


def audio_info(source: MediaSource, policy: MediaPolicy) -> AudioInfo:
    """Errors as `decode_audio`."""
    samples, rate, media_type = _decoded(source, policy)
    return AudioInfo(len(samples) / rate, rate, samples.shape[1], media_type)


def audio_decoder_versions() -> dict[str, str | None]:
    """The versions of the decoders and the resampler. A wheel's version implies that of the library in it."""
    return {name: package_version(name) for name in ("soundfile", "av", "soxr")}


def _decoded(source: MediaSource, policy: MediaPolicy) -> tuple[np.ndarray, int, str]:
    """float32 (samples, channels), their rate, and the format."""
    if is_raw_audio(source.data):
        samples, rate = raw_samples(source)
        policy.check_audio(len(samples) / rate, samples.shape[1], digest=source.digest)
        floats = samples if samples.dtype == np.float32 else samples.astype(np.float32) / np.float32(32768)
        return floats, rate, "samples"
    media_type = sniff(source.data) or "unknown data"
    if media_type not in _SNDFILE_TYPES:
        raise MediaDecodeError(f"{media_type} is not read as a sound", digest=source.digest)
    with _decode_errors(source, policy) as deadline:
        import soundfile

        with soundfile.SoundFile(TimedBytes(source.data, deadline)) as file:
            policy.check_audio(file.frames / file.samplerate, file.channels, digest=source.digest)
            return file.read(dtype="float32", always_2d=True), file.samplerate, media_type


def _resampled(mono: np.ndarray, rate: int, sampling_rate: int) -> np.ndarray:
    import soxr

    resampled: np.ndarray = soxr.resample(mono, rate, sampling_rate, quality="HQ")
    return resampled


@contextmanager
def _decode_errors(source: MediaSource, policy: MediaPolicy) -> Iterator[Deadline]:
    deadline = Deadline(policy.timeout)
    try:
        yield deadline
    except ImportError as error:
        raise MediaDecodeError(
            "sounds are decoded by soundfile, which is not installed; pip install 'mmrollouts[audio]', or pass an "
            "array",
            digest=source.digest,
        ) from error
    except (RuntimeError, OSError, ValueError) as error:
        if deadline.passed:
            limit = f"timeout={policy.timeout} of the policy"
            raise MediaLimitError(f"a sound takes longer to decode than {limit}", digest=source.digest) from error
        raise _corrupt(source, str(error)) from error


def _corrupt(source: MediaSource, reason: str) -> MediaDecodeError:
    return MediaDecodeError(
        f"sound {source.digest[:12]} is corrupt: {reason}; re-encode it, or download it again", digest=source.digest
    )
