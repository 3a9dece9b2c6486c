"""aiodatadist: variants ``library`` and ``ordinary`` memory over shm, and ``tcp``.

The passive process keeps its event loop in a thread; nothing is done for it while data moves.
"""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any, Final

import numpy as np
from pattern import Memory, touched
from worker import Side, main

import aiodatadist as adt

_PASSIVE: Final = 1
_TIMEOUT: Final = 120.0


class Aiodatadist(Side):
    def version(self) -> str:
        return adt.__version__

    def _wait(self, coroutine: Any) -> Any:
        """Run a coroutine in the loop's thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(_TIMEOUT)

    def open(self) -> Any:
        self.transport = "tcp" if self.variant == "tcp" else "shm"
        self.memory = None if self.variant == "library" else touched(self.nbytes, self.huge_pages)
        self.caches: list[adt.Cache] = []  # one, once there are blocks
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        return self._wait(self._open())

    async def _open(self) -> str:
        config = adt.Config.from_env(transports=(self.transport,), transfer_timeout=_TIMEOUT)
        if self.active:
            self.node = adt.DataDist(_PASSIVE + 1, adt.Role.DECODER, config=config)
        else:
            self.node = adt.DataDist(_PASSIVE, adt.Role.PROMPT, listen="127.0.0.1:0", config=config)
        await self.node.__aenter__()
        return "" if self.active else str(self.node.listen_address)

    def meet(self, other: Any) -> None:
        if self.active:
            self._wait(self._link(other))

    async def _link(self, address: str) -> None:
        await self.node.link(adt.ClusterInfo(_PASSIVE, address))

    def make_pool(self) -> Memory:
        pool: Memory = self._wait(self._make_pool())
        return pool

    async def _make_pool(self) -> Memory:
        caches = self.node.cache_manager
        if self.caches:
            await caches.unregister_cache(self.caches.pop())
        self.key = adt.BlocksCacheKey(_PASSIVE, self.block)
        sides: dict[str, Any] = {"remote": None} if self.active else {"key": self.key}
        if self.memory is None:
            desc = adt.CacheDesc(1, (self.nbytes // self.block, self.block), "uint8")
            cache = caches.allocate_blocks_cache(desc, **sides)
        else:
            cache = caches.register_blocks_cache([self.memory.reshape(-1, self.block)], **sides)
        self.caches.append(cache)
        await cache.ready()
        pool: Memory = np.asarray(cache.tensors[0])
        return pool

    def prepare(self) -> None:
        if self.active:
            self._wait(self._announced())

    async def _announced(self) -> None:
        async with asyncio.timeout(_TIMEOUT):
            events = self.node.events()
            while self.key not in self.node.links[_PASSIVE].table:
                await anext(events)

    def move(self, write: bool) -> float:
        took: float = self._wait(self._move(write))
        return took

    async def _move(self, write: bool) -> float:
        caches, (cache,) = self.node.cache_manager, self.caches
        began = time.perf_counter()
        if write:
            await caches.push_blocks(self.key, cache, self.here, self.there)
        else:
            await caches.pull_blocks(self.key, cache, self.there, self.here)
        return time.perf_counter() - began

    def each(self, write: bool, count: int) -> list[float]:
        took: list[float] = self._wait(self._each(write, count))
        return took

    async def _each(self, write: bool, count: int) -> list[float]:
        caches, key, (cache,) = self.node.cache_manager, self.key, self.caches
        pairs = [([h], [t]) for h, t in zip(self.here[:count].tolist(), self.there[:count].tolist(), strict=True)]
        took = []
        if write:
            for here, there in pairs:
                began = time.perf_counter_ns()
                await caches.push_blocks(key, cache, here, there)
                took.append((time.perf_counter_ns() - began) * 1e-9)
        else:
            for here, there in pairs:
                began = time.perf_counter_ns()
                await caches.pull_blocks(key, cache, there, here)
                took.append((time.perf_counter_ns() - began) * 1e-9)
        return took


if __name__ == "__main__":
    main(Aiodatadist)
