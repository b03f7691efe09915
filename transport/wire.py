"""The numbers both directions agree on: what a message's header frame is made of.

A message is a list of frames. Frame 0, the header, is `PRELUDE` followed by msgpack values; each further frame holds
the raw bytes of one array or one media source.

    prelude      magic, format version, number of entries N
    blob table   [[kind, ...], ...]: one description per blob, in the order of their frames
    N entries    [id, tag, payload]: children first, the root last

Inside a payload, msgpack's own types stand for themselves. Everything else is an extension value of four bytes, the
number of an entry (`REF_ENTRY`) or of a blob (`REF_BLOB`). Extension values cannot collide with anything in a user's
dict, and entries that stand beside each other instead of inside each other need no recursion on either side.
"""

from __future__ import annotations

import struct
from typing import Final, TypeAlias

FORMAT_VERSION: Final = 1
PRELUDE: Final = struct.Struct("<4sHxxI")  # magic, format version, number of entries
PRELUDE_MAGIC: Final = b"MMRH"

REF_ENTRY: Final = 1
REF_BLOB: Final = 2

# Tags of entries that are no registered type; those have [name, version] there.
TAG_ROOT: Final = 0
TAG_TUPLE: Final = 1
TAG_SET: Final = 2
TAG_FROZENSET: Final = 3
TAG_SCALAR: Final = 4

# Kinds of blobs, and what follows the kind in their description.
BLOB_ARRAY: Final = "array"  # dtype, shape
BLOB_TENSOR: Final = "tensor"  # dtype, shape
BLOB_MEDIA: Final = "media"  # sha256 of the bytes, hex
BLOB_HELD: Final = "held"  # sha256; the receiver has the bytes, so there is no frame

# Dict keys and set members must hash, and hashing what a message composes (tuples of chosen ints) can be made to
# collide until decoding takes hours. These types cannot be.
KEY_TYPES: Final = frozenset({str, int, bytes, float, bool, type(None)})

Buffer: TypeAlias = "bytes | bytearray | memoryview"
