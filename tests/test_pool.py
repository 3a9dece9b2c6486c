"""Memory pools: what is taken comes back, whoever lets go of it last, and no two caches share a byte."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

import aiodatadist as adt
from aiodatadist import MemoryPool

from .pairs import OWNER, linked

PAGE = 4096


class Pool(RuleBasedStateMachine):
    """Spans against a map of pages."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = MemoryPool(16 * PAGE, PAGE)
        self.base = self.pool._region.address
        self.spans: list[np.ndarray] = []

    @rule(nbytes=st.integers(1, 6 * PAGE))
    def take(self, nbytes: int) -> None:
        fits = self.pool.largest_gap >= -(-nbytes // PAGE) * PAGE
        try:
            span = np.frombuffer(memoryview(self.pool._take(nbytes)), np.uint8)
        except adt.OutOfMemoryError:
            assert not fits
        else:
            assert fits
            assert span.size == nbytes
            self.spans.append(span)

    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        if self.spans:
            self.spans.pop(data.draw(st.integers(0, len(self.spans) - 1)))

    @invariant()
    def pages_are_somebodys(self) -> None:
        taken: set[int] = set()
        for span in self.spans:
            first = (span.ctypes.data - self.base) // PAGE
            assert (span.ctypes.data - self.base) % PAGE == 0
            pages = set(range(first, first - (-span.size // PAGE)))
            assert pages <= set(range(16))
            assert not pages & taken
            taken |= pages
        assert self.pool.free_bytes == (16 - len(taken)) * PAGE
        assert self.pool.nbytes == 16 * PAGE
        gap = longest = 0
        for page in range(16):
            gap = 0 if page in taken else gap + 1
            longest = max(longest, gap)
        assert self.pool.largest_gap == longest * PAGE

    def teardown(self) -> None:
        self.spans.clear()
        gc.collect()
        assert self.pool.largest_gap == 16 * PAGE


TestPool = Pool.TestCase


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_caches_come_and_go(transport: str) -> None:
    async with linked(transport) as pair:
        caches = pair.owner.cache_manager
        pool = caches.memory_pool(1 << 20, page_bytes=8192)
        desc = adt.CacheDesc(2, (8, 1024), "uint8")
        mine = await pair.take([np.zeros((8, 1024), np.uint8) for _ in range(2)], remote=None)
        places = set()
        for round_ in range(200):
            key = adt.CacheKey(OWNER, round_)
            cache = caches.allocate_cache(desc, keys=[key], pool=pool)
            places.add(cache.tensors[0].ctypes.data)
            for i, tensor in enumerate(cache.tensors):
                tensor[...] = (round_ + i) % 251
            await pair.shown(cache)
            gone = caches.deallocate_cache(cache)
            await pair.user.cache_manager.pull_cache(key, mine)
            for i, tensor in enumerate(mine.tensors):
                assert (tensor[0] == (round_ + i) % 251).all()
            async with asyncio.timeout(60):
                await gone
            del cache, tensor
        assert pool.free_bytes == pool.nbytes
        assert len(places) < 64


async def test_a_pool_that_is_full() -> None:
    async with adt.DataDist(1) as dd:
        caches = dd.cache_manager
        pool = caches.memory_pool(10 * PAGE, page_bytes=PAGE)
        first = caches.allocate_blocks_cache(adt.CacheDesc(1, (6, PAGE), "uint8"), pool=pool)
        with pytest.raises(adt.OutOfMemoryError, match=r"16384 free, the largest piece 16384, and 20480"):
            caches.allocate_blocks_cache(adt.CacheDesc(1, (5, PAGE), "uint8"), pool=pool)
        assert list(caches.caches) == [first.id]
        array = first.tensors[0]
        await caches.deallocate_cache(first)
        assert pool.free_bytes == 4 * PAGE, "an array over it is alive"
        array[...] = 1
        thread = threading.Thread(target=lambda box: box.clear(), args=([array],))
        del array, first
        thread.start()
        thread.join()
        del thread
        assert pool.largest_gap == pool.nbytes


class MeetingGaps(list[tuple[int, int]]):
    """Lets a thread change the gaps only when another one is about to, or has shown that it cannot come here."""

    def __init__(self, gaps: list[tuple[int, int]]) -> None:
        super().__init__(gaps)
        self.meeting = threading.Barrier(2)

    def __setitem__(self, index: Any, gap: Any) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            self.meeting.wait(0.1)
        super().__setitem__(index, gap)


def test_two_threads_never_get_the_same_pages() -> None:
    pool = MemoryPool(8 * PAGE, PAGE)
    pool._gaps = MeetingGaps(pool._gaps)
    spans: list[np.ndarray] = []
    threads = [
        threading.Thread(target=lambda: spans.append(np.frombuffer(memoryview(pool._take(PAGE)), np.uint8)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({span.ctypes.data for span in spans}) == 2
    assert pool.free_bytes == 6 * PAGE


async def test_a_pool_is_populated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with adt.DataDist(1) as dd:
        populated: list[int] = []
        monkeypatch.setattr(dd.cache_manager, "_populate", lambda region: populated.append(region.size))
        pool = dd.cache_manager.memory_pool(1 << 20)
        desc = adt.CacheDesc(1, (2, 64), "uint8")
        for memory in (pool, pool, None):
            await dd.cache_manager.allocate_cache(desc, pool=memory).ready()
        assert populated == [1 << 20, PAGE]


@pytest.mark.parametrize(
    ("error", "nbytes", "page"),
    [
        (adt.ArgumentError, 0, PAGE),
        (adt.ArgumentError, 1, 5000),
        (adt.ArgumentError, 1, 2048),
        (adt.ArgumentTypeError, 1.5, PAGE),
        (adt.ArgumentTypeError, 1, "4096"),
        (adt.OutOfMemoryError, 2**62, PAGE),
    ],
)
async def test_wrong_pools(error: type[Exception], nbytes: int, page: int) -> None:
    async with adt.DataDist(1) as dd:
        with pytest.raises(error):
            dd.cache_manager.memory_pool(nbytes, page_bytes=page)
        with pytest.raises(adt.ArgumentTypeError):
            dd.cache_manager.allocate_cache(adt.CacheDesc(1, (1,), "uint8"), pool=object())  # type: ignore[arg-type]


async def test_pool_memory_is_mapped_once_and_shared_by_datadists() -> None:
    async with linked("shm") as pair, adt.DataDist(3) as third:
        pool = pair.owner.cache_manager.memory_pool(1 << 20)
        desc = adt.CacheDesc(1, (2, 64), "uint8")
        mine = await pair.take([np.zeros((2, 64), np.uint8)], remote=None)
        for model in range(3):
            cache = await pair.allocate(desc, key=adt.BlocksCacheKey(OWNER, model), pool=pool)
            cache.tensors[0][...] = model + 1
            await pair.user.cache_manager.pull_blocks(cache.key, mine, [0], [1])
            assert (mine.tensors[0][1] == model + 1).all()
            assert "mapped" in repr(pair.link.table[adt.BlocksCacheKey(OWNER, model)])
        inode = os.fstat(pool._region.fd).st_ino
        with open("/proc/self/maps") as maps:
            assert sum(line.split()[4] == str(inode) for line in maps) == 2  # here, and here as a peer
        other = third.cache_manager.allocate_blocks_cache(desc, pool=pool)
        await other.ready()
