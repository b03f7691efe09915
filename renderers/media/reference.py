"""From what a content part holds to source bytes. Nothing here opens a socket or a file."""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote_to_bytes

import numpy as np
from PIL import Image

from renderers.errors import MediaDecodeError, MediaLimitError, MediaPolicyError
from renderers.media.policy import MediaPolicy
from renderers.media.raw import array_to_raw, image_to_raw, is_raw
from renderers.media.source import MediaSource


def source_of_part(part: Mapping[str, Any], policy: MediaPolicy) -> MediaSource:
    """The source of an image part: bytes, a PIL image, a uint8 array, a `MediaSource` or a data URL.

    Raises `MediaPolicyError` for URLs and paths, `MediaLimitError` for what is too large, `MediaDecodeError` for
    anything that is not a picture.
    """
    value = part.get("image", part.get("image_url"))
    if isinstance(value, Mapping):
        value = value.get("url")
    if isinstance(value, MediaSource):
        source = value
    elif isinstance(value, (bytes, bytearray, memoryview)):
        source = MediaSource.of(bytes(value))
    elif isinstance(value, Image.Image):
        _check_pixels(value.width, value.height, policy)
        source = MediaSource.of(image_to_raw(value))
    elif isinstance(value, np.ndarray):
        height, width = (*value.shape, 0, 0)[:2]
        _check_pixels(width, height, policy)
        source = MediaSource.of(array_to_raw(value))
    elif isinstance(value, str):
        source = MediaSource.of(_read_url(value, policy))
    elif isinstance(value, os.PathLike):
        raise _refused("file path")
    else:
        raise MediaDecodeError(
            f"an image is bytes, a PIL image, a uint8 array or a data URL, not {type(value).__name__}"
        )
    # Raw pixels are bounded by max_pixels already; max_bytes is for files, whose size says nothing of their pixels.
    if source.nbytes > policy.max_bytes and not is_raw(source.data):
        raise MediaLimitError(f"{source.nbytes} bytes of media, more than max_bytes={policy.max_bytes} of the policy")
    return source


def _check_pixels(width: int, height: int, policy: MediaPolicy) -> None:
    if width * height > policy.max_pixels:
        raise MediaLimitError(f"{width}x{height} pixels, more than max_pixels={policy.max_pixels} of the policy")


def _refused(kind: str) -> MediaPolicyError:
    return MediaPolicyError(
        f"a {kind} is not followed under this media policy; pass the bytes, a PIL image or a data URL instead"
    )


def _read_url(url: str, policy: MediaPolicy) -> bytes:
    scheme, separator, rest = url.partition(":")
    if not separator or scheme.lower() != "data":
        kind = f"{scheme.lower()} URL" if separator and "/" in rest else "file path"
        raise _refused(kind)
    header, comma, payload = rest.partition(",")
    if not comma:
        raise MediaDecodeError("a data URL without a comma holds no data")
    if len(payload) > 2 * policy.max_bytes:
        raise MediaLimitError(f"a data URL of {len(payload)} characters, more than the policy's max_bytes allow")
    if not header.lower().endswith(";base64"):
        return unquote_to_bytes(payload)
    try:
        return base64.b64decode(payload, validate=True)
    except ValueError as error:  # binascii.Error, or characters beyond ASCII
        raise MediaDecodeError(f"a data URL with broken base64: {error}") from error
