"""Source bytes -> mono float32 samples at the rate that a processor wants.

WAV, FLAC, OGG, MP3 and AIFF are decoded by libsndfile (soundfile), the sound of MP4, M4A, WebM, MKV, MOV, AVI
and AAC by FFmpeg (PyAV), resampling is by soxr in its quality HQ; all three are in the extra `audio`. The
result equals that of `load_audio(backend="soundfile")` of transformers bit for bit: channels are averaged in
float32, then resampled.

A file is decoded block by block, and each block is mixed and resampled at once: only a block is ever held at
the rate and with the channels of the file, and limits hold for files whose header is wrong.
"""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from renderers.errors import MediaError
from renderers.installation import install_command
from renderers.media.containers import Container, container_of, corrupt, open_container, open_stream
from renderers.media.declared_length import declared_bytes, holds_several
from renderers.media.decoding import decode_errors
from renderers.media.item import MediaSource
from renderers.media.policy import Deadline, MediaPolicy, TimedBytes
from renderers.media.samples import MAX_PEAK, MAX_RATE, raw_samples
from renderers.media.sniffing import sniff
from renderers.media.video_decoding import package_version

_SNDFILE_TYPES = ("audio/wav", "audio/flac", "audio/ogg", "audio/mpeg", "audio/aiff")
_PCM = ("u8", "s16le", "s16be", "s24le", "s24be", "s32le", "s32be", "f32le", "f64le", "mulaw", "alaw")
_CODECS = {"aac", "mp2", "mp3", "opus", "vorbis", "flac", "alac", "ac3", "eac3", *(f"pcm_{name}" for name in _PCM)}
_BLOCK = 1 << 16  # samples of a channel
# Past this number of samples libsndfile does not know the length.
_UNKNOWN_LENGTH = 1 << 62
_MAX_UNREAD = 4096  # bytes of tags at the end of an MP3


class AudioInfo(NamedTuple):
    """A sound before it is mixed and resampled. `format` is its media type, or `samples` for an array."""

    seconds: float
    sampling_rate: int
    channels: int
    format: str


class _Sound(NamedTuple):
    """An open sound. `seconds` is what its header says, None if nothing.

    `blocks` are float32 (samples, channels); a block has its values until the next one is read.
    """

    seconds: float | None
    sampling_rate: int
    channels: int
    format: str
    blocks: Iterator[np.ndarray]


def decode_audio(source: MediaSource, policy: MediaPolicy, sampling_rate: int) -> np.ndarray:
    """float32 (samples,): the sound in mono at `sampling_rate` hertz, decoded within `policy.timeout` seconds.

    Raises `MediaLimitError` for a sound past the limits of the policy, `MediaError` for other data, an
    unsupported format, an empty, truncated or corrupt file, samples that are no numbers, or a missing
    package.
    """
    pieces: list[np.ndarray] = []
    with _opened(source, policy) as sound:
        rate = sound.sampling_rate
        resampler = None if rate == sampling_rate else _resampler(source, rate, sampling_rate)
        count = 0
        for block in sound.blocks:
            mono = _mixed(block)
            peak = np.abs(mono).max(initial=0)
            if not peak <= MAX_PEAK:  # nor for NaN
                reason = f"is {peak:g}, far beyond 1" if np.isfinite(peak) else "is no finite number"
                raise corrupt(source, "sound", f"a sample after {count} {reason}")
            count += len(block)
            pieces.append(mono if resampler is None else resampler.resample_chunk(mono))
        if not count:
            raise MediaError(
                f"sound {source.digest[:12]} is empty: it holds no samples; leave the part out", digest=source.digest
            )
    if resampler is None:
        return np.concatenate(pieces)
    wanted = math.ceil(count * sampling_rate / rate)
    samples = np.concatenate([*pieces, resampler.resample_chunk(np.empty(0, np.float32), last=True)])[:wanted]
    return samples if len(samples) == wanted else np.pad(samples, (0, wanted - len(samples)))


