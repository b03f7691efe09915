"""Finds the media type of bytes from their beginning, whatever type was declared."""

import re
from collections.abc import Mapping

from renderers.errors import MediaError
from renderers.messages import NOUNS, Modality

# Sources: the specifications of the formats. The order does not matter: no signature is the start of another.
_SIGNATURES = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF87a": "image/gif",
    b"GIF89a": "image/gif",
    b"II*\0": "image/tiff",
    b"MM\0*": "image/tiff",
    b"II+\0": "image/tiff",
    b"MM\0+": "image/tiff",
    b"\0\0\1\0": "image/x-icon",
    b"\0\0\0\x0cjP  \r\n\x87\n": "image/jp2",
    b"\xff\x4f\xff\x51": "image/jp2",
    b"\0\0\0\x0cJXL \r\n\x87\n": "image/jxl",
    b"\xff\x0a": "image/jxl",
    b"8BPS": "image/vnd.adobe.photoshop",
    b"\0\0\1\xba": "video/mpeg",
    b"\0\0\1\xb3": "video/mpeg",
    b"FLV\x01": "video/x-flv",
    b"\x30\x26\xb2\x75\x8e\x66\xcf\x11": "video/x-ms-asf",
    b"\x1f\x8b": "application/gzip",
    b"PK\x03\x04": "application/zip",
    b"PK\x05\x06": "application/zip",
    b"7z\xbc\xaf\x27\x1c": "application/x-7z-compressed",
    b"Rar!\x1a\x07": "application/vnd.rar",
    b"BZh": "application/x-bzip2",
    b"\xfd7zXZ\0": "application/x-xz",
    b"\x28\xb5\x2f\xfd": "application/zstd",
    b"%PDF-": "application/pdf",
    b"%!PS": "application/postscript",
    b"\xc5\xd0\xd3\xc6": "application/postscript",
    b"ID3": "audio/mpeg",
    b"fLaC": "audio/flac",
    b"OggS": "audio/ogg",
    b"riff\x2e\x91\xcf\x11\xa5\xd6\x28\xdb\x04\xc1\0\0": "audio/wav",  # Sony Wave64
    b".snd": "audio/basic",
    b"caff": "audio/x-caf",
}
_RIFF = {b"WEBP": "image/webp", b"AVI ": "video/x-msvideo", b"WAVE": "audio/wav"}
# Brands of ISO base media files (ISO/IEC 14496-12); other brands are video.
_AVIF = (b"avif", b"avis")
_HEIF = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")
_AUDIO = (b"M4A ", b"M4B ", b"M4P ")
_BMP_HEADERS = (12, 16, 40, 52, 56, 64, 108, 124)
_MPEG_TS_PACKET = 188
_PNM = re.compile(rb"P[1-6][\s#]")
_MARKUP = re.compile(rb"(?i)<(!doctype\s+html|html|head|body|script|title|meta|div|p|h1|a|br)\b")
_JSON = re.compile(rb"[\[{]\s*([\"\[{}\]\d-]|true|false|null)")
_SEARCHED_BYTES = 1024  # for the root element of an XML file
_ACCEPTED: Mapping[Modality | None, tuple[str, ...]] = {
    None: ("image", "video", "audio"),
    "image": ("image",),
    "video": ("image", "video"),
    "audio": ("audio", "video"),
}
_IMAGES_NOT_DECODED = ("image/svg+xml", "image/heic", "image/jxl", "image/vnd.adobe.photoshop")


def sniff(data: bytes | memoryview) -> str | None:
    """The media type that the first bytes indicate, or None for unknown ones."""
    start = bytes(data[:_SEARCHED_BYTES])
    for signature, media_type in _SIGNATURES.items():
        if start.startswith(signature):
            return media_type
    if start[:4] == b"RIFF":
        return _RIFF.get(start[8:12])
    if start[:4] in (b"RIFX", b"RF64") and start[8:12] == b"WAVE":
        return "audio/wav"
    if start[:4] == b"FORM" and start[8:12] in (b"AIFF", b"AIFC"):
        return "audio/aiff"
    if start[:1] == b"\xff" and (mpeg := _mpeg_audio(start)) is not None:
        return mpeg
    if start[4:8] == b"ftyp":
        return _iso_media(start)
    if start[4:8] in (b"moov", b"mdat", b"wide", b"free", b"skip"):  # QuickTime from the time before brands
        return "video/quicktime"
    if start[:4] == b"\x1a\x45\xdf\xa3":
        return "video/webm" if b"webm" in start[:64] else "video/x-matroska"
    if start[:2] == b"BM" and int.from_bytes(start[14:18], "little") in _BMP_HEADERS:
        return "image/bmp"
    if _is_transport_stream(start):
        return "video/mp2t"
    if _PNM.match(start):
        return "image/x-portable-anymap"
    return _text(start)


