"""The memory that `bench` moves: pools of blocks whose words say where they belong, and the raw limits over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from aiodatadist import _limits

__all__ = ["PEER_ID", "Half", "Indices", "Remote", "scattered"]

PEER_ID: Final = 1
"""Cluster id of the passive process."""

Indices: TypeAlias = NDArray[np.int64]
Words: TypeAlias = NDArray[np.uint64]

_WORD: Final = 8
_FACTOR: Final = np.uint64(0x9E3779B97F4A7C15)  # odd: no two words of a pool are equal
_CHUNK: Final = 1 << 21
"""Words looked at in one go."""


def scattered(blocks: int, wanted: int, seed: int) -> Indices:
    """Return `wanted` different block numbers below `blocks`, in no order.

    Parameters
    ----------
    blocks, wanted, seed : int

    Returns
    -------
    array of int64
    """
    return np.random.default_rng(seed).permutation(blocks)[:wanted].astype(np.int64)


@dataclass(frozen=True, slots=True)
class Remote:
    """A half of another process, as the raw limits need it.

    Attributes
    ----------
    pid : int
    address : int
        Of the pool there.
    index : array of int64
        Its blocks.
    """

    pid: int
    address: int
    index: Indices

    def part(self, first: int, count: int) -> Remote:
        """Return the same pool with a part of its list."""
        return Remote(self.pid, self.address, self.index[first : first + count])


@dataclass(frozen=True, slots=True)
class Half:
    """A pool of one process, and the list of its blocks that take part.

    Attributes
    ----------
    words : array of uint64, [blocks, words of a block]
        The pool.
    index : array of int64
        Block number i of the pattern lies in ``words[index[i]]``.
    before : int
        Words of the pattern that come before those of the pool: several pools differ in all of them.
    """

    words: Words
    index: Indices
    before: int = 0

    @classmethod
    def of(cls, memory: NDArray[np.uint8], index: Indices, number: int = 0) -> Half:
        """Take a pool ``[blocks, bytes of a block]``, the `number`-th with one pattern.

        Raises IndexError for blocks outside of it.
        """
        words = memory.reshape(len(memory), -1).view(np.uint64)
        index = np.ascontiguousarray(index, np.int64)
        if not len(index) or index.min() < 0 or index.max() >= len(words):
            raise IndexError(f"blocks outside 0..{len(words) - 1}, or none")
        return cls(words, index, number * words.size)

    def part(self, first: int, count: int) -> Half:
        """Return the same pool with a part of its list."""
        return Half(self.words, self.index[first : first + count], self.before)

    @property
    def address(self) -> int:
        """Where the pool begins."""
        return int(self.words.ctypes.data)

    @property
    def block(self) -> int:
        """Bytes of a block."""
        return int(self.words.shape[1]) * _WORD

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks that take part."""
        return len(self.index) * self.block

    def fill(self) -> None:
        """Write the pattern to the whole pool."""
        flat = self.words.reshape(-1)
        for at in range(0, len(flat), _CHUNK):
            flat[at : at + _CHUNK] = _pattern(self.before + at, self.before + min(at + _CHUNK, len(flat)))

    def fill_blocks(self) -> None:
        """Write the pattern to the blocks that take part, and touch no other."""
        self.words[self.index] = self._expected(self.index)

    def clear(self) -> None:
        """Zero the blocks that take part."""
        self.words[self.index] = 0

    def wrong(self, index: Indices) -> int:
        """Count the blocks that take part and do not hold the pattern of the blocks `index` of a filled pool."""
        wrong = 0
        step = max(1, _CHUNK // self.words.shape[1])
        for at in range(0, len(self.index), step):
            found = self.words[self.index[at : at + step]]
            wrong += int((found != self._expected(index[at : at + step])).any(axis=1).sum())
        return wrong

    def _expected(self, index: Indices) -> Words:
        """Return what the blocks `index` of a filled pool hold."""
        width = self.words.shape[1]
        first = index.astype(np.uint64) * np.uint64(width)
        return (first[:, None] + np.uint64(1)) * _FACTOR + _pattern(self.before, self.before + width) - _FACTOR

    # The raw operations. They return seconds, or the seconds of each block. ----------------------------------

    def copy(self, source: Half, threads: int, loop: Literal["memcpy", "stream", "stream-prefetch"]) -> float:
        """Copy the blocks of another pool of this process."""
        self._check(source.index, source.block)
        took = _limits.copy(
            self.address, _address(self.index), source.address, _address(source.index), len(self.index), self.block,
            threads=threads, loop=loop,
        )  # fmt: skip
        return took * 1e-9

    def process_vm(self, remote: Remote, threads: int, iovecs: int, *, write: bool) -> float:
        """Read the blocks from another process, or write them there. Raises OSError."""
        self._check(remote.index, self.block)
        took = _limits.process_vm(
            self.address, _address(self.index), remote.pid, remote.address, _address(remote.index), len(self.index),
            self.block, threads=threads, iovecs=iovecs, write=write,
        )  # fmt: skip
        return took * 1e-9

    def sockets(self, descriptors: Sequence[int], *, sends: bool, asks: bool) -> float:
        """Send or receive the blocks over connected sockets, one thread each. Raises OSError."""
        took = _limits.sockets(
            list(descriptors), self.address, _address(self.index), len(self.index), self.block, sends=sends, asks=asks
        )
        return took * 1e-9

    def copy_each(self, source: Half) -> NDArray[np.float64]:
        """Copy the blocks one by one."""
        self._check(source.index, source.block)
        took = np.zeros(len(self.index), np.int64)
        _limits.copy_each(
            self.address, _address(self.index), source.address, _address(source.index), len(took), self.block,
            _address(took),
        )  # fmt: skip
        return _seconds(took)

    def process_vm_each(self, remote: Remote, *, write: bool) -> NDArray[np.float64]:
        """Move the blocks one by one with process_vm. Raises OSError."""
        self._check(remote.index, self.block)
        took = np.zeros(len(self.index), np.int64)
        _limits.process_vm_each(
            self.address, _address(self.index), remote.pid, remote.address, _address(remote.index), len(took),
            self.block, _address(took), write=write,
        )  # fmt: skip
        return _seconds(took)

    def socket_each(self, descriptor: int, *, sends: bool, asks: bool) -> NDArray[np.float64]:
        """Move the blocks one by one over a socket, a round trip each. Raises OSError."""
        took = np.zeros(len(self.index), np.int64)
        _limits.socket_each(
            descriptor, self.address, _address(self.index), len(took), self.block, _address(took), sends=sends,
            asks=asks,
        )  # fmt: skip
        return _seconds(took)

    def _check(self, index: Indices, block: int) -> None:
        if len(index) != len(self.index) or block != self.block:
            raise IndexError("the two pools differ in blocks")


def _seconds(nanoseconds: Indices) -> NDArray[np.float64]:
    return nanoseconds.astype(np.float64) * 1e-9


def _address(index: Indices) -> int:
    return int(index.ctypes.data)


def _pattern(first: int, last: int) -> Words:
    numbers = np.arange(first + 1, last + 1, dtype=np.uint64)
    return numbers * _FACTOR
