"""A `bytes` object that is filled after it was made, on large pages where the system has them.

A fresh buffer of 100 MB costs more in page faults than in copying: on Linux a page of 4 KiB at a time is cleared and
mapped when it is first touched, 70 ms for 126 MB here where the copy itself takes 18. numpy asks for pages of 2 MiB for
its own arrays; `bytes` has to be helped.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable, Sequence
from typing import Final

from transport.wire.wire_format import Buffer

# What is smaller comes from the heap, whose pages are mapped already, and join() is the faster one.
_LARGE: Final = 4 << 20


def joined(parts: Sequence[Buffer]) -> bytes:
    """`b"".join(parts)`, for large results in a third of the time."""
    size = sum(memoryview(part).nbytes for part in parts)
    return _joined_on_large_pages(parts, size) if size >= _LARGE and _advise is not None else b"".join(parts)


def _joined_on_large_pages(parts: Sequence[Buffer], size: int) -> bytes:
    # With no contents to copy, this is CPython's documented way to make bytes and fill them before anyone else has
    # them: https://docs.python.org/3/c-api/bytes.html#c.PyBytes_FromStringAndSize
    made: bytes = _make(None, size)
    address = _address(made)
    assert _advise is not None
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    _advise(first, (address + size - first) // mmap.PAGESIZE * mmap.PAGESIZE, mmap.MADV_HUGEPAGE)  # refusal is harmless
    room = memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B")
    end = 0
    for part in parts:
        view = memoryview(part).cast("B") if memoryview(part).nbytes else memoryview(b"")
        room[end : end + view.nbytes] = view
        end += view.nbytes
    return made


def _find_advise() -> Callable[[int, int, int], int] | None:
    """The system's madvise(), where there is one and `bytes` are known to lie where CPython lays them."""
    if sys.implementation.name != "cpython" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    advise = getattr(ctypes.CDLL(None), "madvise", None)
    if advise is not None:
        advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return advise


_advise = _find_advise()
_make = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_char_p, ctypes.c_ssize_t)(
    ("PyBytes_FromStringAndSize", ctypes.pythonapi)
)
_address = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object)(("PyBytes_AsString", ctypes.pythonapi))
