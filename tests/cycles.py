"""Rounds after which everything must be as it was: opening and closing, and failing, for `test_cycles` and `soak`.

A `Watch` remembers what the process holds when it has warmed up, and compares later.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dataclasses
import gc
import os
import random
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

import aiodatadist as adt
from aiodatadist import _core

from .quiet import PATHS, Broken, Tally, config_of

OWNER, USER, STRANGER, NOBODY = 1, 2, 3, 99
KEY = adt.BlocksCacheKey(OWNER)
# Small blocks in any order: a transfer takes many batches, and is still under way when the closing begins.
BLOCKS, BLOCK_BYTES, LANES = 8192, 64, 3
PATIENCE = 60.0
# Sanitizers keep freed memory, and remember what was where.
SANITIZED = "san.so" in os.environ.get("LD_PRELOAD", "")


# What a process holds. ------------------------------------------------------------------------------------------


class _Mallinfo(ctypes.Structure):
    _names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = tuple((name, ctypes.c_size_t) for name in _names)


def _allocated() -> int:
    """Return the bytes that malloc has given out; 0 where it does not say, or where a sanitizer has taken its place."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None or SANITIZED:
        return 0
    mallinfo.restype = _Mallinfo
    found = mallinfo()
    return int(found.uordblks + found.hblkhd)


def _resident() -> int:
    with open("/proc/self/statm") as statm:
        return 0 if SANITIZED else int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _mappings() -> int:
    with open("/proc/self/maps") as maps:
        return sum("memfd:aiodatadist" in line for line in maps)


def _engine_threads() -> int:
    count = 0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            count += (task / "comm").read_text().startswith("adt-")
    return count


@dataclasses.dataclass(frozen=True)
class Resources:
    """What must not grow."""

    fds: int
    threads: int
    maps: int
    tasks: int
    objects: int
    allocated: int
    resident: int
    native: dict[str, int]

    @classmethod
    def now(cls) -> Resources:
        for _ in range(3):
            gc.collect()
        count = getattr(_core, "live_objects", dict)
        return cls(
            fds=len(os.listdir("/proc/self/fd")),
            threads=_engine_threads(),
            maps=_mappings(),
            tasks=len(asyncio.all_tasks()),
            objects=sys.getallocatedblocks(),
            allocated=_allocated(),
            resident=_resident(),
            native={kind: number for kind, number in count().items() if number},
        )


