"""The value of a content part -> source bytes, within the limits of a policy."""

import base64
import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote_to_bytes

import numpy as np
from PIL import Image

from renderers.errors import MediaError, MediaLimitError, MediaPolicyError, short_repr
from renderers.media.decoding import array_to_raw, decode_image, frames_to_raw, image_to_raw, raw_video_frames
from renderers.media.item import MediaSource, raw_modality
from renderers.media.paths import path_of_url, read_path
from renderers.media.policy import MediaPolicy
from renderers.media.samples import AUDIO, array_and_rate, check_holds_data, raw_samples, samples_source
from renderers.media.sniffing import check_type, sniff
from renderers.media.store import MediaStore
from renderers.media.urls import allowed_target
from renderers.messages import MEDIA_PART_TYPES, NOUNS, Modality, media_value
from renderers.process.fork_reset import ProcessLock

# A single letter and a colon is a drive, not a scheme.
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):")
# Pillow reads the file of an image at the first access to its pixels, and two threads at once (one image in
# two parts, or in several rollouts) would disturb each other's reading. Locks by id, so that different images
# do not wait.
_LOADING_LOCKS = tuple(ProcessLock() for _ in range(64))
_SPACE = re.compile(r"[ \t\r\n\f]")
_IMAGE = "an image is bytes, a PIL image, a uint8 array or tensor, a data URL, or a URL or path that the policy allows"
_VIDEO = (
    "a video is the bytes of a file, a data URL, a URL or path the policy allows, a list of frames, or a "
    "uint8 array (time, height, width, 3) or tensor (time, 3, height, width)"
)
_EXPECTED: Mapping[Modality, str] = {"image": _IMAGE, "video": _VIDEO, "audio": AUDIO}
_RATE_OF_FILE = {
    "video": "fps is the frame rate of a list or array of frames; a video file contains its own, and "
    "video_preprocessor_config.json decides how many of its frames are taken. Leave fps out",
    "audio": "sampling_rate is the rate of an array of samples; a file has its own. Leave sampling_rate out",
}


def source_of_part(part: Mapping[str, Any], policy: MediaPolicy) -> MediaSource:
    """The source of a media part.

    Images: bytes, a PIL image, a numpy array of uint8 (height, width) or (height, width, 1, 3 or 4), a torch
    tensor of uint8 (1, 3 or 4, height, width), a `MediaSource`, a data URL, and under the policy a path, a
    `file:` or an http(s) URL. Videos: the bytes of a video or an animation, `MediaSource`, URL or path
    likewise; a list or tuple of images in any of these forms, all of one size; a numpy array of uint8 (time,
    height, width, 3), a tensor of uint8 (time, 3, height, width). `fps` beside frames says how many there are
    in a second. Sounds: the bytes of a file, `MediaSource`, URL or path likewise; a numpy array (samples,) or
    (samples, channels), a tensor (samples,) or (channels, samples), int16 or floats from -1 to 1, with
    `sampling_rate` beside it. As in OpenAI's parts, the value may be a dict with the key `url`; `url`, `path`
    and `base64` beside the type are read as transformers reads them.

    Raises `MediaPolicyError` for URLs and paths that are not allowed, `MediaFetchError` for those that
    cannot be read, `MediaLimitError` for what is too large, before it is copied, decoded or read where its
    size is known by then, `MediaError` for anything that is no such medium.
    """
    (value, rate), modality = _value_and_rate(part), _modality(part)
    if value is None:
        keys = "input_audio.data (base64)" if "input_audio" in part else f"{modality}, url, path or base64"
        raise MediaError(f"the part has no {keys}; {_EXPECTED[modality]}")
    raw = _raw_form(value, modality, rate, policy)
    if raw is not None:
        return raw if isinstance(raw, MediaSource) else MediaSource.of(raw)
    source = _source_of_file(value, policy, _EXPECTED[modality])
    _check(source, part, rate, policy)
    return source


