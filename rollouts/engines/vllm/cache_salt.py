"""Salts that keep what other weights computed out of vLLM's prefix cache."""

from __future__ import annotations

import functools
import hashlib
from collections import OrderedDict

from renderers.fork_reset import ProcessLock

#: This many sessions keep the salt of their first request.
_MAX_SESSIONS = 65_536


class CacheSalts:
    """One salt per model (or adapter) and weight version. A session keeps the salt of its first request to a model, so
    that all of its turns share the prefix cache even if the weights change between them."""

    def __init__(self) -> None:
        self._by_session: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._lock = ProcessLock()

    def salt(self, model: str, weight_version: str, session_id: str | None) -> str:
        salt = _digest(model, weight_version)
        if session_id is None:
            return salt
        with self._lock:
            salt = self._by_session.setdefault((session_id, model), salt)
            self._by_session.move_to_end((session_id, model))
            if len(self._by_session) > _MAX_SESSIONS:
                self._by_session.popitem(last=False)
        return salt


@functools.lru_cache(maxsize=64)
def _digest(model: str, weight_version: str) -> str:
    return hashlib.blake2b(f"{model}\0{weight_version}".encode(), digest_size=16).hexdigest()
