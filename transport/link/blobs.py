"""The media a link holds so that they need not be sent again."""

from __future__ import annotations

from collections import OrderedDict

from renderers.media.source import MediaSource
from transport.link.limits import FRAME_COST


class BlobStore:
    """Media by digest, least recently used out first, within `limit` bytes (512 of them for each source).

    A source that alone is larger than the limit is not kept.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._sources: OrderedDict[str, MediaSource] = OrderedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._sources)

    def find(self, digest: str) -> MediaSource | None:
        """The source, now the most recently used."""
        source = self._sources.get(digest)
        if source is not None:
            self._sources.move_to_end(digest)
        return source

    def keep(self, source: MediaSource) -> None:
        """Keep a source whose bytes are known to match its digest."""
        cost = source.nbytes + FRAME_COST
        if source.digest in self._sources or cost > self._limit:
            return
        self._sources[source.digest] = source
        self.bytes += cost
        while self.bytes > self._limit:
            _, oldest = self._sources.popitem(last=False)
            self.bytes -= oldest.nbytes + FRAME_COST


class KnownDigests:
    """Digests of media that the peer has had; the oldest are forgotten, which costs no more than sending them again."""

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
