"""A bound of the number of values in a JSON text, before the text becomes Python objects."""

from __future__ import annotations

from typing import Final

#: More values than messages, schemas and options of a request have.
MAX_JSON_VALUES: Final = 2**22

# Other threads run between two of them: counting holds the interpreter's lock.
_CHUNK_BYTES: Final = 2**20


def has_more_values(data: bytes, limit: int) -> bool:
    """Whether the JSON text may have more than `limit` values in its lists and objects, told by its commas.

    Commas in texts count too, so that limits need room for those. Parsing holds the interpreter's lock, also on a
    thread, for about 0.2 s for each million of values, and takes up to 100 bytes for each byte of the text.
    """
    commas = 0
    for start in range(0, len(data), _CHUNK_BYTES):
        commas += data.count(b",", start, start + _CHUNK_BYTES)
        if commas >= limit:
            return True
    return False
