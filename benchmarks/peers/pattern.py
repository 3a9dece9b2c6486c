"""The pattern that every pair of processes moves: scattered blocks of a pool, whose words say where they belong."""

from __future__ import annotations

import mmap
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["Indices", "Memory", "fill", "scattered", "touched", "wrong"]

Indices: TypeAlias = NDArray[np.int64]
Memory: TypeAlias = NDArray[np.uint8]

_FACTOR: Final = np.uint64(0x9E3779B97F4A7C15)  # odd: no two words of a pool are equal
_CHUNK: Final = 1 << 21
"""Bytes looked at in one go: they stay in the cache."""


def touched(nbytes: int, huge_pages: bool) -> Memory:
    """Return ordinary memory, all of whose pages are there.

    Not from numpy, which asks for huge pages wherever it can.
    """
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge_pages:
        pages.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(pages, np.uint8)
    memory[:] = 0
    return memory


def scattered(blocks: int, wanted: int, seed: int) -> Indices:
    """Return `wanted` different block numbers below `blocks`, in no order."""
    return np.random.default_rng(seed).permutation(blocks)[:wanted].astype(np.int64)


def _expected(seed: int, index: Indices, width: int) -> NDArray[np.uint64]:
    first = index.astype(np.uint64) * np.uint64(width)
    words = np.arange(1, width + 1, dtype=np.uint64) + np.uint64(seed << 40)
    numbers: NDArray[np.uint64] = np.add.outer(first, words)
    return numbers * _FACTOR


def fill(pool: Memory, index: Indices, seed: int) -> None:
    """Write the pattern of `seed` to the blocks `index` of a pool ``[blocks, bytes of a block]``."""
    words = pool.view(np.uint64)
    step = max(1, _CHUNK // pool.shape[1])
    for at in range(0, len(index), step):
        part = index[at : at + step]
        words[part] = _expected(seed, part, words.shape[1])


def wrong(pool: Memory, index: Indices, seed: int, source: Indices) -> int:
    """Count the blocks `index` of a pool that do not hold what a pool of `seed` holds in its blocks `source`."""
    words = pool.view(np.uint64)
    step = max(1, _CHUNK // pool.shape[1])
    count = 0
    for at in range(0, len(index), step):
        expected = _expected(seed, source[at : at + step], words.shape[1])
        count += int((words[index[at : at + step]] != expected).any(axis=1).sum())
    return count
