"""Joining buffers to one `bytes` object, for large results on huge pages where the system has them.

A new buffer of 100 MB costs more in page faults than in copying: on Linux each page of 4 KiB is cleared and mapped when
it is first written, 70 ms for 126 MB where the copy itself takes 18. numpy requests pages of 2 MiB for its arrays;
`bytes` does not, so this module requests them.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

from transport.wire.wire_format import Buffer

# A smaller result comes from the heap, whose pages are mapped already, and bytes.join() is faster.
_LARGE: Final = 4 << 20


def join_buffers(parts: Sequence[Buffer]) -> bytes:
    """`b"".join(parts)`, for large results in a third of the time."""
    size = sum(memoryview(part).nbytes for part in parts)
    advise = _find_madvise() if size >= _LARGE else None
    return b"".join(parts) if advise is None else _join_on_huge_pages(parts, size, advise)


def _join_on_huge_pages(parts: Sequence[Buffer], size: int, advise: Callable[[int, int, int], int]) -> bytes:
    # PyBytes_FromStringAndSize without contents is CPython's documented way to make a bytes object and fill it before
    # other code has it: https://docs.python.org/3/c-api/bytes.html#c.PyBytes_FromStringAndSize
    prototype: Any = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_char_p, ctypes.c_ssize_t)
    result: bytes = prototype(("PyBytes_FromStringAndSize", ctypes.pythonapi))(None, size)
    prototype = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object)
    address: int = prototype(("PyBytes_AsString", ctypes.pythonapi))(result)
    first_page = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    page_bytes = (address + size - first_page) // mmap.PAGESIZE * mmap.PAGESIZE
    advise(first_page, page_bytes, mmap.MADV_HUGEPAGE)  # a refusal is harmless
    target = memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B")
    end = 0
    for part in parts:
        view = memoryview(part).cast("B") if memoryview(part).nbytes else memoryview(b"")
        target[end : end + view.nbytes] = view
        end += view.nbytes
    return result


@functools.cache
def _find_madvise() -> Callable[[int, int, int], int] | None:
    """The system's madvise(); None if there is none, or this Python may store the contents of `bytes` elsewhere."""
    if sys.implementation.name != "cpython" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    advise = getattr(ctypes.CDLL(None), "madvise", None)
    if advise is not None:
        advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return advise
