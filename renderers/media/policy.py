"""The policy for media: which references may be followed, and limits on size and time."""

from __future__ import annotations

import os
from dataclasses import dataclass
from ipaddress import ip_network
from pathlib import Path

from renderers.errors import ConfigError
from renderers.media.hosts import check_host_pattern


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaPolicy:
    """Which media references may be followed, and limits for each image and video. By default nothing is read from the
    network or the file system.

    allowed_schemes: of `http` and `https`; data URLs are always read.
    allowed_hosts: host names a URL may have, `*.example.org` for all below a domain, `*` for any. Their addresses must
        still be public, after each redirect too.
    allowed_networks: networks (`10.1.0.0/16`, `::1/128`) whose addresses count as public, for example that of a private
        object store.
    allowed_directories: directories below which a path or `file:` URL may lie, symbolic links resolved.
    max_bytes: of an encoded file. max_pixels: width times height, checked before anything is decompressed; of one
        frame for a video. max_frames: of a video, checked likewise. max_aspect_ratio: longer side over shorter.
    max_video_pixels: width times height times frames of a video given as frames, which are held uncompressed.
    timeout: seconds for one fetch, redirects and body included, and as many again for decoding one image file or
        video. The scans of a JPEG are bounded before it is decoded: 32 at `max_pixels`, more for a smaller image.
    max_redirects: hops of one fetch.

    Raises `ConfigError` for an impossible scheme, host, network or directory, and for a text in place of a tuple.
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
    timeout: float = 20.0
    max_redirects: int = 3

    def __post_init__(self) -> None:
        # A text would be read letter by letter, and a "*" in it would allow every host.
        for option in ("allowed_schemes", "allowed_hosts", "allowed_networks", "allowed_directories"):
            value = getattr(self, option)
            if isinstance(value, (str, bytes, Path)):
                raise ConfigError(f"MediaPolicy.{option}", value, ("a tuple or a set",))
        for scheme in self.allowed_schemes:
            if scheme not in ("http", "https"):
                raise ConfigError("MediaPolicy.allowed_schemes", scheme, ("http", "https"))
        for directory in self.allowed_directories:
            try:
                usable = b"\0" not in os.fsencode(directory)
            except (TypeError, UnicodeEncodeError):
                usable = False
            if not usable:
                raise ConfigError("MediaPolicy.allowed_directories", directory, ("the path of a directory",))
        for pattern in self.allowed_hosts:
            try:
                check_host_pattern(pattern)
            except ValueError:
                known = ("example.org", "*.example.org", "an address", "*")
                raise ConfigError("MediaPolicy.allowed_hosts", pattern, known) from None
        for network in self.allowed_networks:
            try:
                ip_network(network)
            except ValueError as error:
                raise ConfigError("MediaPolicy.allowed_networks", network, (f"a network ({error})",)) from None
