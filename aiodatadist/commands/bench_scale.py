"""`bench scale`: many blocks, much memory, many transfers and many links, beside an eighth of them.

What grows linearly takes eight times as long, and eight times the memory, for eight times as many: a ratio of 1. Memory
is measured first, because what others have left behind would serve as memory later.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Final

import numpy as np

import aiodatadist as adt

from .bench_memory import PEER_ID, Half, Indices, scattered
from .bench_peer import allocate, config, raise_files, resident, sparse
from .bench_rows import Progress, Rows, in_turn, size_text
from .bench_transfers import DIRECTIONS, MEMORY, POOL_FACTOR, Session, Site
from .failure import CommandError

__all__ = ["ScaleSizes", "measure_scale"]

_PART: Final = 8
_LINEAR: Final = 1.25
"""What a ratio may be: 1 is linear, and the rest is for a machine whose seconds differ."""

_BLOCK: Final = 256
_FEW: Final = 10_000
"""Blocks of the transfers that one of very many stands beside."""

_SPARSE_BLOCK: Final = 65536
_SPARSE_MODEL: Final = 1 << 20
_GIB: Final = 1 << 30
_KIB_A_GIB: Final = 1024.0
"""KiB of memory that registering one GiB may take."""

_PENDING_BLOCKS: Final = 4
_PENDING_BYTES: Final = 1024

_NODE_ID: Final = PEER_ID + 200
_LINK_BLOCKS: Final = 64
_LINK_BYTES: Final = 4096
_FILES: Final = 16
"""Open files of a process for each link, at most."""


@dataclass(frozen=True, slots=True)
class ScaleSizes:
    """How much is measured.

    Attributes
    ----------
    blocks : int
        In one transfer.
    sparse : int
        Bytes of the largest cache, of which few are touched.
    touched : int
        Blocks of 64 KiB of it that a transfer moves.
    pending : int
        Transfers at once.
    links : int
        Of one DataDist.
    repeat : int
        Rounds.
    """

    blocks: int
    sparse: int
    touched: int
    pending: int
    links: int
    repeat: int


async def measure_scale(
    session: Session, paths: Sequence[str], sizes: ScaleSizes, rows: Rows, progress: Progress
) -> None:
    """Measure for each path what grows with blocks, memory, transfers and links."""
    if "tcp" in paths:
        progress(f"scale: {sizes.pending:,} pending transfers")
        await _Pending(session, sizes, rows).measure()
    allowed = min(raise_files(), await session.peer.call("raise_files"))
    if allowed < _FILES * sizes.links:
        progress.note(f"{sizes.links} links are left out: the limit of open files is {allowed}, see `ulimit -Hn`")
    else:
        for number, transport in enumerate(dict.fromkeys(path.partition("-")[0] for path in paths)):
            progress(f"scale: {sizes.links} links over {transport}")
            over = [path for path in paths if path.partition("-")[0] == transport]
            # Later links live in the memory that the first ones left.
            await _Links(session, transport, over, sizes, rows).measure(memory=number == 0)
    for path in paths:
        progress(f"scale: {path}, {sizes.blocks:,} blocks")
        async with session.site(path, _BLOCK, sizes.blocks) as site:
            await _many_blocks(session, site, path, sizes, rows)
    progress(f"scale: a cache of {size_text(sizes.sparse)}")
    await _register_sparse(session, sizes, rows)
    for path in paths:
        if MEMORY[path] == "ordinary":
            progress(f"scale: {path}, in a cache of {size_text(sizes.sparse)}")
            await _pull_sparse(session, path, sizes, rows)


def _beside(what: str, samples: Sequence[float]) -> tuple[str, list[float]]:
    """Return the limit of a row: `_PART` times what an eighth took."""
    return f"{_PART} x {what}", [each * _PART for each in samples]


# Blocks. ----------------------------------------------------------------------------------------------------


async def _many_blocks(session: Session, site: Site, path: str, sizes: ScaleSizes, rows: Rows) -> None:
    """Move all blocks by one transfer, and the same blocks by many: no list is short enough for the cache."""

    def moved(direction: str, each: int) -> Callable[[], Awaitable[tuple[float, float]]]:
        caches = site.dd.cache_manager
        here, there = site.here.index, site.remote.index

        async def step() -> tuple[float, float]:
            submits, began = 0.0, perf_counter()
            for at in range(0, len(here), each):
                ours, theirs = here[at : at + each], there[at : at + each]
                before = perf_counter()
                if direction == "pull":
                    transfer = caches.pull_blocks(site.key, site.cache, theirs, ours)
                else:
                    transfer = caches.push_blocks(site.key, site.cache, ours, theirs)
                submits += perf_counter() - before
                await transfer
            return submits * 1e3, (perf_counter() - began) * 1e3

        return step

    site.here.clear()
    await site.move("pull")
    wrong = site.here.wrong(site.remote.index)
    await session.peer.call("clear", model_id=site.key.model_id)
    await site.move("push")
    wrong += await session.peer.call("wrong", model_id=site.key.model_id, first=0, count=len(site.here.index))
    if wrong:
        raise CommandError(f"{sizes.blocks:,} blocks over {path}: {wrong} are not what was sent")
    for direction in DIRECTIONS:
        steps = {"one": moved(direction, sizes.blocks), "many": moved(direction, _FEW)}
        found = await in_turn(steps, sizes.repeat)
        for number, what in enumerate(("submit", direction)):
            if number == 0 and direction == "push":
                continue  # as for pulls
            one, many = ([each[number] for each in found[name]] for name in ("one", "many"))
            rows.add(
                f"scale {what} of {sizes.blocks:,} blocks", path, _BLOCK, one, "ms", "lower",
                (f"in transfers of {_FEW:,}", many), _LINEAR,
            )  # fmt: skip


# Memory. ----------------------------------------------------------------------------------------------------


async def _register_sparse(session: Session, sizes: ScaleSizes, rows: Rows) -> None:
    """Register memory without touching it, all and an eighth."""
    dd = next(iter(session.nodes.values()))
    grown: list[float] = []

    def registered(nbytes: int) -> Callable[[], Awaitable[float]]:
        memory = sparse(nbytes, _SPARSE_BLOCK)

        async def step() -> float:
            before, began = resident(), perf_counter()
            cache = dd.cache_manager.register_blocks_cache([memory], remote=None)
            await cache.ready()
            took = perf_counter() - began
            if nbytes == sizes.sparse:
                grown.append(max(0, resident() - before) / 1024)
            await dd.cache_manager.unregister_cache(cache)
            return took * 1e3

        return step

    part = sizes.sparse // _PART
    found = await in_turn({"all": registered(sizes.sparse), "part": registered(part)}, sizes.repeat)
    beside = _beside(f"{part / _GIB:g} GiB", found["part"])
    what = f"registering {size_text(sizes.sparse)}"
    rows.add(f"scale {what}", "any", _SPARSE_BLOCK, found["all"], "ms", "lower", beside, _LINEAR)
    most = _KIB_A_GIB * sizes.sparse / _GIB
    rows.add(
        f"scale memory of {what}", "any", _SPARSE_BLOCK, grown, "KiB", "lower", ("1 MiB for each GiB", [most]), 1.0
    )


async def _pull_sparse(session: Session, path: str, sizes: ScaleSizes, rows: Rows) -> None:
    """Pull blocks that lie anywhere in the memory, and as many that lie in an eighth of it."""
    dd = session.nodes["tcp" if path == "tcp" else "shm"]
    blocks = sizes.sparse // _SPARSE_BLOCK
    key = adt.BlocksCacheKey(PEER_ID, _SPARSE_MODEL)
    lists: dict[str, tuple[Indices, Indices]] = {
        "all": (scattered(blocks, sizes.touched, 1), scattered(blocks, sizes.touched, 2)),
        "part": (scattered(blocks // _PART, sizes.touched, 3), scattered(blocks // _PART, sizes.touched, 4)),
    }
    filled = np.unique(np.concatenate([there for _, there in lists.values()])).tolist()
    await session.peer.call(
        "prepare_sparse", model_id=key.model_id, nbytes=sizes.sparse, block=_SPARSE_BLOCK, index=filled
    )
    memory = sparse(sizes.sparse, _SPARSE_BLOCK)
    cache = dd.cache_manager.register_blocks_cache([memory], remote=None)
    try:
        await session.announced(dd, key)

        def pulled(here: Indices, there: Indices) -> Callable[[], Awaitable[float]]:
            async def step() -> float:
                began = perf_counter()
                await dd.cache_manager.pull_blocks(key, cache, there, here)
                return (perf_counter() - began) * 1e3

            return step

        steps = {name: pulled(*pair) for name, pair in lists.items()}
        for name, (here, there) in lists.items():
            await steps[name]()
            if wrong := Half.of(memory, here).wrong(there):
                raise CommandError(f"pulls from a sparse cache over {path}: {wrong} blocks are not what was sent")
        found = await in_turn(steps, sizes.repeat)
    finally:
        await dd.cache_manager.unregister_cache(cache)
        await session.peer.call("forget", model_id=key.model_id)
    rows.add(
        f"scale pull of {sizes.touched:,} blocks across {size_text(sizes.sparse)}", path, _SPARSE_BLOCK, found["all"],
        "ms", "lower", (f"across {sizes.sparse / _PART / _GIB:g} GiB", found["part"]), _LINEAR,
    )  # fmt: skip


# Transfers. -------------------------------------------------------------------------------------------------


class _Pending:
    """Pulls from a process that is stopped, so that all are under way at once, and their end when it goes on."""

    def __init__(self, session: Session, sizes: ScaleSizes, rows: Rows) -> None:
        self._pid = session.peer.pid
        self._session = session
        self._sizes = sizes
        self._rows = rows

    async def measure(self) -> None:
        count, part = self._sizes.pending, self._sizes.pending // _PART
        async with self._session.site("tcp", _PENDING_BYTES, count * _PENDING_BLOCKS) as site:
            shape = count, _PENDING_BLOCKS
            self._pairs = list(zip(site.remote.index.reshape(shape), site.here.index.reshape(shape), strict=True))
            self._site = site
            memory = await self._memory(part)
            if wrong := site.here.wrong(site.remote.index):
                raise CommandError(f"pending pulls over tcp: {wrong} blocks are not what was sent")
            steps = {"all": self._timed(count), "part": self._timed(part)}
            found = await in_turn(steps, self._sizes.repeat)

        def add(what: str, samples: Sequence[float], unit: str, beside: tuple[str, Sequence[float]]) -> None:
            name = f"scale {what} {count:,} pending pulls"
            self._rows.add(name, "tcp", _PENDING_BYTES, samples, unit, "lower", beside, _LINEAR)

        for number, what in enumerate(("starting", "ending")):
            everything, some = ([each[number] for each in found[name]] for name in ("all", "part"))
            add(what, everything, "ms", _beside(f"{part:,}", some))
        # The first eighth lives in part in what was free before.
        add("memory of", [sum(memory)], "KiB", _beside(f"the second {part:,}", memory[1:2]))

    def _start(self, first: int, last: int) -> list[adt.Transfer[None]]:
        site = self._site
        pull = site.dd.cache_manager.pull_blocks
        return [pull(site.key, site.cache, there, here) for there, here in self._pairs[first:last]]

    @contextmanager
    def _stopped(self) -> Iterator[None]:
        os.kill(self._pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self._pid, signal.SIGCONT)

    async def _memory(self, part: int) -> list[float]:
        """Return the KiB that each eighth took."""
        gc.collect()
        pending: list[adt.Transfer[None]] = []
        with self._stopped():
            levels = [resident()]
            for first in range(0, len(self._pairs), part):
                pending += self._start(first, first + part)
                levels.append(resident())
            self._check(pending)
        await asyncio.gather(*pending)
        # Memory comes in pages and larger pieces.
        return [max(1, after - before) / 1024 for before, after in itertools.pairwise(levels)]

    def _timed(self, count: int) -> Callable[[], Awaitable[tuple[float, float]]]:
        async def step() -> tuple[float, float]:
            with self._stopped():
                began = perf_counter()
                pending = self._start(0, count)
                started = perf_counter()
                self._check(pending)
            resumed = perf_counter()
            await asyncio.gather(*pending)
            return (started - began) * 1e3, (perf_counter() - resumed) * 1e3

        return step

    @staticmethod
    def _check(pending: Sequence[adt.Transfer[None]]) -> None:
        if any(transfer.done() for transfer in pending):
            raise CommandError("a pull ended although the process that it pulls from is stopped")


# Links. -----------------------------------------------------------------------------------------------------


class _Links:
    """One DataDist linked to many of the passive process, and pulls over all links at once."""

    def __init__(self, session: Session, transport: str, paths: Sequence[str], sizes: ScaleSizes, rows: Rows) -> None:
        self._session = session
        self._transport = transport
        self._transports = ["shm", "tcp"] if transport == "shm" else [transport]
        self._paths = paths
        self._sizes = sizes
        self._rows = rows
        self._part = sizes.links // _PART

    async def measure(self, *, memory: bool) -> None:
        count, peer = self._sizes.links, self._session.peer
        addresses = await peer.call("open_others", count=count, transports=self._transports)
        self._peers = [adt.ClusterInfo(PEER_ID + 1000 + number, address) for number, address in enumerate(addresses)]
        try:
            async with adt.DataDist(_NODE_ID, adt.Role.DECODER, config=config(*self._transports)) as dd:
                self._dd = dd
                await self._linking(memory)
                for model_id, path in enumerate(self._paths):
                    await self._traffic(model_id, path)
        finally:
            await peer.call("close_others")

    def _add(
        self, what: str, path: str, samples: Sequence[float], unit: str, beside: tuple[str, Sequence[float]]
    ) -> None:
        name = f"scale {what} {self._sizes.links} links"
        self._rows.add(name, path, None, samples, unit, "lower", beside, _LINEAR)

    async def _linking(self, memory: bool) -> None:
        """Link eighth by eighth, and again; the links stay."""
        waves = [self._peers[at : at + self._part] for at in range(0, len(self._peers), self._part)]
        rounds = []
        for number in range(self._sizes.repeat):
            if number:
                await asyncio.gather(*(self._dd.unlink(peer) for peer in self._peers))
            rounds.append([await self._link(wave) for wave in waves])
        first = [waves[0] for waves in rounds]
        both = [tuple(map(sum, zip(*waves, strict=True))) for waves in rounds]
        if len(self._dd.links) != len(self._peers):
            raise CommandError(f"{len(self._dd.links)} of {len(self._peers)} links over {self._transport} are there")
        beside = _beside(f"the first {self._part}", [took for took, _ in first])
        self._add("making", self._transport, [took for took, _ in both], "ms", beside)
        if memory:
            # Of the first round: the later ones live in what it gave back.
            beside = _beside(f"the first {self._part}", [max(1, first[0][1])])
            self._add("memory of", self._transport, [both[0][1]], "KiB", beside)

    async def _link(self, peers: Sequence[adt.ClusterInfo]) -> tuple[float, float]:
        """Return milliseconds, and KiB of both sides."""
        before = await self._resident()
        began = perf_counter()
        await asyncio.gather(*(self._dd.link(peer) for peer in peers))
        took = perf_counter() - began
        return took * 1e3, (await self._resident() - before) / 1024

    async def _resident(self) -> int:
        gc.collect()
        return resident() + int(await self._session.peer.call("resident"))

    async def _traffic(self, model_id: int, path: str) -> None:
        """Pull as much, by as many transfers at once, over all links and over an eighth of them."""
        pool = POOL_FACTOR * _LINK_BLOCKS
        shape: dict[str, Any] = {"memory": MEMORY[path], "blocks": pool, "block": _LINK_BYTES}
        await self._session.peer.call("offer_from_others", model_id=model_id, **shape)
        keys = [adt.BlocksCacheKey(peer.cluster_id, model_id) for peer in self._peers]
        for key in keys:
            await self._session.announced(self._dd, key)
        count = len(keys)
        cache = allocate(self._dd, MEMORY[path], pool * count, _LINK_BYTES, 1, remote=None)
        await cache.ready()
        there = [scattered(pool, _LINK_BLOCKS, number) for number in range(count)]
        here = scattered(pool * count, _LINK_BLOCKS * count, count).reshape(count, _LINK_BLOCKS)

        def pulled(links: int) -> Callable[[], Awaitable[float]]:
            async def step() -> float:
                pull = self._dd.cache_manager.pull_blocks
                began = perf_counter()
                await asyncio.gather(
                    *(pull(keys[number % links], cache, there[number], here[number]) for number in range(count))
                )
                return (perf_counter() - began) * 1e3

            return step

        try:
            await pulled(count)()
            words = Half.of(cache.tensors[0], here[0]).words
            for number in range(count):
                before = number * pool * words.shape[1]
                if wrong := Half(words, here[number], before).wrong(there[number]):
                    raise CommandError(f"{count} links over {path}: {wrong} blocks of one are not what was sent")
            steps = {"all": pulled(count), "part": pulled(count // _PART)}
            for step in steps.values():
                await step()
            found = await in_turn(steps, 3 * self._sizes.repeat)
        finally:
            await self._dd.cache_manager.unregister_cache(cache)
        beside = f"as much over {count // _PART}", found["part"]
        self._add(f"{count} pulls at once over", path, found["all"], "ms", beside)
