"""Memory pools: library memory taken once, from which caches are allocated and to which they return."""

from __future__ import annotations

import bisect
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, SupportsIndex

from . import _core
from .errors import ArgumentError, OutOfMemoryError
from .types import as_integer

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["MemoryPool"]


class MemoryPool:
    """Library memory for caches that come and go, so that allocating one asks nothing of the kernel.

    Made by `CacheManager.memory_pool`. Peers of this host map the whole pool once, as long as they know a cache in it.
    A cache takes whole pages, next to each other, from the first gap that is large enough. Its pages are free again
    when it is deallocated, quiet and the last array over it is gone; in which thread that happens does not matter, and
    DataDists of several threads may share a pool. The pool itself goes with the last reference to it and to its caches.

    Parameters
    ----------
    nbytes : int
        Bytes of the pool, rounded up to whole pages.
    page_bytes : int
        Bytes of a page: a power of two from 4096 to 2**30.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        A number is out of range.
    OutOfMemoryError
        The kernel does not give the memory.
    """

    def __init__(self, nbytes: SupportsIndex, page_bytes: SupportsIndex) -> None:
        page = as_integer(page_bytes, "page_bytes", low=4096, high=2**30)
        if page & (page - 1):
            raise ArgumentError(f"page_bytes={page} is not a power of two", hint="give 4096, 65536, ...")
        self._page = page
        self._region = _core.Region(-(-as_integer(nbytes, "nbytes", low=1, high=2**62) // page) * page)
        self._gaps: list[tuple[int, int]] = [(0, self._region.size)]  # offset and bytes, in rising order
        self._lock = threading.Lock()  # of the gaps
        # Arrays may die in any thread, also while this one holds the lock: they only put their pages here.
        self._returned: deque[tuple[int, int]] = deque()

    def __repr__(self) -> str:
        return f"<MemoryPool: {self.free_bytes} of {self.nbytes} bytes free>"

    @property
    def nbytes(self) -> int:
        """Bytes in all."""
        return self._region.size

    @property
    def free_bytes(self) -> int:
        """Bytes that no cache has."""
        with self._lock:
            self._collect()
            return sum(size for _, size in self._gaps)

    @property
    def largest_gap(self) -> int:
        """Bytes of the largest cache that fits now."""
        with self._lock:
            self._collect()
            return max((size for _, size in self._gaps), default=0)

    def _take(self, nbytes: int) -> _core.Span:
        """Take memory; it comes back when the last reference to the span is gone."""
        need = -(-nbytes // self._page) * self._page
        with self._lock:
            self._collect()
            for i, (offset, size) in enumerate(self._gaps):
                if size >= need:
                    if size == need:
                        del self._gaps[i]
                    else:
                        self._gaps[i] = (offset + need, size - need)
                    span = _core.Span(self._region, offset, nbytes)
                    give_back: Callable[[tuple[int, int]], None] = self._returned.append
                    weakref.finalize(span, give_back, (offset, need)).atexit = False
                    return span
        raise OutOfMemoryError(
            f"the pool of {self.nbytes} bytes has {self.free_bytes} free, the largest piece {self.largest_gap}, "
            f"and {need} are needed",
            hint="deallocate caches and drop the arrays over them, or make a larger pool",
        )

    def _collect(self) -> None:
        """Join what came back with its neighbours. The caller holds the lock."""
        while self._returned:
            offset, size = self._returned.popleft()
            at = bisect.bisect(self._gaps, (offset, 0))
            if at < len(self._gaps) and self._gaps[at][0] == offset + size:
                size += self._gaps.pop(at)[1]
            if at > 0 and sum(self._gaps[at - 1]) == offset:
                offset, before = self._gaps[at - 1]
                self._gaps[at - 1] = (offset, before + size)
            else:
                self._gaps.insert(at, (offset, size))
