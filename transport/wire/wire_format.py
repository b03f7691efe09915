"""The numbers both directions agree on: what a message's header frame is made of.

A message is a list of frames. Frame 0, the header, is `PRELUDE` followed by msgpack values; each further frame holds
the raw bytes of one large array or one media source.

    prelude      magic, format version, number of entries N
    type table   [[name, version, [field, ...]], ...]: the registered types in this message. Those that are not of
                 this distribution have one value more, the module that declares them, for the error of a receiver
                 that does not know them; it is never imported
    blob table   [[kind, ...], ...]: one row per array, tensor and media source
    N entries    [id, tag, payload] or [id, tag, count, columns]: children first, the root last

A row of the blob table holds the bytes themselves or describes the next frame that no row before it has described:

    ["array", dtype, shape, bytes]   ["tensor", dtype, shape, bytes]   held here
    [dtype number, bytes]                                              held here, a vector of a common dtype
    ["array", dtype, shape]          ["tensor", dtype, shape]          in a frame
    ["media", sha256]                                                  in a frame
    ["held", sha256]                                                   nowhere: the receiver has it

The payload of a dataclass or pydantic model is its values in the order in which the type table names its fields (those
of a model end with `MODEL_REST`), that of an enum is the member's name; its tag is `TAG_TYPES` and its place in the
type table. `shape` and `dtype` are a list of sizes and numpy's or torch's name for the elements; for a structured numpy
dtype `[itemsize, aligned, [[name, dtype, offset, shape], ...]]`.

Neighbouring objects of one dataclass go as a run. Their ids count up from the first one's. For each field there is a
column, a list of `count` values. Where these are arrays that nothing has referred to before, it is the number of the
first one's blob, the others' following it; where they are tuples of one element or none, {`TUPLES`: those as lists}.

Inside a payload or column, msgpack's own types stand for themselves. Everything else is an extension value: the number
of an entry (`REF_ENTRY`) or of a blob (`REF_BLOB`), big-endian, in as few of 1, 2 or 4 bytes as hold it, or, without
bytes, an empty tuple (`EMPTY_TUPLE`). Extension values cannot collide with anything in a user's dict, and entries that
stand beside each other instead of inside each other need no recursion on either side.
"""

from __future__ import annotations

import struct
from typing import Final, TypeAlias

# 2 says of no type where it is declared, and is written where nothing needs to be said. 1, which is still read, had no
# runs of objects and no empty tuples of their own.
FORMAT_VERSION: Final = 3
UNDECLARED_VERSION: Final = 2
TYPE_ROW: Final = 3  # values in a row of the type table that does not say where the type is declared
PRELUDE: Final = struct.Struct("<4sHxxI")  # magic, format version, number of entries
PRELUDE_MAGIC: Final = b"MMRH"

REF_ENTRY: Final = 1
REF_BLOB: Final = 2
EMPTY_TUPLE: Final = 3

# An array or tensor of at most this many bytes stands in the header; the receiver reads either form at any size. As a
# frame of its own a vector costs 25 bytes and on average 32 of padding, and 20 us to encode and decode together; in the
# header 8 bytes, and 6 us at 64 bytes, 12 at 1024, 16 at 2048, 27 at 4096, all of the growth being copies. Below the
# break-even, because a message with large arrays should not be copied at all.
INLINE_BYTES: Final = 1024

# A run needs this many fields. A value takes at least a byte, and so an object of a run at least this many, against
# some 250 that it takes in the receiver's memory.
RUN_FIELDS: Final = 3
TUPLES: Final = 0

TAG_ROOT: Final = 0
TAG_TUPLE: Final = 1
TAG_SET: Final = 2
TAG_FROZENSET: Final = 3
TAG_SCALAR: Final = 4
TAG_INT: Final = 5  # of more than 64 bits
TAG_COMPLEX: Final = 6
TAG_DECIMAL: Final = 7
TAG_UUID: Final = 8
TAG_PATH: Final = 9
TAG_DATE: Final = 10
TAG_TIME: Final = 11
TAG_DATETIME: Final = 12
TAG_TIMEDELTA: Final = 13
TAG_OFFSET: Final = 14  # a fixed offset from UTC
TAG_ZONE: Final = 15  # a time zone by its name
TAG_TYPES: Final = 16  # and above: registered types, by their place in the type table

# The last value of a pydantic model, under a name that no field can have: None, or [names of fields that were not set,
# {name: value} of what the model has beyond its fields].
MODEL_REST: Final = "*"

BLOB_ARRAY: Final = "array"
BLOB_TENSOR: Final = "tensor"
BLOB_MEDIA: Final = "media"
BLOB_HELD: Final = "held"

# Dict keys and set members must hash, and hashing what a message composes (tuples of chosen ints) can be made to
# collide until decoding takes hours. These types cannot be, an int of more than 64 bits excepted.
KEY_TYPES: Final = frozenset({str, int, bytes, float, bool, type(None)})
KEY_BITS: Final = 64

Buffer: TypeAlias = "bytes | bytearray | memoryview"