def part_of_value(value: Any) -> dict[str, Any] | None:
    """A part for a medium that says by itself what it is; None for any other value.

    An image: a PIL image, a uint8 array (height, width) or (height, width, 1, 3 or 4). A sound: `{"array":
    ..., "sampling_rate": ...}`. Bytes and a `MediaSource` are what their first bytes say, an image where
    these are unknown.
    """
    if isinstance(value, (bytes, bytearray, MediaSource)):
        data = value.data if isinstance(value, MediaSource) else memoryview(value)
        kind = raw_modality(data) or (sniff(data) or "").partition("/")[0]
        modality = kind if kind in ("audio", "video") else "image"
        return {"type": modality, modality: value}
    if isinstance(value, Mapping):
        is_sound = isinstance(value.get("array"), np.ndarray) and "sampling_rate" in value
        return {"type": "audio", "audio": dict(value)} if is_sound else None
    is_image = isinstance(value, Image.Image) or (
        isinstance(value, np.ndarray)
        and value.dtype == np.uint8
        and (value.ndim == 2 or (value.ndim == 3 and value.shape[2] in (1, 3, 4)))
    )
    return {"type": "image", "image": value} if is_image else None


def _modality(part: Mapping[str, Any]) -> Modality:
    return MEDIA_PART_TYPES.get(part.get("type", ""), "image")


def _value_and_rate(part: Mapping[str, Any]) -> tuple[Any, Any]:
    """The medium of a part and its rate. Each call copies base64 that is no data URL yet."""
    value, modality = media_value(part), _modality(part)
    if modality == "audio":
        return array_and_rate(value, part.get("sampling_rate"))
    return value, part.get("fps") if modality == "video" else None


def load_source(part: Mapping[str, Any], policy: MediaPolicy, store: MediaStore) -> MediaSource:
    """The source of a part, from the store if it was loaded before. Raises the errors of `source_of_part`."""
    value, rate = _value_and_rate(part)
    key = _reference_key(value, policy)
    source = _stored_source(part, key, rate, policy, store)
    if source is None:
        source = store.references.put(key, store.add_source(source_of_part(part, policy)))
    return source


def cached_source(part: Mapping[str, Any], policy: MediaPolicy, store: MediaStore) -> MediaSource | None:
    """The source that `load_source` has loaded before from an equal part; None if there is none.

    Raises `MediaError` for a URL that the policy does not allow, and for what was loaded as a medium of
    another type.
    """
    value, rate = _value_and_rate(part)
    return _stored_source(part, _reference_key(value, policy), rate, policy, store)


def _stored_source(
    part: Mapping[str, Any], key: Any, rate: Any, policy: MediaPolicy, store: MediaStore
) -> MediaSource | None:
    cached = store.references.get(key)
    # Stores are shared between policies. A source past the limit of this policy is loaded again, which raises
    # the error. For raw pixels and samples the policy limits their number, not their bytes.
    if cached is None or not (cached.raw_modality or cached.nbytes <= policy.max_bytes):
        return None
    _check(cached, part, rate, policy)  # it may have been loaded from a part of another type
    return cached


def _reference_key(value: Any, policy: MediaPolicy) -> Any:
    """What `ReferenceCache` finds a value by; None for a file, which may have changed since it was read."""
    if type(value) is bytes or (type(value) is str and value[:5].lower() == "data:"):
        return value
    if isinstance(value, str) and _scheme(value) in ("http", "https"):
        allowed_target(value.strip(), policy)
        return value.strip()
    if isinstance(value, (str, os.PathLike)):
        return None
    return value


def _path(value: str | os.PathLike[str]) -> str | os.PathLike[str] | None:
    """The path in a text or path; None for a URL. Raises `MediaPolicyError` for a path of another machine."""
    if not isinstance(value, str):
        return value
    scheme = _scheme(value)
    if scheme == "file":
        return path_of_url(value.strip())
    return None if scheme and (scheme in ("data", "http", "https") or "/" in value) else value


def _scheme(text: str) -> str:
    match = _SCHEME.match(text[:40].lstrip())
    return match[1].lower() if match else ""


