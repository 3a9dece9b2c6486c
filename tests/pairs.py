"""Two linked DataDists in this process and this loop, for tests that need no second process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import aiodatadist as adt

from .waiting import until

OWNER, USER = 1, 2


@dataclass(eq=False)
class Pair:
    """`user` has linked `owner`."""

    owner: adt.DataDist
    user: adt.DataDist
    link: adt.Link

    async def offer(self, tensors: Sequence[Any], **options: Any) -> adt.Cache:
        """Register tensors at the owner, and wait until the user sees them."""
        options.setdefault("key", adt.BlocksCacheKey(OWNER))
        cache = self.owner.cache_manager.register_blocks_cache(tensors, **options)
        return await self.shown(cache)

    async def allocate(self, desc: adt.CacheDesc, **options: Any) -> adt.Cache:
        """Allocate a cache at the owner, and wait until the user sees it."""
        options.setdefault("key", adt.BlocksCacheKey(OWNER))
        return await self.shown(self.owner.cache_manager.allocate_blocks_cache(desc, **options))

    async def shown(self, cache: adt.Cache) -> adt.Cache:
        """Wait until the user sees a cache of the owner."""
        await cache.ready()
        while adt.CacheKeyByIdAndIndex(OWNER, cache.id) not in self.link.table:
            assert self.link.error is None
            await asyncio.sleep(0.001)
        return cache

    async def take(self, tensors: Sequence[Any], **options: Any) -> adt.Cache:
        """Register tensors at the user, and wait until they can be used."""
        cache = self.user.cache_manager.register_blocks_cache(tensors, **options)
        await cache.ready()
        return cache


@contextlib.asynccontextmanager
async def linked(
    *transports: str, owner: dict[str, Any] | None = None, user: dict[str, Any] | None = None
) -> AsyncIterator[Pair]:
    """Open and link two DataDists over the first of `transports`; the dicts are fields of their Config."""
    names = transports or ("shm", "tcp")
    here = adt.Config(transports=names, **(owner or {}))
    there = adt.Config(transports=names, **(user or {}))
    async with (
        adt.DataDist(OWNER, adt.Role.PROMPT, listen="127.0.0.1:0", config=here) as first,
        adt.DataDist(USER, adt.Role.DECODER, config=there) as second,
    ):
        link = await second.link(adt.ClusterInfo(OWNER, str(first.listen_address)))
        await until(lambda: USER in first.links)  # a moment later, or before
        assert link.path.transport == names[0]
        yield Pair(first, second, link)


def pattern(seed: int, shape: tuple[int, ...], dtype: Any = np.uint8, tensors: int = 2) -> list[np.ndarray[Any, Any]]:
    """Tensors of random bytes."""
    random = np.random.default_rng(seed)
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return [np.frombuffer(random.bytes(size), np.uint8).view(dtype).reshape(shape).copy() for _ in range(tensors)]
