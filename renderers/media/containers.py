"""Files of video and sound that FFmpeg reads (PyAV, extras `video` and `audio`).

The reading is limited on purpose, because FFmpeg reads far more than videos: the container format is found
from the first bytes and no other is tried, the file is read from memory with every protocol forbidden, and
only the first stream of the wanted kind is decoded, only by the codecs that the caller allows.
"""

import io
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from renderers.errors import MediaError
from renderers.installation import install_command
from renderers.media.declared_length import declared_bytes
from renderers.media.item import MediaSource
from renderers.media.policy import MediaPolicy
from renderers.media.sniffing import sniff

Kind = Literal["video", "sound"]
Container = Literal["mov", "matroska", "avi", "aac"]

# Frames up to this size may be decoded while the file is opened; the policy's limit is checked after opening.
_MAX_PIXELS_AT_OPEN = 1 << 24
_CONTAINERS: dict[str, Container] = {
    "video/mp4": "mov",
    "video/quicktime": "mov",
    "video/webm": "matroska",
    "video/x-matroska": "matroska",
    "video/x-msvideo": "avi",
    "audio/mp4": "mov",
    "audio/aac": "aac",
}
#: The extra that reads the files of a kind, and what an array holds in their place.
_INSTEAD: dict[Kind, tuple[str, str]] = {
    "video": ("video", "frames"),
    "sound": ("audio", "samples"),
}
_CONVERT: dict[Kind, str] = {"video": "H.264", "sound": "FLAC or WAV"}


def container_of(source: MediaSource, kind: Kind) -> Container | None:
    """The format for `open_stream`; None for others. `MediaError` without PyAV, and if cut short."""
    media_type = sniff(source.data) or ""
    container = _CONTAINERS.get(media_type)
    if container is None:
        return None
    try:
        import av  # noqa: F401
    except ImportError as error:
        name = f"{kind} {source.digest[:12]} is a file that PyAV decodes, which is not installed"
        extra, values = _INSTEAD[kind]
        reason = f"{name}; {install_command(extra)}, or pass its {values} as an array"
        raise MediaError(reason, digest=source.digest) from error
    if declared_bytes(bytes(source.data), media_type) > source.nbytes:
        raise corrupt(source, kind, f"it ends early, after {source.nbytes} bytes")
    return container


@contextmanager
def open_stream(
    source: MediaSource, policy: MediaPolicy, container: Container, kind: Kind, codecs: Collection[str]
) -> Iterator[tuple[Any, Any]]:
    """PyAV's container of a source and its first stream of a kind. Raises `MediaError`, also for
    FFmpeg's errors in the block."""
    with open_container(source, policy, container, kind) as file:
        streams = file.streams.video if kind == "video" else file.streams.audio
        if not streams:
            raise MediaError(
                f"{source.nbytes} bytes ({source.digest[:12]}, {sniff(source.data)}) hold no {kind} stream; "
                "check where they come from",
                digest=source.digest,
            )
        codec = streams[0].codec_context.codec.canonical_name
        if codec not in codecs:
            name = f"{kind} {source.digest[:12]} is coded as {codec}"
            raise MediaError(f"{name}, which is not read; convert it to {_CONVERT[kind]}", digest=source.digest)
        yield file, streams[0]


@contextmanager
def open_container(source: MediaSource, policy: MediaPolicy, container: Container, kind: Kind) -> Iterator[Any]:
    """PyAV's container of a source. Raises `MediaError` for FFmpeg's errors, also in the block."""
    import av

    try:
        with av.open(
            io.BytesIO(source.data),
            format=container,
            # For the file and for its streams: opening it already decodes frames, before their size can be checked.
            options={"protocol_whitelist": "none", "max_pixels": str(max(policy.max_pixels, _MAX_PIXELS_AT_OPEN))},
            # Titles and names may be in any encoding, which PyAV has allowed without being asked since version 19.
            **({"metadata_errors": "replace"} if int(av.__version__.split(".")[0]) < 19 else {}),
        ) as file:
            yield file
    except av.FFmpegError as error:
        raise corrupt(source, kind, str(error)) from error


def corrupt(source: MediaSource, kind: Kind, reason: str) -> MediaError:
    return MediaError(
        f"{kind} {source.digest[:12]} is corrupt: {reason}; re-encode it, or download it again", digest=source.digest
    )
