"""Images as files, and as URLs that hold them."""

import base64
import io

import numpy as np
from PIL import Image


def png(shown: np.ndarray | Image.Image | str | tuple[int, ...], size: tuple[int, int] = (32, 32)) -> bytes:
    """A PNG file of pixels, of an image, or of one colour in this size."""
    if isinstance(shown, np.ndarray):
        shown = Image.fromarray(shown)
    elif not isinstance(shown, Image.Image):
        shown = Image.new("RGB", size, shown)
    file = io.BytesIO()
    shown.save(file, "PNG", compress_level=1)
    return file.getvalue()


def png_url(shown: np.ndarray | Image.Image | str | tuple[int, ...], size: tuple[int, int] = (32, 32)) -> str:
    """A data URL of that file."""
    return f"data:image/png;base64,{base64.b64encode(png(shown, size)).decode()}"
