"""Images, frames of videos and sounds, decoded and encoded again for display.

The page never receives the bytes of a source: what a browser decodes are files that were written here.
"""

import base64
import io
from typing import Any, Final

import numpy as np
from PIL import Image

from renderers import MediaSource
from renderers.errors import MediaError
from renderers.media.audio_decoding import audio_info, decode_audio
from renderers.media.decoding import decode_image
from renderers.media.policy import MediaPolicy
from renderers.media.samples import wav_bytes
from renderers.media.video_decoding import FramePlan, VideoInfo, sample_video
from renderers.messages import Modality
from rollouts.trajectory.packed_episodes import AbsentSource

_IMAGE_SIDE: Final = 640
_FRAME_SIDE: Final = 256
_POLICY: Final = MediaPolicy(timeout=10.0)


def display_medium(source: MediaSource, modality: Modality) -> dict[str, Any]:
    """A medium for the page, as JSON.

    `frames` are {"data": base64 of a PNG or WebP file, "type", "frame": its number}: one for an image, and
    at most 16 of a video, evenly spaced. An image is reduced so that its longer side has at most
    640 pixels. `width`, `height` and, of a video, `total` frames and `fps` are those of the
    source; `bytes` is its size. A sound has no frames, and `display_sound` under `sound`. A medium that
    cannot be shown has no frames and an `error`.
    """
    medium: dict[str, Any] = {"digest": source.digest, "modality": modality, "frames": []}
    if isinstance(source, AbsentSource):
        return {**medium, "error": "its bytes were not sent with this episode"}
    medium["bytes"] = source.nbytes
    try:
        match modality:
            case "image":
                return {**medium, **_image(source)}
            case "video":
                return {**medium, **_video(source)}
            case "audio":
                return {**medium, "sound": display_sound(source, _POLICY)}
    except (MediaError, MemoryError) as error:
        return {**medium, "error": f"it cannot be decoded: {error}"}


def _image(source: MediaSource) -> dict[str, Any]:
    image = decode_image(source, _POLICY)
    return {"width": image.width, "height": image.height, "frames": [_frame(image, 0, _IMAGE_SIDE)]}


def _video(source: MediaSource) -> dict[str, Any]:
    video = sample_video(source, _POLICY, _evenly_spaced)
    frames = [
        _frame(Image.fromarray(np.ascontiguousarray(planes.transpose(1, 2, 0))), index, _FRAME_SIDE)
        for planes, index in zip(video.frames, video.indices, strict=True)
    ]
    info = video.info
    return {"width": info.width, "height": info.height, "total": info.frames, "fps": info.fps, "frames": frames}


def _evenly_spaced(info: VideoInfo) -> FramePlan:
    count = min(info.frames, 16)
    return FramePlan(np.linspace(0, info.frames - 1, count).round().astype(int).tolist(), _reduced)


def _reduced(planes: np.ndarray) -> np.ndarray:
    """Frames are reduced as soon as they are decoded, so that 16 large ones need little memory."""
    image = Image.fromarray(np.ascontiguousarray(planes.transpose(1, 2, 0)))
    image.thumbnail((_FRAME_SIDE, _FRAME_SIDE))
    return np.asarray(image).transpose(2, 0, 1)


def _frame(image: Image.Image, index: int, side: int) -> dict[str, Any]:
    image.thumbnail((side, side))
    lossless = image.width * image.height <= 128 * 128
    file = io.BytesIO()
    if lossless:
        image.save(file, "PNG")
    else:
        image.save(file, "WEBP", quality=82)
    return {
        "data": base64.b64encode(file.getvalue()).decode(),
        "type": "image/png" if lossless else "image/webp",
        "frame": index,
    }


# Of a longer sound the page has the beginning.
_PLAYED_SECONDS: Final = 60


def display_sound(source: MediaSource, policy: MediaPolicy) -> dict[str, Any]:
    """A sound for the page, as JSON.

    `seconds`, `rate`, `channels` and `format` are those of the source. `peaks` are the largest magnitudes
    in 240 equal parts of the sound in mono, 0 to 1 of `peak`, the largest one. `wave` is base64 of a WAV
    file: its first 60 seconds, 16 bits, mono, at most 16 kHz. Raises `MediaError`.
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
