"""The policy for media: which references may be followed, and limits on size and time."""

import io
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from ipaddress import IPv6Address, ip_address, ip_network
from numbers import Real
from pathlib import Path
from typing import Any

from renderers.errors import ConfigError, MediaLimitError


class Deadline:
    """`seconds` from now. `remaining()` gives the seconds left, and raises `TimeoutError` after them."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def passed(self) -> bool:
        return time.monotonic() >= self._end

    def remaining(self) -> float:
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left


class TimedBytes(io.BytesIO):
    """A file in memory that ends at a deadline: `read` raises `TimeoutError`, and `readinto` returns no more bytes.

    Decoders read a file in small pieces between their steps, so this bounds the time for files of very many
    parts (chunks of a PNG, frames of a GIF, comments, runs) as well as for slow decoders. Pillow calls
    `read`, libsndfile `readinto`, through which no error passes.
    """

    def __init__(self, data: bytes | memoryview, deadline: Deadline) -> None:
        super().__init__(data)
        self._deadline = deadline

    def read(self, size: int | None = -1, /) -> bytes:
        self._deadline.remaining()
        return super().read(size)

    def readinto(self, buffer: Any, /) -> int:
        return 0 if self._deadline.passed else super().readinto(buffer)


_HOST = re.compile(r"(?=.{1,253}\Z)[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*")


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaPolicy:
    """Which media references may be followed, and limits for each image, video and sound.

    By default nothing is read from the network or the file system.

    allowed_schemes: of `http` and `https`; data URLs are always read.
    allowed_hosts: host names a URL may have, `*.example.org` for all below a domain, `*` for any. Their
        addresses must still be public, after each redirect too.
    allowed_networks: networks (`10.1.0.0/16`, `::1/128`) whose addresses count as public, for example that of
        a private object store.
    allowed_directories: directories below which a path or `file:` URL may lie, symbolic links resolved.
    max_bytes: of an encoded file. max_pixels: width times height, checked before anything is decompressed; of
        one frame for a video. max_frames: of a video, checked likewise. max_aspect_ratio: longer side over
        shorter.
    max_video_pixels: width times height times frames of a video given as frames, which are held uncompressed.
    max_audio_seconds, max_audio_channels: of a sound, checked before more than that is decoded.
    timeout: seconds for one fetch, redirects and body included, and as many again for decoding one file.
    max_redirects: hops of one fetch.

    Raises `ConfigError` for an impossible scheme, host, network or directory, for a text in place of a
    tuple, and for a limit that is not a number of at least 0.
    """

    allowed_schemes: frozenset[str] = frozenset()
    allowed_hosts: tuple[str, ...] = ()
    allowed_networks: tuple[str, ...] = ()
    allowed_directories: tuple[str | Path, ...] = ()
    max_bytes: int = 32 * 2**20
    max_pixels: int = 64 * 2**20
    max_frames: int = 4096
    max_aspect_ratio: float = 200
    max_video_pixels: int = 2**30
    max_audio_seconds: float = 1800
    max_audio_channels: int = 8
    timeout: float = 20.0
    max_redirects: int = 3

    def __post_init__(self) -> None:
        for option, value, *allowed in self._violations():
            raise ConfigError(f"MediaPolicy.{option}", value, allowed)

    def _violations(self) -> Iterator[tuple[Any, ...]]:
        """The options that cannot be: the name of each, its value and what it can be."""
        # A text would be read letter by letter, and a "*" in it would allow every host.
        for option in ("allowed_schemes", "allowed_hosts", "allowed_networks", "allowed_directories"):
            if isinstance(value := getattr(self, option), (str, bytes, Path)):
                yield option, value, "a tuple or a set"
        limits = [field.name for field in fields(self) if field.name.startswith("max_")]
        for option in (*limits, "timeout"):
            value = getattr(self, option)
            if isinstance(value, bool) or not isinstance(value, Real) or not float(value) >= 0:
                yield option, value, "a number of at least 0"
        for scheme in self.allowed_schemes:
            if scheme not in ("http", "https"):
                yield "allowed_schemes", scheme, "http", "https"
        for directory in self.allowed_directories:
            if not isinstance(directory, (str, Path)) or not can_be_path(directory):
                yield "allowed_directories", directory, "the path of a directory"
        for pattern in self.allowed_hosts:
            try:
                _matches("", pattern)
            except ValueError:
                yield "allowed_hosts", pattern, "example.org", "*.example.org", "an address", "*"
        for network in self.allowed_networks:
            try:
                ip_network(network)
            except ValueError as error:
                yield "allowed_networks", network, f"a network ({error})"

    def allows_host(self, host: str) -> bool:
        """Whether a host of `normal_host` matches one of `allowed_hosts`; no address matches `*.domain`."""
        return any(_matches(host, pattern) for pattern in self.allowed_hosts)

    def check_size(self, width: int, height: int, *, digest: str | None = None) -> None:
        """Raise `MediaLimitError` for an image or a frame past `max_pixels` or `max_aspect_ratio`."""
        size = f"{width}x{height} pixels"
        self._check("max_pixels", width * height, size, digest)
        longer, shorter = max(width, height), min(width, height)
        self._check("max_aspect_ratio", longer / shorter if shorter > 0 else 0, size, digest)

    def check_frames(self, count: int, width: int = 0, height: int = 0, *, digest: str | None = None) -> None:
        """Raise `MediaLimitError` for frames past `max_frames` or, at this size, `max_video_pixels`."""
        self._check("max_frames", count, f"{count} frames", digest)
        self._check("max_video_pixels", count * width * height, f"{count} frames of {width}x{height} pixels", digest)

    def check_audio(self, seconds: float, channels: int = 1, *, digest: str | None = None) -> None:
        """Raise `MediaLimitError` for a sound past `max_audio_seconds` or `max_audio_channels`."""
        self._check("max_audio_channels", channels, f"{channels} channels", digest)
        self._check("max_audio_seconds", seconds, f"{seconds:.6g} seconds of sound", digest)

    def _check(self, limit: str, actual: float, what: str, digest: str | None) -> None:
        if actual > (most := getattr(self, limit)):
            name = f"{digest[:12]}: " if digest else ""
            raise MediaLimitError(f"{name}{what}, more than {limit}={most} of the media policy", digest=digest)


def can_be_path(name: str | Path) -> bool:
    """Whether a file of that name can exist: no NUL, and all characters in the file system's encoding."""
    try:
        return b"\0" not in os.fsencode(name)
    except UnicodeEncodeError:  # a lone surrogate
        return False


def normal_host(host: str) -> str:
    """The host in lower case and ASCII, without a trailing dot. Raises ValueError for other texts."""
    if ":" in host and "%" not in host:  # an address with a zone is link-local
        return str(IPv6Address(host))
    ascii_host = host if host.isascii() else host[:1000].encode("idna").decode("ascii")
    normal = ascii_host.lower().removesuffix(".")
    if not _HOST.fullmatch(normal):
        raise ValueError("not a host name")
    return normal


def _matches(host: str, pattern: str) -> bool:
    """Raises ValueError for a pattern that no host can match: a URL, a port, a `*` not at the start."""
    if pattern == "*":
        return True
    name = normal_host(pattern.removeprefix("*.").strip("[]"))
    if not pattern.startswith("*."):
        return host == name
    try:
        ip_address(host)
    except ValueError:
        return host.endswith(f".{name}")
    return False
