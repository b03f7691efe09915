"""The wire format of a message: its header frame, and the constants that the encoder and the decoder share.

A message is a list of frames. Frame 0, the header, is `PRELUDE` followed by msgpack values; each further frame holds
the raw bytes of one large array or one media source.

    prelude      magic, format version, number of entries N
    type table   [[name, version, [field, ...], module], ...]: the registered types in this message. The module that
                 declares a type is for the error of a receiver without the type; it is never imported
    blob table   [[kind, ...], ...]: one row per array, tensor and media source
    N entries    [id, tag, payload]: children first, the root last

A row of the blob table holds the bytes or describes a frame; rows and frames have the same order:

    ["array", dtype, shape, bytes]   ["tensor", dtype, shape, bytes]   bytes in the row
    [dtype number, bytes]                                              bytes in the row, a vector of a common dtype
    ["array", dtype, shape]          ["tensor", dtype, shape]          in a frame
    ["media", sha256]                                                  in a frame
    ["held", sha256]                                                   omitted: the receiver has it

The payload of a dataclass is its values in the order of the fields in its row of the type table; the payload of an enum
is the member's name. The tag is `TAG_TYPES` plus the number of the row. `shape` and `dtype` are a list of sizes and
numpy's or torch's name for the elements.

Inside a payload, values of msgpack's own types are packed directly. Every other value is an extension value:
the number of an entry (`REF_ENTRY`) or of a blob (`REF_BLOB`), big-endian, in the smallest of 1, 2 or 4 bytes that
holds it, or, without bytes, an empty tuple (`EMPTY_TUPLE`). No dict of a user can be mistaken for an extension value.
Entries are stored side by side and not inside each other, so neither side needs recursion.
"""

from __future__ import annotations

import struct
from typing import Final, TypeAlias

FORMAT_VERSION: Final = 4
PRELUDE: Final = struct.Struct("<4sHxxI")  # magic, format version, number of entries
PRELUDE_MAGIC: Final = b"MMRH"

REF_ENTRY: Final = 1
REF_BLOB: Final = 2
EMPTY_TUPLE: Final = 3

# The data of an array or tensor of at most this many bytes are part of the header; the receiver reads both forms at any
# size. A vector in a frame of its own costs 25 bytes, on average 32 bytes of padding, and 20 us to encode and decode.
# In the header it costs 8 bytes, and 6 us at 64 bytes, 12 us at 1024, 16 us at 2048, 27 us at 4096; the increase is
# copying. The limit is below the break-even point, because large arrays should not be copied.
MAX_INLINE_BYTES: Final = 1024

TAG_ROOT: Final = 0
TAG_TUPLE: Final = 1
TAG_SET: Final = 2
TAG_FROZENSET: Final = 3
TAG_SCALAR: Final = 4
TAG_INT: Final = 5  # of more than 64 bits
TAG_DATE: Final = 6
TAG_TIME: Final = 7
TAG_DATETIME: Final = 8
TAG_TIMEDELTA: Final = 9
TAG_OFFSET: Final = 10  # a fixed offset from UTC
TAG_TYPES: Final = 16  # and above: registered types, by their row in the type table

BLOB_ARRAY: Final = "array"
BLOB_TENSOR: Final = "tensor"
BLOB_MEDIA: Final = "media"
BLOB_OMITTED: Final = "held"

# Dict keys and set members are hashed. A hostile message could choose tuples of ints whose hashes all collide, and
# decoding would take hours. Values of these types cannot be chosen so, except ints of more than 64 bits.
KEY_TYPES: Final = frozenset({str, int, bytes, float, bool, type(None)})
KEY_BITS: Final = 64

Buffer: TypeAlias = "bytes | bytearray | memoryview"