def _raw_form(value: Any, modality: Modality, rate: Any, policy: MediaPolicy) -> bytes | MediaSource | None:
    """The form of pixels or samples that are in memory; None for a file, and for what is no medium."""
    if modality == "video" and isinstance(value, (list, tuple)):
        return frames_to_raw(_frames(value, policy), _frame_rate(rate))
    if modality == "audio":
        is_array = isinstance(value, np.ndarray) or _is_tensor(value)
        return samples_source(value, rate, policy) if is_array else None
    if isinstance(value, Image.Image):
        if modality == "video":
            raise MediaError(f"{_VIDEO}, not one image; an image goes into a part of type 'image'")
        policy.check_size(value.width, value.height)
        with _LOADING_LOCKS[id(value) // 64 % len(_LOADING_LOCKS)]:
            return image_to_raw(value)
    array = _array(value, policy, of_frames=modality == "video")
    if array is None:
        return None
    return array_to_raw(array) if modality == "image" else frames_to_raw(array, _frame_rate(rate))


def _check(source: MediaSource, part: Mapping[str, Any], rate: Any, policy: MediaPolicy) -> None:
    """Raise `MediaError` for another modality than the part's, or past the policy's limits."""
    modality, raw = _modality(part), source.raw_modality
    if rate is not None and (raw is None or raw == "video"):
        raise MediaError(_RATE_OF_FILE[modality], digest=source.digest)
    if raw == "audio" == modality:
        samples, sampling_rate = raw_samples(source)
        policy.check_audio(len(samples) / sampling_rate, samples.shape[1], digest=source.digest)
    elif raw == "video" == modality:
        count, height, width, _ = raw_video_frames(source.data)[0].shape
        policy.check_frames(count, width, height)
        policy.check_size(width, height)
    elif raw not in (None, modality):
        still = "one image, " if (raw, modality) == ("image", "video") else ""
        reason = f'{still}raw {raw}, not {NOUNS[modality]}; pass it in a part of type "{raw}"'
        raise MediaError(reason, digest=source.digest)
    elif raw is None:
        openai = part.get("input_audio")
        declared = f"audio/{openai['format']}" if isinstance(openai, Mapping) and openai.get("format") else None
        media_type = check_type(source.data, expected=modality, declared=declared, digest=source.digest) or ""
        if modality == "video" and media_type.startswith("image/") and not _is_animated(media_type, source.data):
            cure = 'pass it in a part of type "image", or in a list of frames'
            raise MediaError(f"one image ({media_type}), not a video; {cure}", digest=source.digest)


def _is_tensor(value: Any) -> bool:
    """torch is not imported for this check: if no other code has imported it, no value is a tensor."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _array(value: Any, policy: MediaPolicy, *, of_frames: bool = False) -> np.ndarray | None:
    """An array, or a torch tensor with channels last (copied only from an accelerator); else None."""
    is_tensor = _is_tensor(value)
    if not is_tensor and not isinstance(value, np.ndarray):
        return None
    shape = _channels_last(value, of_frames) if is_tensor else value.shape
    count, height, width = ((1,) * (not of_frames) + tuple(shape) + (0, 0, 0))[:3]
    policy.check_size(width, height)
    if of_frames:
        policy.check_frames(count, width, height)
    array: np.ndarray = np.moveaxis(value.detach().cpu().numpy(), -3, -1) if is_tensor else value
    return array


def _source_of_file(value: Any, policy: MediaPolicy, expected: str) -> MediaSource:
    """The source of bytes, in memory or behind a URL or path. `expected` is for errors."""
    if isinstance(value, MediaSource):
        _check_bytes(value.data, policy)
        value.verify()  # the digest is trusted from here on
        return value
    if isinstance(value, (bytes, bytearray, memoryview)):
        _check_bytes(value, policy)
        data = bytes(value)
    elif isinstance(value, (str, os.PathLike)):
        data = _read_reference(value, policy)
        _check_bytes(data, policy)
    else:
        raise MediaError(f"{expected}, not {type(value).__name__}")
    if not data:
        raise MediaError("zero bytes of media; leave the part out, or look why the file is empty")
    return MediaSource.of(data)


def _read_reference(value: str | os.PathLike[str], policy: MediaPolicy) -> bytes:
    path = _path(value)
    if path is not None:
        return read_path(path, policy)
    text = str(value).strip()
    scheme = _scheme(text)
    if scheme == "data":
        return _read_data_url(text, policy)
    if scheme in ("http", "https"):
        from renderers.media.fetching import fetch

        return fetch(text, policy)
    raise MediaPolicyError(
        f"a {scheme} URL is not followed under this media policy; pass the bytes or a data URL instead"
    )


def _frames(values: Sequence[Any], policy: MediaPolicy) -> np.ndarray:
    """uint8 (time, height, width, 3) of a list of images in any form."""
    if not values:
        raise MediaError("a video without frames; leave the part out")
    policy.check_frames(len(values))
    frames: np.ndarray | None = None
    for index, value in enumerate(values):
        try:
            frame = _frame(value, policy)
            height, width, _ = frame.shape
            if frames is None:
                policy.check_frames(len(values), width, height)
                frames = np.empty((len(values), *frame.shape), dtype=np.uint8)
            elif frame.shape != frames.shape[1:]:
                raise MediaError(
                    f"{width}x{height} pixels, but frame 0 has {frames.shape[2]}x{frames.shape[1]}; the "
                    "frames of a video are of one size, so resize them first"
                )
        except MediaError as error:
            raise type(error)(f"frame {index}: {error.reason}", digest=error.digest) from error.__cause__
        frames[index] = frame
    assert frames is not None
    return frames


def _frame(value: Any, policy: MediaPolicy) -> np.ndarray:
    """The pixels (height, width, 3) of a frame."""
    if isinstance(value, Mapping):
        value = value.get("url")
    array = _array(value, policy)
    if array is not None and array.dtype == np.uint8 and array.ndim == 3 and array.shape[2] == 3:
        return array
    return np.asarray(decode_image(source_of_part({"type": "image", "image": value}, policy), policy))


def _check_bytes(data: bytes | bytearray | memoryview, policy: MediaPolicy) -> None:
    nbytes = memoryview(data).nbytes
    start = b"" if isinstance(data, memoryview) and data.ndim != 1 else bytes(data[:4])
    # max_pixels bounds raw pixels, max_audio_seconds raw samples; max_bytes bounds files, whose size does not
    # depend on their contents alone.
    if nbytes > policy.max_bytes and raw_modality(start) is None:
        raise MediaLimitError(f"{nbytes} bytes of media, more than max_bytes={policy.max_bytes} of the policy")


def _channels_last(tensor: Any, of_frames: bool) -> tuple[int, ...]:
    """The shape of an image or frames, channels last. Raises `MediaError` for other tensors."""
    check_holds_data(tensor)
    if str(tensor.dtype) != "torch.uint8":
        raise MediaError(
            f"a tensor is uint8, not {tensor.dtype}: whether floats run from 0 to 1 or to 255 cannot be "
            "told. Scale it yourself and cast to torch.uint8"
        )
    ndim, channels = (4, (3,)) if of_frames else (3, (1, 3, 4))
    if tensor.ndim != ndim or tensor.shape[-3] not in channels:
        expected = "(time, 3, height, width)" if of_frames else "(1, 3 or 4, height, width)"
        raise MediaError(
            f"a tensor is {expected}, not {tuple(tensor.shape)}; permute it, or pass a numpy array with channels last"
        )
    *time, _, height, width = tensor.shape
    return (*time, height, width, tensor.shape[-3])


def _is_animated(media_type: str, data: bytes | memoryview) -> bool:
    """Whether the header of an image file declares several frames; nothing is decompressed."""
    if media_type == "image/png":
        return b"acTL" in bytes(data[: 2**20]).partition(b"IDAT")[0]
    if media_type == "image/webp":
        return bytes(data[12:16]) == b"VP8X" and any(flags & 2 for flags in bytes(data[20:21]))
    return media_type in ("image/gif", "image/avif", "image/tiff")  # the decoder counts the frames


def _frame_rate(fps: Any) -> float | None:
    if fps is None:
        return None
    if isinstance(fps, bool) or not isinstance(fps, (int, float, np.number)) or not 1e-6 <= fps <= 1e6:
        raise MediaError(f"fps is a positive number of frames per second, not {short_repr(fps)}")
    return float(fps)


def _read_data_url(url: str, policy: MediaPolicy) -> bytes:
    header, comma, payload = url.partition(",")
    if not comma:
        raise MediaError("a data URL without a comma holds no data")
    is_base64 = header.lower().endswith(";base64")
    max_length = (policy.max_bytes + 2) // 3 * 4 if is_base64 else policy.max_bytes  # without %-quoting
    too_long = MediaLimitError(
        f"a data URL of {len(payload)} characters, more than max_bytes={policy.max_bytes} of the policy allows"
    )
    if len(payload) > 3 * max_length:
        raise too_long
    if not is_base64:
        return unquote_to_bytes(payload)
    if "%" in payload:
        payload = unquote_to_bytes(payload).decode("latin-1")
    if len(payload) > max_length:
        payload = _SPACE.sub("", payload)
        if len(payload) > max_length:
            raise too_long
    try:
        try:
            return base64.b64decode(payload, validate=True)
        except ValueError:  # wrapped lines; rare, so that the second attempt costs little
            return base64.b64decode(_SPACE.sub("", payload), validate=True)
    except ValueError as error:  # binascii.Error, or characters beyond ASCII
        raise MediaError(f"a data URL or data with broken base64: {error}") from error
