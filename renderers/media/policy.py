"""What a message may refer to, and how large it may be."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaPolicy:
    """What media references may be followed, and limits for every medium. By default nothing is read from the network
    or the file system.

    allowed_schemes: of `http` and `https`; data URLs are always read.
    allowed_hosts: host names a URL may have, `*.example.org` for all below a domain, `*` for any. Their addresses must
        be public all the same, at every redirect too.
    allowed_networks: networks (`10.1.0.0/16`, `::1/128`) whose addresses count as public: an object store of one's own.
    allowed_directories: directories below which a path or `file:` URL may lie, symbolic links resolved.
    max_bytes: of an encoded file. max_pixels: width times height, checked before anything is decompressed; of one
        frame for a video. max_frames: of a video, checked likewise. max_aspect_ratio: longer side over shorter.
    timeout: seconds for one fetch, redirects and body included. max_redirects: hops of one fetch.
    """

    allowed_schemes: frozenset[str] = frozenset()
    allowed_hosts: tuple[str, ...] = ()
    allowed_networks: tuple[str, ...] = ()
    allowed_directories: tuple[str | Path, ...] = ()
    max_bytes: int = 32 * 2**20
    max_pixels: int = 64 * 2**20
    max_frames: int = 4096
    max_aspect_ratio: float = 200
    timeout: float = 20.0
    max_redirects: int = 3
