"""The length that a file of sound or video declares: decoders read a truncated file as a shorter sound or video."""

from renderers.media.sniffing import sniff

# The most parts of a container that are read.
_MAX_PARTS = 1 << 16
# Writers that do not know the length, because they write to a pipe, declare about this or more.
_UNKNOWN = 0x7FF00000
_LARGEST_MP3_FRAME = 1441


def declared_bytes(data: bytes, media_type: str) -> int:
    """The number of bytes that a file of this type has by its own account, 0 where it does not say."""
    match media_type:
        case "audio/wav" | "audio/aiff" | "video/x-msvideo":
            return _of_chunks(data)
        case "audio/mpeg":
            return _of_mp3(data)
        case "audio/ogg":
            return _of_ogg(data)
        case "video/webm" | "video/x-matroska":
            return _of_matroska(data)
        case "audio/mp4" | "video/mp4" | "video/quicktime":
            return max(_iso_boxes(data).values(), default=0)
    return 0


def holds_several(data: bytes, media_type: str) -> bool:
    """Whether another file follows the first, as `cat` joins them, of a type whose decoders read the first alone."""
    match media_type:
        case "audio/mpeg":
            rest = data[_of_mp3(data) + _LARGEST_MP3_FRAME :] if _of_mp3(data) > 0 else b""
            return len(rest) > _LARGEST_MP3_FRAME and sniff(rest) == media_type
        case "audio/ogg":
            return _holds_chained_streams(data)
        case "audio/mp4" | "video/mp4" | "video/quicktime":
            return [data[start + 4 : start + 8] for start in _iso_boxes(data)].count(b"moov") > 1
    return False


def _holds_chained_streams(data: bytes) -> bool:
    """Whether a stream begins behind a page that begins none: streams that sound together begin together (RFC 3533)."""
    start, is_behind = 0, False
    while data[start : start + 4] == b"OggS" and start + 26 < len(data):
        begins = bool(data[start + 5] & 2)
        if begins and is_behind:
            return True
        is_behind, table = is_behind or not begins, start + 27
        start = table + data[table - 1] + sum(data[table : table + data[table - 1]])
    return False


def _of_chunks(data: bytes) -> int:
    match data[:4]:
        case b"RF64":  # EBU Tech 3306: the length is in the chunk ds64, which comes first
            return 7 + int.from_bytes(data[20:28], "little") if data[12:16] == b"ds64" else 0
        case b"riff":  # Sony Wave64 counts the whole file, behind a name of 16 bytes
            return int.from_bytes(data[16:24], "little")
    size = int.from_bytes(data[4:8], "little" if data[:4] == b"RIFF" else "big")
    # Some writers count the byte that pads an odd chunk at the end, and do not write it.
    return 7 + size if size < _UNKNOWN else 0


def _of_mp3(data: bytes) -> int:
    """The header of Xing and LAME in the first frame: name, flags, frames (if 1), bytes (if 2)."""
    at = max(data.find(name, 4, 48) for name in (b"Xing", b"Info"))
    flags = data[at + 7] if 0 < at < len(data) - 7 else 0
    if not flags & 2:
        return 0
    field = at + 8 + 4 * (flags & 1)
    return int.from_bytes(data[field : field + 4], "big") - _LARGEST_MP3_FRAME  # whether it counts this frame differs


def _of_ogg(data: bytes) -> int:
    """The end of the last page, past the end of the data unless that page ends its stream (RFC 3533)."""
    page = data.rfind(b"OggS")
    lengths = data[page + 27 : page + 27 + data[page + 26]] if page + 26 < len(data) else b""
    ends = bool(lengths) and bool(data[page + 5] & 4)
    return page + 27 + len(lengths) + sum(lengths) if ends else len(data) + 1


def _of_matroska(data: bytes) -> int:
    end = 0
    for _ in range(_MAX_PARTS):  # EBML header, then segments: an identifier of 4 bytes, a size of 1 to 8, the body
        if end >= len(data):
            break
        length = 9 - data[end + 4 : end + 5].ljust(1, b"\1")[0].bit_length()
        field = data[end + 4 : end + 4 + length]
        size = int.from_bytes(field, "big") & ((1 << 7 * length) - 1)
        if len(field) < length or size == (1 << 7 * length) - 1:  # unknown: a live recording
            break
        end += 4 + length + size
    return end


def _iso_boxes(data: bytes) -> dict[int, int]:
    """Starts and ends of ISO boxes (ISO/IEC 14496-12): a size of 4 bytes, a type of 4, the body."""
    boxes: dict[int, int] = {}
    end = 0
    for _ in range(_MAX_PARTS):
        if end + 8 > len(data):
            break
        size = int.from_bytes(data[end : end + 4], "big")
        if size == 1:
            size = int.from_bytes(data[end + 8 : end + 16], "big")
        if size < 8:  # 0: up to the end of the file
            break
        boxes[end] = end + size
        end += size
    return boxes
