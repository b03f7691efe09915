"""A cache of what is computed of printed text: token layouts, and the extensions of bridges."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

from renderers.byte_lru import ByteLRU
from renderers.cache_key import cache_key


class Sized(Protocol):
    """A value that knows about how many bytes it takes."""

    @property
    def nbytes(self) -> int: ...


T = TypeVar("T", bound=Sized)


class LayoutCache:
    """Values by all inputs that they depend on, at most `max_bytes` together. Safe to share between threads.

    The values are shared, so that they may not be changed. With 0 bytes, nothing is kept.
    """

    def __init__(self, max_bytes: int) -> None:
        self._values: ByteLRU[bytes, Sized] = ByteLRU(max_bytes)

    def get_or_make(self, kind: str, inputs: tuple[Any, ...], make: Callable[[], T]) -> T:
        """The value of equal inputs of a kind, or a new one. What `make` raises is raised again by the next call."""
        key = cache_key((kind, *inputs)) if self._values.max_bytes else None
        if key is None:  # the inputs hold something other than plain data; a template may still print it
            return make()
        cached = self._values.get(key)
        if cached is not None:
            return cast(T, cached)
        made = make()
        self._values.put(key, made, len(key) + made.nbytes)
        return made
