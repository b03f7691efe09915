"""Media of episodes as files: unchanged where they were files, pixels as a PNG, samples as a WAV."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Final

from PIL import Image

from renderers import MediaSource
from renderers.errors import MediaError
from renderers.media.decoding import raw_to_image, raw_video_frames
from renderers.media.samples import raw_samples, wav_bytes
from renderers.media.sniffing import sniff
from renderers.process.files import read_bytes
from rollouts.files import new_file

#: By media type; of the others the suffix is the subtype.
_SUFFIXES: Final = {
    "image/jpeg": "jpg",
    "image/tiff": "tif",
    "image/x-icon": "ico",
    "image/x-portable-anymap": "ppm",
    "video/quicktime": "mov",
    "video/x-matroska": "mkv",
    "video/x-msvideo": "avi",
    "video/x-flv": "flv",
    "video/x-ms-asf": "asf",
    "video/mp2t": "ts",
    "audio/mpeg": "mp3",
    "audio/basic": "au",
    "audio/x-caf": "caf",
}


def export_medium(source: MediaSource, directory: Path) -> Path:
    """Write a medium as `<first 16 digits of its digest>.<suffix>`; the file's path.

    An existing file is never changed. Raises `MediaError` if it has other contents or the medium is damaged,
    `CommandFileError` and `OSError` if the directory cannot be written to.
    """
    try:
        source.verify()
        suffix, data = file_contents(source)
    except MediaError as error:
        raise MediaError(f"{source.digest}: not exported: {error.reason}", digest=source.digest) from error
    path = directory / f"{source.digest[:16]}.{suffix}"
    if not os.path.lexists(path):
        with new_file(path) as temporary:
            temporary.write_bytes(data)
    elif read_bytes(path) != data:
        reason = f"{path} exists with other contents and was not changed; choose another file to export to"
        raise MediaError(f"{source.digest}: {reason}", digest=source.digest)
    return path


def file_contents(source: MediaSource) -> tuple[str, bytes | memoryview]:
    """The suffix and the bytes of a file: the source, or a PNG or WAV of raw pixels or samples. Raises `MediaError`."""
    if source.raw_modality == "audio":
        return "wav", wav_bytes(*raw_samples(source))
    if source.raw_modality == "image":
        return "png", _png([raw_to_image(source.data)], None)
    if source.raw_modality == "video":
        frames, fps = raw_video_frames(source.data)
        return "png", _png([Image.fromarray(frame) for frame in frames], fps)
    media_type = sniff(source.data) or ""
    subtype = media_type.partition("/")[2]
    return _SUFFIXES.get(media_type, subtype if subtype.isalnum() else "bin"), source.data


def _png(frames: list[Image.Image], fps: float | None) -> bytes:
    file = io.BytesIO()
    if len(frames) == 1:
        frames[0].save(file, "PNG")
    else:
        # Pillow merges equal successive frames unless their blend modes differ, which makes no difference for opaque
        # frames.
        blend = [number % 2 for number in range(len(frames))]
        # Where the frame rate is not known, 2 a second, as vision-language models usually sample.
        duration = 1000 / (fps or 2)  # milliseconds a frame
        frames[0].save(file, "PNG", save_all=True, append_images=frames[1:], duration=duration, blend=blend, disposal=0)
    return file.getvalue()
