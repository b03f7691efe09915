"""Sounds that were given as samples, not as a file: their source form, and arrays that become one.

The form is little-endian: magic `mmpa` (4 bytes), type of the samples (4 bytes ASCII, padded with NUL: `i2`
or `f4`), channels and sampling rate in hertz (uint32 each), number of samples per channel (uint64), then
the samples, interleaved by channel. It describes itself, so a digest of it covers everything in the header.
"""

import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from renderers.errors import MediaError, short_repr
from renderers.media.item import AUDIO_MAGIC, MediaSource
from renderers.media.policy import MediaPolicy

#: What the value of an audio part may be.
AUDIO = (
    "a sound is the bytes of a file, a data URL, a URL or path the policy allows, or an array of int16 or "
    "floats from -1 to 1, (samples,) or (samples, channels), or tensor (samples,) or (channels, samples), "
    "with its sampling_rate"
)
_HEADER = struct.Struct("<4s4sIIQ")
_DTYPES: Mapping[str, np.dtype[Any]] = {"i2": np.dtype("<i2"), "f4": np.dtype("<f4")}
#: Mixing and filtering may exceed 1 by some; larger values are integers that were made floats.
MAX_PEAK = 16
#: The highest sampling rate, in hertz.
MAX_RATE = 768_000
# As many as a WAV file of that rate can have: it counts the bytes of a second in 32 bits.
_MAX_CHANNELS = 1024
# The header of a WAV file with nothing but a format and samples, and the numbers of formats.
_WAV_HEADER = struct.Struct("<4sI8sIHHIIHH4sI")
_WAV_PCM, _WAV_FLOAT = 1, 3


class Samples(NamedTuple):
    """`data`: int16 or float32 (samples, channels), int16 a view of the source; `sampling_rate` in hertz."""

    data: np.ndarray
    sampling_rate: int


def raw_samples(source: MediaSource) -> Samples:
    """The samples of a source in the form of this module, not copied. Raises `MediaError`."""
    data = source.data
    if source.nbytes < _HEADER.size:
        raise MediaError("raw samples end inside their header", digest=source.digest)
    _, type_field, channels, rate, count = _HEADER.unpack_from(data)
    dtype = _DTYPES.get(type_field.rstrip(b"\0").decode("ascii", "replace"))
    expected = 0 if dtype is None else dtype.itemsize * channels * count
    is_possible = 0 < channels <= _MAX_CHANNELS and 0 < rate <= MAX_RATE
    if dtype is None or not is_possible or source.nbytes - _HEADER.size != expected:
        raise MediaError(
            f"raw samples of type {type_field!r}, {channels} channels and {count} samples at {rate} Hz hold "
            f"{source.nbytes - _HEADER.size} bytes, not {expected}; at most {_MAX_CHANNELS} channels at "
            f"{MAX_RATE} Hz are read",
            digest=source.digest,
        )
    samples = np.frombuffer(data, dtype, offset=_HEADER.size).reshape(count, channels)
    samples.setflags(write=False)
    return Samples(samples, rate)


def samples_source(value: Any, sampling_rate: Any, policy: MediaPolicy) -> MediaSource:
    """The source of an array or a tensor of samples.

    int16 is kept; floats of 16, 32 and 64 bits, from -1 to 1, become float32. Raises `MediaError` for
    another type, shape or rate, and for samples that are no numbers or far beyond 1; `MediaLimitError` past
    the limits of the policy, before anything is copied.
    """
    rate = check_rate(sampling_rate)
    is_tensor = not isinstance(value, np.ndarray)
    if is_tensor:
        check_holds_data(value)
    shape = tuple(value.shape)
    if len(shape) not in (1, 2):
        raise MediaError(f"{AUDIO}; not {value.dtype} {shape}")
    if 0 in shape:
        raise MediaError(f"an empty sound: an array of shape {shape} has no samples; leave the part out")
    count, channels = (*shape, 1)[:2] if len(shape) == 1 or not is_tensor else shape[::-1]
    if channels > policy.max_audio_channels >= count:
        order = "last" if is_tensor else "first"
        raise MediaError(f"an array {shape} has its channels {order}; transpose it: {AUDIO}")
    policy.check_audio(count / rate, channels)
    array: np.ndarray = value
    if is_tensor:
        value = value.detach().cpu().resolve_conj().resolve_neg()
        array = (value.float() if value.is_floating_point() else value).numpy().T  # numpy has no bfloat16
    by_time = array.reshape(count, channels)
    if by_time.dtype.newbyteorder("=") == np.int16:
        kind = "i2"
    elif by_time.dtype.kind == "f" and by_time.dtype.itemsize <= 8:
        kind = "f4"
        with np.errstate(over="ignore"):
            by_time = by_time.astype(np.float32)
        if not np.abs(by_time).max() <= MAX_PEAK:  # nor for NaN
            at = tuple(map(int, np.argwhere(~(np.abs(by_time) <= MAX_PEAK))[0]))
            cure = "divide what was int16 by 32768" if np.isfinite(by_time[at]) else "look where it was computed"
            raise MediaError(
                f"sample {at[0]} of channel {at[1]} is {by_time[at]}; floats are finite and from -1 to 1: {cure}"
            )
    else:
        raise MediaError(f"samples are int16, or floats from -1 to 1, not {by_time.dtype}; convert them first")
    header = _HEADER.pack(AUDIO_MAGIC, kind.encode().ljust(4, b"\0"), channels, rate, count)
    return MediaSource.of(b"".join((header, np.ascontiguousarray(by_time, _DTYPES[kind]).data.cast("B"))))


