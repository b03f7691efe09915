"""Byte-bounded cache of media sources, and the digests of those that a peer already has."""

from __future__ import annotations

from collections import OrderedDict

from renderers.media.source import MediaSource
from transport.link.limits import FRAME_COST


class MediaCache:
    """Media sources by digest, at most `limit` bytes; the least recently used are evicted. Each source counts 512 bytes
    more than its data. A source larger than the limit is not stored.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._sources: OrderedDict[str, MediaSource] = OrderedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._sources)

    def find(self, digest: str) -> MediaSource | None:
        """Return the source, or None, and mark it as the most recently used."""
        source = self._sources.get(digest)
        if source is not None:
            self._sources.move_to_end(digest)
        return source

    def keep(self, source: MediaSource) -> None:
        """Store a source. The caller has checked its bytes against its digest."""
        cost = source.nbytes + FRAME_COST
        if source.digest in self._sources or cost > self._limit:
            return
        self._sources[source.digest] = source
        self.bytes += cost
        while self.bytes > self._limit:
            _, oldest = self._sources.popitem(last=False)
            self.bytes -= oldest.nbytes + FRAME_COST


class SentDigests:
    """Digests of the media sources that the peer has received, at most `limit`. An evicted digest causes one resend."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._digests: OrderedDict[str, None] = OrderedDict()

    def __contains__(self, digest: str) -> bool:
        return digest in self._digests

    def add(self, digest: str) -> None:
        self._digests[digest] = None
        self._digests.move_to_end(digest)
        if len(self._digests) > self._limit:
            self._digests.popitem(last=False)

    def clear(self) -> None:
        self._digests.clear()
