"""The byte-bounded cache of media sources that a link shares between its peers."""

from __future__ import annotations

from renderers.byte_lru import ByteLRU
from renderers.media.source import MediaSource
from transport.link.limits import FRAME_COST


class MediaCache(ByteLRU[str, MediaSource]):
    """Media sources by digest; each counts 512 bytes more than its data."""

    def keep(self, source: MediaSource) -> None:
        """Store a source. The caller has checked its bytes against its digest."""
        if source.digest not in self:
            self.put(source.digest, source, source.nbytes + FRAME_COST)