def check_holds_data(tensor: Any) -> None:
    """Raise `MediaError` for a sparse tensor, and for one of the device `meta`."""
    if str(tensor.layout) != "torch.strided" or tensor.is_meta:
        raise MediaError(f"a tensor is dense and holds data, not {tensor.layout} on {tensor.device}")


def wav_bytes(samples: np.ndarray, sampling_rate: int) -> bytes:
    """A WAV file of int16 or float32 samples, (samples,) or (samples, channels)."""
    size, channels = samples.itemsize, 1 if samples.ndim == 1 else samples.shape[1]
    kind = _WAV_PCM if samples.dtype == np.int16 else _WAV_FLOAT
    data = np.ascontiguousarray(samples, samples.dtype.newbyteorder("<")).tobytes()
    layout = (kind, channels, sampling_rate, sampling_rate * channels * size, channels * size, 8 * size)
    length = _WAV_HEADER.size - 8 + len(data)
    return _WAV_HEADER.pack(b"RIFF", length, b"WAVEfmt ", 16, *layout, b"data", len(data)) + data


def is_wav_in_mono(data: bytes | memoryview, sampling_rate: int) -> bool:
    """Whether a file is a WAV of `wav_bytes`, mono at this rate: all decoders agree on its samples."""
    if len(data) < _WAV_HEADER.size:
        return False
    riff, _, form, _, kind, channels, rate, _, _, bits, chunk, _ = _WAV_HEADER.unpack_from(data)
    is_wav = (riff, form, chunk) == (b"RIFF", b"WAVEfmt ", b"data")
    return is_wav and (channels, rate) == (1, sampling_rate) and (kind, bits) in ((_WAV_PCM, 16), (_WAV_FLOAT, 32))


def check_rate(sampling_rate: Any) -> int:
    """A sampling rate in hertz. Raises `MediaError` for a missing or impossible one."""
    is_number = isinstance(sampling_rate, (int, float, np.number)) and not isinstance(sampling_rate, bool)
    if not is_number or not 1 <= sampling_rate <= MAX_RATE or int(sampling_rate) != sampling_rate:
        raise MediaError(
            f"sampling_rate is a whole number of hertz from 1 to {MAX_RATE}, not "
            f"{short_repr(sampling_rate)}; put it "
            'beside the array of samples: {"type": "audio", "audio": array, "sampling_rate": 16000}'
        )
    return int(sampling_rate)


def array_and_rate(value: Any, sampling_rate: Any) -> tuple[Any, Any]:
    """The value of an audio part and its sampling rate; both may be in a dict, as in rows of `datasets`.

    A dict is `{"array": ..., "sampling_rate": ...}`, or `{"bytes": ..., "path": ...}` with one of them.
    """
    if hasattr(value, "get_all_samples"):
        raise MediaError(
            f"a sound is not the {type(value).__name__} of torchcodec; pass the file: of a column of "
            "`datasets`, "
            'dataset.cast_column("audio", Audio(decode=False)) gives it'
        )
    if not isinstance(value, Mapping):
        return value, sampling_rate
    if value.get("array") is not None:
        rates = {check_rate(rate) for rate in (value.get("sampling_rate"), sampling_rate) if rate is not None}
        if len(rates) > 1:
            raise MediaError(
                f"a sound with two sampling rates, {value['sampling_rate']} beside the array and "
                f"{sampling_rate} in the part; leave out the wrong one"
            )
        return value["array"], next(iter(rates), None)
    for name in ("bytes", "path"):
        if value.get(name) is not None:
            return value[name], sampling_rate
    raise MediaError(f"a dict of a sound has array and sampling_rate, bytes, or path, not {sorted(value)!r:.200}")
