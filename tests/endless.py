"""Transfers without an end, for tests that have to meet one that runs.

How long a transfer takes depends on the machine, and a test that starts one and then does something may find it over.
`memory` is a TiB of addresses and 64 MiB of memory: a transfer into it is busy for minutes wherever it runs, and what
ends it (a cancel, a deadline, a closing, the loss of the peer) meets it for certain. Each of its blocks is the same
memory, so that block 0 shows whether anything was written anywhere.

A peer over tcp that was stopped (`peers.PeerProcess.stop`) holds a transfer up as well, without moving a byte.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

import aiodatadist as adt

from .waiting import until

BLOCK_BYTES = 64 << 20
BLOCKS = 16384

_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_numbers = itertools.count(1 << 40)  # of models, which no test uses


def _map(address: int | None, size: int, protection: int, flags: int, fd: int) -> int:
    found = _libc.mmap(address, size, protection, flags, fd, 0)
    if found == ctypes.c_size_t(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(found)


def memory() -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return an array of `BLOCKS` rows of `BLOCK_BYTES`, all of them the same memory."""
    size = BLOCKS * BLOCK_BYTES
    reserve = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    address = _map(None, size, 0, reserve, -1)
    fd = os.memfd_create("endless")
    try:
        os.ftruncate(fd, BLOCK_BYTES)
        for start in range(address, address + size, BLOCK_BYTES):
            _map(start, BLOCK_BYTES, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, fd)
    finally:
        os.close(fd)
    raw = (ctypes.c_ubyte * size).from_address(address)
    weakref.finalize(raw, _libc.munmap, address, size)
    return np.frombuffer(raw, np.uint8).reshape(BLOCKS, BLOCK_BYTES)


# One block, again and again, goes to all of them.
SOURCES, TARGETS = np.zeros(BLOCKS, np.int64), np.arange(BLOCKS)


class Endless:
    """Pulls or pushes between two linked DataDists of this process that do not end by themselves.

    Attributes
    ----------
    memory : array
        A row of what they write to, which stands for all rows.
    owned : Cache
        The owner's.
    """

    def __init__(self, owner: adt.DataDist, user: adt.DataDist, opcode: str = "pull") -> None:
        self._owner, self._user, self._opcode = owner, user, opcode
        self._key = adt.BlocksCacheKey(owner.cluster_id, next(_numbers))
        target, source = [memory()], [np.ones((1, BLOCK_BYTES), np.uint8)]
        owned, own = (source, target) if opcode == "pull" else (target, source)
        self.owned = owner.cache_manager.register_blocks_cache(owned, key=self._key)
        self._own = user.cache_manager.register_blocks_cache(own, remote=None)
        self.memory = target[0][0]

    async def ready(self) -> Endless:
        """Wait until the user sees the owner's cache."""
        await self.owned.ready()
        await self._own.ready()
        link = self._user.links[self._owner.cluster_id]
        await until(lambda: self._key in link.table)
        return self

    def start(self, timeout: float | None = None, **options: Any) -> adt.Transfer[None]:
        manager = self._user.cache_manager
        call: Callable[..., adt.Transfer[None]] = manager.pull_blocks if self._opcode == "pull" else manager.push_blocks
        return call(self._key, self._own, SOURCES, TARGETS, timeout=timeout, **options)