def audio_info(source: MediaSource, policy: MediaPolicy) -> AudioInfo:
    """From the header; decoded only where it has no length. Errors as `decode_audio`."""
    with _opened(source, policy) as sound:
        seconds = sound.seconds
        if seconds is None:
            seconds = sum(len(block) for block in sound.blocks) / sound.sampling_rate
        return AudioInfo(seconds, sound.sampling_rate, sound.channels, sound.format)


def holds_sound(source: MediaSource, policy: MediaPolicy) -> bool:
    """Whether a file of video has a sound; animated images have none. Raises `MediaError`."""
    container = container_of(source, "video")
    if container is None:
        return False
    with (
        decode_errors(source, policy, Deadline(policy.timeout), kind="video"),
        open_container(source, policy, container, "video") as file,
    ):
        return bool(file.streams.audio)


def audio_decoder_versions() -> dict[str, str | None]:
    """The versions of the decoders and the resampler. A wheel's version implies that of the library in it."""
    return {name: package_version(name) for name in ("soundfile", "av", "soxr")}


@contextmanager
def _opened(source: MediaSource, policy: MediaPolicy) -> Iterator[_Sound]:
    """The sound of a source, within the limits of the policy; `blocks` are checked as they are read."""
    deadline = Deadline(policy.timeout)
    with decode_errors(source, policy, deadline, kind="sound"), _reader(source, policy, deadline) as sound:
        rate, channels = sound.sampling_rate, sound.channels
        if not 1 <= rate <= MAX_RATE or channels < 1:
            raise corrupt(source, "sound", f"its header declares {channels} channels at {rate} Hz")
        policy.check_audio(sound.seconds or 0, channels, digest=source.digest)

        def checked() -> Iterator[np.ndarray]:
            count = 0
            for block in sound.blocks:
                deadline.remaining()
                count += len(block)
                policy.check_audio(count / rate, digest=source.digest)
                yield block

        yield sound._replace(blocks=checked())


def _reader(source: MediaSource, policy: MediaPolicy, deadline: Deadline) -> AbstractContextManager[_Sound]:
    if source.raw_modality == "audio":
        return nullcontext(_array(source))
    data = _without_tags(bytes(source.data))
    if holds_several(data, sniff(data) or ""):
        raise MediaError(
            f"sound {source.digest[:12]} is several files joined into one, and the first alone would be "
            "read; join their samples, or pass them as several sounds",
            digest=source.digest,
        )
    container = container_of(source, "sound")
    return _sndfile(source, data, deadline) if container is None else _ffmpeg(source, policy, container)


def _mixed(block: np.ndarray) -> np.ndarray:
    """float32 (samples,), a copy."""
    if block.shape[1] == 1:
        return block[:, 0].copy()
    if block.shape[1] == 2:  # equal to the mean, and several times faster
        mono: np.ndarray = block[:, 0] + block[:, 1]
        mono /= 2
        return mono
    mean: np.ndarray = block.mean(axis=1, dtype=np.float32)
    return mean


def _missing(package: str, rate: str) -> str:
    instead = f"{install_command('audio')}, or pass an array of samples{rate}"
    return f"{package} is not installed, which sounds need; {instead}"


def _resampler(source: MediaSource, rate: int, sampling_rate: int) -> Any:
    try:
        import soxr
    except ImportError as error:
        reason = _missing("soxr", f" at {sampling_rate} Hz")
        raise MediaError(reason, digest=source.digest) from error
    return soxr.ResampleStream(rate, sampling_rate, 1, dtype="float32", quality="HQ")


def _array(source: MediaSource) -> _Sound:
    samples, rate = raw_samples(source)

    def blocks() -> Iterator[np.ndarray]:
        for start in range(0, len(samples), _BLOCK):
            block = samples[start : start + _BLOCK]
            yield block if block.dtype == np.float32 else block.astype(np.float32) / np.float32(32768)

    return _Sound(len(samples) / rate, rate, samples.shape[1], "samples", blocks())


