"""Images and videos as content parts, loaded under a policy."""

import base64
import io
from pathlib import Path
from typing import Any

import av
import numpy as np
from PIL import Image

from renderers import MediaPolicy, MediaSource
from renderers.media.decoding import decode_image, raw_video_frames
from renderers.media.reference import source_of_part

NOISE = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)
FRAMES = np.random.default_rng(1).integers(0, 256, (3, 20, 30, 3), dtype=np.uint8)
POLICY = MediaPolicy()


def encoded(image: Image.Image | np.ndarray, format: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    (Image.fromarray(image) if isinstance(image, np.ndarray) else image).save(buffer, format, **options)
    return buffer.getvalue()


PNG = encoded(NOISE)


def data_url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64," + base64.b64encode(data).decode()


def image(value: Any, policy: MediaPolicy = POLICY) -> MediaSource:
    return source_of_part({"type": "image", "image": value}, policy)


def pixels(value: Any, policy: MediaPolicy = POLICY) -> np.ndarray:
    """The RGB pixels that a part with this value shows."""
    shown = decode_image(image(value, policy), policy)
    assert shown.mode == "RGB"
    return np.asarray(shown)


def video(value: Any, policy: MediaPolicy = POLICY, **part: Any) -> MediaSource:
    return source_of_part({"type": "video", "video": value, **part}, policy)


def frames(value: Any, policy: MediaPolicy = POLICY, **part: Any) -> np.ndarray:
    return raw_video_frames(video(value, policy, **part).data)[0]


def below(directory: Path, **options: Any) -> MediaPolicy:
    return MediaPolicy(allowed_directories=(directory,), **options)


def video_file(format: str, codec: str) -> bytes:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=format) as container:
        stream = container.add_stream(codec, rate=5)
        stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p"
        for _ in range(5):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8), "rgb24")))
        container.mux(stream.encode())
    return buffer.getvalue()
