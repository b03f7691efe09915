"""The wire format of a message: its header frame, and the constants that the encoder and the decoder share.

A message is a list of frames. Frame 0, the header, is a byte, the format version, and three msgpack values.
The further frames hold raw bytes: first one for each medium that is sent, then one for each large array, in
the order of the body.

    type table   [[name, version, [field, ...], module], ...]: the registered types in this message. The module that
                 declares a type is for the error of a receiver without the type; it is never imported
    media table  [[sha256, omitted], ...]: the media sources; those that are omitted have no frame
    body         the object

In the body, values of msgpack's own types are packed directly, and every other value with an extension value:

    OBJECT       the last value of a list that stands for an object; the other values are the parts of the object. The
                 data are the number of its kind: `KIND_...`, or `FIRST_TYPE` plus a row of the type table
    SHARED       an object that came before; the data are its number. Objects and vectors are numbered from 0 in the
                 order in which they end
    MEDIUM       a media source; the data are its row in the media table
    VECTOR + n   a one-dimensional array of the dtype n of `arrays.COMMON_DTYPES`; the data are its elements

Numbers are big-endian, in the smallest of 1, 2 or 4 bytes that holds them. No value of a user can be mistaken
for one of these: the encoder refuses extension values. The parts of an object of a kind are

    tuple, set, frozenset    its members
    array, tensor, scalar    dtype, shape, bytes; without the bytes, they are the next frame
    int                      its bytes, big-endian, two's complement
    date; time, datetime     ISO text; ISO text without the zone, fold, zone
    timedelta; offset        days, seconds, microseconds; timedelta from UTC, name or None
    a dataclass, named tuple its values in the order of the fields in its row of the type table
    an enum                  the name of the member
"""

from typing import Final, TypeAlias

FORMAT_VERSION: Final = 6

OBJECT, SHARED, MEDIUM, VECTOR = 1, 2, 3, 16

KIND_TUPLE, KIND_SET, KIND_FROZENSET, KIND_SCALAR, KIND_ARRAY, KIND_TENSOR = range(6)
KIND_INT, KIND_DATE, KIND_TIME, KIND_DATETIME, KIND_TIMEDELTA, KIND_OFFSET = range(6, 12)
FIRST_TYPE: Final = 16

# The data of an array or tensor of at most this many bytes are part of the header; the receiver reads both
# forms at any size. A frame of its own costs about 25 bytes and, for its alignment, 32 bytes on average. The
# limit is below the size at which copying costs more time than a frame does, because large arrays should not
# be copied.
MAX_INLINE_BYTES: Final = 1024

# Dict keys and set members are hashed. A hostile message could choose tuples of ints whose hashes all
# collide, and decoding would take hours. Values of these types cannot be chosen so, except ints of more than
# 64 bits.
KEY_TYPES: Final = frozenset({str, int, bytes, float, bool, type(None)})
KEY_BITS: Final = 64

Buffer: TypeAlias = "bytes | bytearray | memoryview"


def number_data(number: int) -> bytes:
    """A number as the data of an extension value."""
    return number.to_bytes(1 if number < 1 << 8 else 2 if number < 1 << 16 else 4, "big")
