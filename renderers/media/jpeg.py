"""Counts the scans of a JPEG without decoding it.

A decoder visits all coefficients of an image once for each scan, and a scan may take as few as 20 bytes: neither the
number of pixels nor the size of the file bounds the time to decode a progressive JPEG.
"""

from __future__ import annotations

import re

# A marker is 0xFF and a byte; 0xFF00 and the restart markers are inside the data of a scan.
_MARKER = re.compile(rb"\xff([\x01-\xcf\xd8-\xfe])")
_WITHOUT_LENGTH = (0x01, 0xD8)
_END_OF_IMAGE, _START_OF_SCAN = 0xD9, 0xDA


def scan_count(data: bytes | memoryview, start: int = 0) -> int:
    """The number of scans of the JPEG that begins at byte `start`, up to its end-of-image marker or the end of `data`.

    The scans of a thumbnail (inside a segment) and of data behind the image are not counted.
    """
    scans = 0
    position = start
    while (found := _MARKER.search(data, position)) is not None:
        marker = found[1][0]
        position = found.end()
        if marker == _END_OF_IMAGE:
            break
        if marker in _WITHOUT_LENGTH:
            continue
        scans += marker == _START_OF_SCAN
        position += int.from_bytes(data[position : position + 2], "big")
    return scans
