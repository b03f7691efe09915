"""Values become bytes in frames and files: typed arrays and media, each medium once, nothing copied.

frames = encode_frames(trajectory)          # or encode(trajectory) -> bytes
trajectory = decode_frames(frames)

with RecordWriter("episodes.mmr") as out:
    out.append(trajectory)
"""

from transport.errors import (
    ChecksumError,
    DecodeError,
    EncodeError,
    FileChangedError,
    FileLockedError,
    LimitError,
    MalformedError,
    MissingMediaError,
    TransportError,
)
from transport.inline_arrays import (
    decode_tensor_payload,
    encode_tensor_payload,
    walk_decode_tensors,
    walk_encode_tensors,
)
from transport.records.reader import RecordReader, read_records
from transport.records.rewriting import DroppedRecord, RepairReport, merge_record_files, repair_record_file
from transport.records.writer import RecordWriter
from transport.step_media import drop_intermediate_multi_modal_data, restore_multi_modal_data
from transport.wire.arrays import RawTensor
from transport.wire.codec import decode, decode_frames, encode, encode_frames
from transport.wire.limits import DecodeLimits
from transport.wire.registry import wire_type

__all__ = [
    "ChecksumError",
    "DecodeError",
    "DecodeLimits",
    "DroppedRecord",
    "EncodeError",
    "FileChangedError",
    "FileLockedError",
    "LimitError",
    "MalformedError",
    "MissingMediaError",
    "RawTensor",
    "RecordReader",
    "RecordWriter",
    "RepairReport",
    "TransportError",
    "decode",
    "decode_frames",
    "decode_tensor_payload",
    "drop_intermediate_multi_modal_data",
    "encode",
    "encode_frames",
    "encode_tensor_payload",
    "merge_record_files",
    "read_records",
    "repair_record_file",
    "restore_multi_modal_data",
    "walk_decode_tensors",
    "walk_encode_tensors",
    "wire_type",
]