class Watch:
    """Compares what the process holds with what it held when this was made."""

    def __init__(self) -> None:
        self.before = Resources.now()

    async def check(self, rounds: int) -> None:
        """Raise if something has grown with the rounds. Memory may grow a little: caches of Python and of malloc."""
        room = {"objects": 3000 + rounds // 4, "allocated": (1 << 20) + 64 * rounds, "resident": 48 << 20}
        limit = time.monotonic() + PATIENCE
        while True:
            now = Resources.now()
            grown = []
            for field in dataclasses.fields(Resources):
                old, new = getattr(self.before, field.name), getattr(now, field.name)
                if field.name == "native":
                    grown += [f"native {kind}" for kind in new if new[kind] > old.get(kind, 0)]
                elif new > old + room.get(field.name, 0):
                    grown.append(field.name)
            if not grown:
                return
            if time.monotonic() > limit:
                raise Broken(f"{', '.join(grown)} grew in {rounds} rounds: {self.before}, now {now}")
            await asyncio.sleep(0.01)  # threads and descriptors of what has just ended


# Opening and closing. -------------------------------------------------------------------------------------------


def _cache(dd: adt.DataDist, memory: str, **options: Any) -> adt.Cache:
    if memory == "library":
        return dd.cache_manager.allocate_blocks_cache(adt.CacheDesc(2, (BLOCKS, BLOCK_BYTES), "uint8"), **options)
    arrays = [np.zeros((BLOCKS, BLOCK_BYTES), np.uint8) for _ in range(2)]
    return dd.cache_manager.register_blocks_cache(arrays, **options)


async def _shown(user: adt.DataDist, key: adt.BlocksCacheKey) -> None:
    async with asyncio.timeout(PATIENCE):
        while key not in user.links[key.cluster_id].table:
            await asyncio.sleep(0)


async def _cancelled_closing(dd: adt.DataDist) -> None:
    task = asyncio.create_task(dd.aclose())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait((task,))
    await dd.wait_closed()


async def _aborted(dd: adt.DataDist) -> None:
    dd.abort()
    await dd.wait_closed()


async def _unlinked(dd: adt.DataDist) -> None:
    for cluster_id in list(dd.links):
        await dd.unlink(adt.ClusterInfo(cluster_id))
    await dd.aclose()


ENDS: dict[str, Callable[[adt.DataDist], Awaitable[None]]] = {
    "closed": adt.DataDist.aclose,
    "aborted": _aborted,
    "unlinked": _unlinked,
    "cancelled": _cancelled_closing,
}


async def open_and_close(seed: int) -> Tally:
    """Open and link two, start transfers, and close both in some way and order, with the transfers under way."""
    began = time.monotonic()
    dice = random.Random(seed)
    path = PATHS[seed % len(PATHS)]
    memory = "library" if path == "library" else "ordinary"
    config = config_of(path, inline_bytes=0, populate_limit=0)
    tally = Tally(rounds=1)
    async with (
        adt.DataDist(OWNER, listen="127.0.0.1:0", config=config) as owner,
        adt.DataDist(USER, config=config) as user,
    ):
        theirs, mine = _cache(owner, memory, key=KEY), _cache(user, memory)
        await theirs.ready()
        await user.link(adt.ClusterInfo(OWNER, owner.listen_address))
        await _shown(user, KEY)
        # Each has blocks of its own: what two transfers write at once is nobody's promise, and a race.
        lanes = np.array_split(np.random.default_rng(seed).permutation(BLOCKS), LANES)
        transfers: list[adt.Transfer[None]] = []
        for lane in lanes[: dice.randrange(LANES + 1)]:
            move = dice.choice([user.cache_manager.pull_blocks, user.cache_manager.push_blocks])
            transfers.append(move(KEY, mine, lane, lane))
            if not dice.randrange(4):
                transfers[-1].cancel()
        for _ in range(dice.randrange(3)):
            await asyncio.sleep(0)
        tally.midway = sum(not transfer.done() for transfer in transfers)
        first, second = dice.sample([owner, user], 2)
        how = dice.choice(list(ENDS))
        tally.causes[how] += 1
        if dice.randrange(2):
            await asyncio.wait_for(ENDS[how](first), PATIENCE)
            await asyncio.wait_for(second.aclose(), PATIENCE)
        else:
            await asyncio.wait_for(asyncio.gather(ENDS[how](first), second.aclose()), PATIENCE)
        for transfer in transfers:
            if not transfer.done():
                raise Broken(f"seed {seed}: {how}, and a transfer has no end")
            error = None if transfer.cancelled() else transfer.exception()
            if error is not None and not isinstance(error, adt.DataDistError):
                raise Broken(f"seed {seed}: {how}, and a transfer ended with {error!r}")
            tally.ends["cancelled" if transfer.cancelled() else type(error).__name__ if error else "ok"] += 1
    tally.seconds = time.monotonic() - began
    return tally


async def open_and_close_all(seeds: Iterable[int]) -> Tally:
    """Do one round after the other."""
    tally = Tally()
    for seed in seeds:
        tally += await open_and_close(seed)
    return tally


# Failing. -------------------------------------------------------------------------------------------------------


class Failing:
    """Two linked DataDists, and operations that must fail: each returns, or raises one of `EXPECTED`."""

    def __init__(self, owner: adt.DataDist, user: adt.DataDist, silent: socket.socket, config: adt.Config) -> None:
        self.owner, self.user, self.silent, self.config = owner, user, silent, config
        self.order = np.random.default_rng(1).permutation(BLOCKS)
        self.pull, self.push = user.cache_manager.pull_blocks, user.cache_manager.push_blocks

    async def set_up(self, memory: str) -> None:
        self.theirs, self.mine = _cache(self.owner, memory, key=KEY, remote="r"), _cache(self.user, memory)
        self.other = self.user.cache_manager.register_blocks_cache([np.zeros((4, 32), np.float32) for _ in range(2)])
        for cache in (self.theirs, self.mine, self.other):
            await cache.ready()
        await self.user.link(adt.ClusterInfo(OWNER, self.owner.listen_address))
        await _shown(self.user, KEY)

    async def blocks(self) -> None:
        await self.pull(KEY, self.mine, [0, 1], [5, 5])

    async def geometry(self) -> None:
        await self.pull(KEY, self.other, [0], [0])

    async def unknown_key(self) -> None:
        await self.pull(adt.BlocksCacheKey(OWNER, model_id=77), self.mine, [0], [0])

    async def no_link(self) -> None:
        await self.pull(adt.BlocksCacheKey(NOBODY), self.mine, [0], [0])

    async def permission(self) -> None:
        await self.push(KEY, self.mine, [0], [0])

    async def long_notification(self) -> None:
        await self.pull(KEY, self.mine, [0], [0], notify=bytes(1 << 20))

    async def deadline(self) -> None:
        await self.pull(KEY, self.mine, self.order, self.order[::-1], timeout=1e-6)

    async def cancel(self) -> None:
        transfer = self.pull(KEY, self.mine, self.order, self.order[::-1])
        transfer.cancel()
        await transfer

    async def scope(self) -> None:
        async with asyncio.timeout(0):
            await self.pull(KEY, self.mine, self.order, self.order[::-1])

    async def taken_key(self) -> None:
        _cache(self.owner, "library", key=KEY)

    async def unmapped(self) -> None:
        self.user.cache_manager.register_blocks_cache([4096], desc=adt.CacheDesc(1, (4, 64), "uint8"))

    async def memory(self) -> None:
        self.user.cache_manager.allocate_blocks_cache(adt.CacheDesc(8, (1 << 34, 4096), "uint8"))

    async def nobody_listens(self) -> None:
        await self.user.link(adt.ClusterInfo(NOBODY, "127.0.0.1:1"))

    async def another_listens(self) -> None:
        await self.user.link(adt.ClusterInfo(NOBODY, self.owner.listen_address))

    async def silence(self) -> None:
        await self.user.link(adt.ClusterInfo(NOBODY, self.silent.getsockname()[:2]), timeout=0.001)

    async def same_id(self) -> None:
        async with adt.DataDist(USER, config=self.config) as twin:
            await twin.link(adt.ClusterInfo(OWNER, self.owner.listen_address))

    async def port_in_use(self) -> None:
        await adt.DataDist(STRANGER, listen=str(self.owner.listen_address), config=self.config).open()

    async def config_field(self) -> None:
        adt.Config(copy_threads=0)


EXPECTED: dict[str, type[BaseException]] = {
    "blocks": adt.BlockIndexError,
    "geometry": adt.CacheMismatch,
    "unknown_key": adt.CacheNotFound,
    "no_link": adt.NotLinkedError,
    "permission": adt.CacheAccessError,
    "long_notification": adt.ArgumentError,
    "deadline": adt.TransferTimeout,
    "cancel": asyncio.CancelledError,
    "scope": TimeoutError,
    "taken_key": adt.CacheExists,
    "unmapped": adt.RegistrationError,
    "memory": adt.OutOfMemoryError,
    "nobody_listens": adt.LinkError,
    "another_listens": adt.HandshakeError,
    "silence": adt.LinkTimeout,
    "same_id": adt.LinkRefusedError,
    "port_in_use": adt.TransportError,
    "config_field": adt.ConfigError,
}
# A fast machine may be done before a deadline of a microsecond.
MAY_SUCCEED = frozenset({"deadline"})


async def fail(failing: Failing, seed: int) -> Tally:
    """Do one operation that fails, and see that it failed as it should."""
    began = time.monotonic()
    name = random.Random(seed).choice(list(EXPECTED))
    try:
        async with asyncio.timeout(PATIENCE):
            await getattr(failing, name)()
    except EXPECTED[name]:
        end = "failed"
    else:
        end = "succeeded"
        if name not in MAY_SUCCEED:
            raise Broken(f"seed {seed}: {name} did not fail")
    return Tally(1, ends={end: 1}, causes={name: 1}, seconds=time.monotonic() - began)  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def failing_pair(path: str) -> AsyncIterator[Failing]:
    config = config_of(path, inline_bytes=0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        async with (
            adt.DataDist(OWNER, listen="127.0.0.1:0", config=config) as owner,
            adt.DataDist(USER, config=config) as user,
        ):
            made = Failing(owner, user, silent, config)
            await made.set_up("library" if path == "library" else "ordinary")
            yield made


async def fail_all(failing: Failing, seeds: Iterable[int]) -> Tally:
    """Do one round after the other."""
    tally = Tally()
    for seed in seeds:
        tally += await fail(failing, seed)
    return tally
