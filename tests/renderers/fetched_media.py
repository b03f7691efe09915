"""A media policy for servers on this machine, and an image for them to serve."""

from typing import Any

import numpy as np
from images import png

from renderers import MediaPolicy

NOISE = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)
SECRET = "s3cr3t"


def policy(**options: Any) -> MediaPolicy:
    """Allows http and https to any host at 127.0.0.1, and to no other address of this machine."""
    defaults: dict[str, Any] = {
        "allowed_schemes": frozenset({"http", "https"}),
        "allowed_hosts": ("*",),
        "allowed_networks": ("127.0.0.1/32",),
        "timeout": 10.0,
    }
    return MediaPolicy(**{**defaults, **options})


PNG = png(NOISE)
