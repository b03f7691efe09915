"""Encodes images, videos and sounds as files that a server decodes to the same pixels and samples.

Decoders disagree about images that EXIF rotates and about transparent, paletted and 16-bit ones, and each
JPEG decoder rounds in its own way (libjpeg of another version, the decoder of vLLM's Rust frontend): those
become PNG. Raw frames become an AVI of PNG images (codec `MPNG`), which OpenCV, vLLM's decoder of videos,
reads without loss. Uncompressed AVI is not safe: frames with rows that are no multiple of its alignment
corrupt the memory of the server (OpenCV of vLLM 0.32). Decoders of MP3 and AAC and resamplers differ too: a
sound becomes a WAV of the samples that the model's processor was given here, in mono and at its rate, so that
the server neither mixes nor resamples (vLLM's own resampler is torchaudio's, the renderer's soxr).
"""

import base64
import io
import struct
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from PIL import ExifTags, Image

from renderers import MediaSource
from renderers.media.audio_decoding import audio_info, decode_audio
from renderers.media.decoding import decode_image, raw_video_frames
from renderers.media.policy import MediaPolicy
from renderers.media.samples import is_wav_in_mono, raw_samples, wav_bytes
from renderers.media.sniffing import sniff
from renderers.process.caches import ByteLRU

#: OpenCV reads no frame from a file with one frame: it seeks to the end of the file first and does not seek
#: back.
MIN_VIDEO_FRAMES = 2

_KEY_FRAME = 0x10
_CODEC = b"MPNG"


class SourceFile(NamedTuple):
    """The bytes of a file, and its media type."""

    data: bytes | memoryview
    media_type: str

    def data_url(self) -> list[bytes]:
        """The file as a data URL, in segments."""
        return [f"data:{self.media_type};base64,".encode(), base64.b64encode(self.data)]


#: Of all engines of the process together.
_MADE_BYTES = 256 * 2**20

# The PNG and WAV files for the next server, by digest of the source and the rate of a sound.
_made: ByteLRU[tuple[str, int | None], SourceFile] = ByteLRU(_MADE_BYTES)
# A source passed a policy before, whose limits may be wider than those of the default policy.
_WIDE = MediaPolicy(
    max_pixels=2**40, max_aspect_ratio=2**40, max_audio_seconds=2**40, max_audio_channels=2**20, max_bytes=2**40
)


def source_file(
    source: MediaSource, modality: str, *, sampling_rate: int | None = None, jpeg_as_file: bool = False
) -> SourceFile:
    """The file of an item whose source has passed `media_payload.select_mode`. `sampling_rate`: see `sound_file`.

    Files that are made here of images and sounds are kept in memory, so that each is encoded once for all
    servers.
    """
    if modality == "video":
        if source.raw_modality == "video":
            return SourceFile(encode_avi(source), "video/x-msvideo")
        return SourceFile(source.data, str(sniff(source.data)))
    key = (source.digest, sampling_rate)
    file = None if jpeg_as_file else _made.get(key)
    if file is None:
        if modality == "audio":
            file = sound_file(source, _WIDE, sampling_rate)
        else:
            file = image_file(source, _WIDE, jpeg_as_file=jpeg_as_file)
        if file.data is not source.data and not jpeg_as_file:
            _made.put(key, file, memoryview(file.data).nbytes)
    return file


def sound_file(source: MediaSource, policy: MediaPolicy, sampling_rate: int | None) -> SourceFile:
    """A WAV in mono at `sampling_rate` of the samples as decoded here, or the file itself if it is such a WAV.

    None: a server decides about rate and channels (`ServerRenderer`), and gets the file itself, or a WAV of
    an array at the rate that it has. Raises `MediaError`.
    """
    if sampling_rate is None:
        audio_info(source, policy)  # raises the errors
    if source.raw_modality == "audio":
        samples, rate = raw_samples(source)
        if sampling_rate is None or (samples.dtype == np.int16 and (samples.shape[1], rate) == (1, sampling_rate)):
            return SourceFile(wav_bytes(samples, rate), "audio/wav")
    elif sampling_rate is None or is_wav_in_mono(source.data, sampling_rate):
        return SourceFile(source.data, str(sniff(source.data)))
    return SourceFile(wav_bytes(decode_audio(source, policy, sampling_rate), sampling_rate), "audio/wav")


def image_file(source: MediaSource, policy: MediaPolicy, *, jpeg_as_file: bool = False) -> SourceFile:
    """The bytes of a PNG about which all decoders agree, else a PNG of the pixels as decoded here.

    With `jpeg_as_file` also the bytes of a JPEG, whose pixels then are those of the server's decoder. Every
    image is decoded first: raises `MediaError`.
    """
    image = decode_image(source, policy)
    media_type = sniff(source.data)
    of_eight_bits = media_type == "image/png" and source.data[24] == 8  # the bits of a sample
    if of_eight_bits or (jpeg_as_file and media_type == "image/jpeg"):
        with Image.open(io.BytesIO(source.data)) as file:
            upright = file.getexif().get(ExifTags.Base.Orientation, 1) == 1
            if file.mode in ("RGB", "L") and upright and "transparency" not in file.info:
                return SourceFile(source.data, str(media_type))
    return SourceFile(_png(image), "image/png")


def encode_avi(source: MediaSource) -> bytes:
    """An AVI of the frames of a raw video source, at its frame rate, or 24 frames a second if it has none.

    The rate is written as a fraction of two 32-bit numbers, so that a server reads the same float64. Raises
    `MediaError` for a damaged source.
    """
    frames, fps = raw_video_frames(source.data)
    count, height, width, _ = frames.shape
    images = [_png(Image.fromarray(frame)) for frame in frames]
    rate = Fraction(fps or 24.0).limit_denominator(1_000_000)
    largest = max(map(len, images))
    # AVIMAINHEADER, AVISTREAMHEADER and BITMAPINFOHEADER of Microsoft's AVI RIFF file reference.
    main = struct.pack(
        "<14I", round(1_000_000 / rate), 0, 0, _KEY_FRAME, count, 0, 1, largest, width, height, 0, 0, 0, 0
    )
    stream = struct.pack(
        "<4s4sIHHIIIIIIIIhhhh",
        *(b"vids", _CODEC, 0, 0, 0, 0, rate.denominator, rate.numerator, 0, count, largest, 2**32 - 1, 0),
        *(0, 0, width, height),
    )
    bitmap = struct.pack("<IiiHH4sIiiII", 40, width, height, 1, 24, _CODEC, 3 * width * height, 0, 0, 0, 0)
    description = _list(b"strl", _chunk(b"strh", stream) + _chunk(b"strf", bitmap))
    header = _list(b"hdrl", _chunk(b"avih", main) + description)
    chunks = [_chunk(b"00dc", image) for image in images]
    index, position = [], 4
    for image, chunk in zip(images, chunks, strict=True):
        index.append(struct.pack("<4sIII", b"00dc", _KEY_FRAME, position, len(image)))
        position += len(chunk)
    body = header + _list(b"movi", b"".join(chunks)) + _chunk(b"idx1", b"".join(index))
    return _chunk(b"RIFF", b"AVI " + body)


def _png(image: Image.Image) -> memoryview:
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=1)
    return file.getbuffer()


def _chunk(name: bytes, data: bytes | memoryview) -> bytes:
    return name + struct.pack("<I", len(data)) + data + b"\0" * (len(data) % 2)


def _list(kind: bytes, data: bytes) -> bytes:
    return _chunk(b"LIST", kind + data)