def check_type(
    data: bytes | memoryview,
    *,
    expected: Modality | None = None,
    name: str | None = None,
    declared: str | None = None,
    digest: str | None = None,
) -> str | None:
    """The media type of `data`. Raises `MediaError` for bytes that are known to be something else.

    Servers often declare wrong types for images: only the bytes count, `declared` appears in errors only.
    Unknown bytes are left to the decoder. `expected` None accepts every medium; `video` accepts images too,
    because they may be animations; `audio` accepts videos too, whose sound is taken.
    """
    media_type = sniff(data)
    if media_type is None:
        return None
    kind = media_type.partition("/")[0]
    declared_note = f" (declared as {declared})" if declared and declared != media_type else ""
    subject = f"{name}: this" if name else "this"
    if media_type in _IMAGES_NOT_DECODED:
        reason = (
            f"is {media_type}{declared_note}, not an image that can be decoded here; convert it to PNG or JPEG first"
        )
    elif kind in _ACCEPTED[expected]:
        return media_type
    elif expected is not None and kind in NOUNS:
        reason = (
            f'is {NOUNS[kind]} ({media_type}), not {NOUNS[expected]}{declared_note}; pass it in a part of type "{kind}"'
        )
    else:
        wanted = "an image, a video or a sound" if expected is None else NOUNS[expected]
        reason = f"is {media_type}{declared_note}, not {wanted}; check where it comes from"
    raise MediaError(f"{subject} {reason}", digest=digest)


def _mpeg_audio(start: bytes) -> str | None:
    """Frames of MPEG audio: AAC in ADTS (ISO/IEC 13818-7), or layers II and III (ISO/IEC 11172-3)."""
    sync, rates = int.from_bytes(start[:2], "big"), int.from_bytes(start[2:3], "big")
    if sync & 0xFFF6 == 0xFFF0:
        return "audio/aac" if rates >> 2 & 15 < 13 else None
    version, layer = sync >> 3 & 3, sync >> 1 & 3
    is_frame = sync & 0xFFE0 == 0xFFE0 and version != 1 and layer in (1, 2)
    return "audio/mpeg" if is_frame and rates >> 4 not in (0, 15) and rates >> 2 & 3 != 3 else None


def _iso_media(start: bytes) -> str:
    size = min(int.from_bytes(start[:4], "big"), len(start))
    brand, compatible = start[8:12], {start[at : at + 4] for at in range(16, size, 4)}
    if brand in _AVIF or (brand in _HEIF and compatible.intersection(_AVIF)):
        return "image/avif"
    if brand in _HEIF:
        return "image/heic"
    if brand in _AUDIO:
        return "audio/mp4"
    return "video/quicktime" if brand == b"qt  " else "video/mp4"


def _is_transport_stream(start: bytes) -> bool:
    # Each packet starts with the byte G; Blu-ray discs and camcorders put four bytes before it.
    return any(
        len(start) > first + 2 * step and all(start[first + n * step] == 0x47 for n in range(3))
        for first, step in ((0, _MPEG_TS_PACKET), (4, _MPEG_TS_PACKET + 4))
    )


def _text(start: bytes) -> str | None:
    text = start.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text.startswith((b"<?xml", b"<svg", b"<!--", b"<!DOCTYPE svg")):
        if b"<svg" in text:
            return "image/svg+xml"
        return "text/html" if b"<html" in text.lower() else "text/xml"
    if _MARKUP.match(text):
        return "text/html"
    return "application/json" if _JSON.match(text) else None
