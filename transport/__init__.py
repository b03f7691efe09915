"""Bytes between processes: typed arrays and media in frames and files, each image once, nothing copied.

frames = encode_frames(trajectory)          # or encode(trajectory) -> bytes
trajectory = decode_frames(frames)

with RecordWriter("episodes.mmr") as out:
    out.append(trajectory)
"""

from transport.arrays import RawTensor
from transport.codec import decode, decode_frames, encode, encode_frames
from transport.errors import (
    ChecksumError,
    DecodeError,
    EncodeError,
    FileChangedError,
    LimitError,
    MalformedError,
    MissingFieldError,
    MissingMediaError,
    RegistrationError,
    TransportError,
    TruncatedError,
    UnknownTypeError,
    VersionError,
)
from transport.files import RecordReader, RecordWriter, read_records
from transport.limits import DecodeLimits
from transport.registry import wire_type

__all__ = [
    "ChecksumError",
    "DecodeError",
    "DecodeLimits",
    "EncodeError",
    "FileChangedError",
    "LimitError",
    "MalformedError",
    "MissingFieldError",
    "MissingMediaError",
    "RawTensor",
    "RecordReader",
    "RecordWriter",
    "RegistrationError",
    "TransportError",
    "TruncatedError",
    "UnknownTypeError",
    "VersionError",
    "decode",
    "decode_frames",
    "encode",
    "encode_frames",
    "read_records",
    "wire_type",
]