@contextmanager
def _sndfile(source: MediaSource, data: bytes, deadline: Deadline) -> Iterator[_Sound]:
    media_type = sniff(data) or "unknown data"
    if media_type not in _SNDFILE_TYPES:
        raise MediaError(
            f"{source.nbytes} bytes ({source.digest[:12]}, {media_type}) are not a sound in a WAV, FLAC, "
            "OGG, MP3, AIFF, AAC, MP4, WebM or MKV file; convert it to one of them",
            digest=source.digest,
        )
    declared = declared_bytes(data, media_type)
    if declared > len(data):
        raise corrupt(source, "sound", f"it ends early, after {source.nbytes} bytes")
    try:
        import soundfile
    except (ImportError, OSError) as error:  # OSError: the package without its library
        raise MediaError(_missing("soundfile", ""), digest=source.digest) from error
    stream = TimedBytes(data, deadline)
    try:
        file = soundfile.SoundFile(stream)
    except soundfile.LibsndfileError as error:  # its text has the address of the stream
        raise OSError(error.error_string) from error
    file.seekable = lambda: False  # or soundfile seeks to its place after each block, which is inexact for MP3
    with file:
        # Of an MP3 without a header for the whole, libsndfile guesses the length, and stops there.
        is_guess = media_type == "audio/mpeg" and not declared
        length = None if is_guess or file.frames >= _UNKNOWN_LENGTH else file.frames

        def blocks() -> Iterator[np.ndarray]:
            count, read = 0, _BLOCK
            block = np.empty((_BLOCK, file.channels), np.float32)
            while read == _BLOCK:
                read = file.buffer_read_into(block, "float32")
                count += read
                yield block[:read]
            deadline.remaining()  # after the deadline, TimedBytes ends early
            if length is not None and count < length:
                raise corrupt(source, "sound", f"it ends early, after {count} of {length} samples")
            if is_guess and count == file.frames and stream.tell() < len(data) - _MAX_UNREAD:
                raise MediaError(
                    f"sound {source.digest[:12]} is an MP3 of variable bitrate without its length in a "
                    f"header, and libsndfile reads only {count} samples of it; re-encode it",
                    digest=source.digest,
                )

        seconds = None if length is None else length / file.samplerate
        yield _Sound(seconds, file.samplerate, file.channels, media_type, blocks())


def _without_tags(data: bytes) -> bytes:
    """The file without its ID3v2 tags: libsndfile would read any format that follows them."""
    start = 0
    while data.startswith(b"ID3", start):
        size = data[start + 6 : start + 10]
        start += 10 + sum((byte & 0x7F) << shift for byte, shift in zip(size, (21, 14, 7, 0), strict=False))
    return data[start:]


@contextmanager
def _ffmpeg(source: MediaSource, policy: MediaPolicy, container: Container) -> Iterator[_Sound]:
    with open_stream(source, policy, container, "sound", _CODECS) as (file, stream):
        policy.check_audio(0, stream.codec_context.channels, digest=source.digest)
        frames = file.decode(stream)
        first = next(frames, None)
        if first is None:
            raise corrupt(source, "sound", "it holds no samples")
        rate, channels = first.sample_rate, first.layout.nb_channels

        def blocks() -> Iterator[np.ndarray]:
            for frame in chain([first], frames):
                if frame.is_corrupt or (frame.sample_rate, frame.layout.nb_channels) != (rate, channels):
                    raise corrupt(source, "sound", "a part is broken or of another rate or number of channels")
                yield _samples_of_frame(frame)

        seconds = None
        if container != "aac":  # which has no header for the whole
            if stream.duration is not None:
                seconds = float(stream.duration * stream.time_base)
            elif file.duration is not None:
                seconds = file.duration / 1e6
        yield _Sound(seconds, rate, channels, sniff(source.data) or container, blocks())


def _samples_of_frame(frame: Any) -> np.ndarray:
    """float32 (samples, channels), integers scaled to -1 to 1."""
    array: np.ndarray = frame.to_ndarray()
    by_time = array.T if frame.format.is_planar else array.reshape(-1, frame.layout.nb_channels)
    if by_time.dtype.kind == "f":
        return by_time.astype(np.float32, copy=False)
    zero, scale = (128, 128) if by_time.dtype == np.uint8 else (0, 1 << 8 * by_time.dtype.itemsize - 1)
    return (by_time.astype(np.float32) - np.float32(zero)) / np.float32(scale)
