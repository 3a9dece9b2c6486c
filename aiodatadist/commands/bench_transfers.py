"""`bench bandwidth`, `latency`, `completions`, `submit`: transfers between two processes, beside raw moves."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter, perf_counter_ns
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

import aiodatadist as adt

from .bench_blocking import blocking_pulls, handed_over_pulls
from .bench_memory import PEER_ID, Half, Remote, scattered
from .bench_peer import Peer, allocate, config
from .bench_rows import Progress, Rows, in_turn, size_text
from .failure import CommandError

__all__ = ["DIRECTIONS", "MEMORY", "PATHS", "POOL_FACTOR", "Direction", "Scale", "Session", "Site", "Window"]

PATHS: Final = ("shm-mapped", "shm-process_vm", "tcp")
MEMORY: Final = {"shm-mapped": "library", "shm-process_vm": "ordinary", "tcp": "ordinary"}
"""The memory that travels each path."""

POOL_FACTOR: Final = 2
"""Pools are that many times as large as what moves: blocks are scattered with gaps."""
_STREAMS: Final = 2
_TASKS: Final = 64
_SUBMIT_BLOCKS: Final = 10_000
_SUBMIT_TENSORS: Final = 64
_SUBMIT_BYTES: Final = 64
"""Bytes of a block: small, so that what follows each submit is over soon."""
_SUBMITS: Final = 5
_COLD_READS: Final = 2 * _SUBMIT_BLOCKS
"""As many numbers as a submit reads, in places that no cache holds: how slow memory was in that minute."""
_RUN: Final = 10_000
"""Neighbouring blocks that should cost what one copy costs."""

# What ratios should reach on a quiet machine.
_BANDWIDTH_TARGET: Final = 0.9
_RUN_TARGET: Final = 1.1
_LATENCY_BLOCK: Final = 4096
_LATENCY_ALLOWANCE: Final = {"shm-mapped": 1.5, "shm-process_vm": 2.0}
"""Microseconds that the await of one block of that size may take above its limit."""
_LATENCY_TCP_TARGET: Final = 1.3
_COMPLETIONS_TARGETS: Final = {
    "asyncio": {"64 tasks": 0.35, "gather of 64": 0.20},
    "uvloop": {"64 tasks": 0.35, "gather of 64": 0.25},
}
_SUBMIT_MICROS: Final = 150.0

_ANNOUNCE_SECONDS: Final = 30.0

Direction = Literal["pull", "push"]
DIRECTIONS: Final[tuple[Direction, ...]] = ("pull", "push")
Seconds = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured.

    Attributes
    ----------
    nbytes : int
        Bytes that one measurement of bandwidth moves.
    repeat : int
        Rounds.
    samples : int
        Single transfers a round, at most.
    """

    nbytes: int
    repeat: int
    samples: int

    def count(self, block: int) -> int:
        """Return how many blocks of this size move."""
        return max(1, self.nbytes // block)


@dataclass(frozen=True, slots=True)
class Site:
    """Caches of one shape in both processes, and the blocks that move between them.

    Attributes
    ----------
    dd : DataDist
        Of this process, with its link.
    key : BlocksCacheKey
        The peer's cache.
    cache : Cache
        Of this process.
    here : Half
        Its first tensor.
    there : array of int64
        The peer's blocks, in the order of ``here.index``.
    remote : Remote
        The same for the raw limits.
    """

    dd: adt.DataDist
    key: adt.BlocksCacheKey
    cache: adt.Cache
    here: Half
    remote: Remote

    def move(self, direction: Direction) -> adt.Transfer[None]:
        """Start the transfer of all blocks that take part."""
        caches = self.dd.cache_manager
        if direction == "pull":
            return caches.pull_blocks(self.key, self.cache, self.remote.index, self.here.index)
        return caches.push_blocks(self.key, self.cache, self.here.index, self.remote.index)


class Window:
    """A part of the blocks that moves on, so that each step gets blocks which were not touched for a while.

    Attributes
    ----------
    first, count : int
    """

    def __init__(self, total: int, count: int) -> None:
        self.first = 0
        self.count = count
        self._starts = (start % (total - count + 1) for start in itertools.count(0, count))

    def advance(self) -> int:
        """Move on; return the new `first`."""
        self.first = next(self._starts)
        return self.first


class Session:
    """Two processes with links over both transports, and what can be measured between them.

    Parameters
    ----------
    peer : Peer
    nodes : dict
        The DataDist of this process for each transport, linked.
    raw : list of socket
        Plain TCP connections.
    scale : Scale
    rows : Rows
    progress : Progress
    """

    def __init__(
        self,
        peer: Peer,
        nodes: dict[str, adt.DataDist],
        raw: list[socket.socket],
        scale: Scale,
        rows: Rows,
        progress: Progress,
    ) -> None:
        self.peer = peer
        self.nodes = nodes
        self._raw = raw
        self._scale = scale
        self._rows = rows
        self._progress = progress
        self._models = itertools.count(1)
        self._verified: set[tuple[str, str]] = set()  # limits, by path

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, scale: Scale, rows: Rows, progress: Progress) -> AsyncIterator[Session]:
        """Start the passive process and link it."""
        async with contextlib.AsyncExitStack() as stack:
            peer = await stack.enter_async_context(Peer.start())
            raw = [stack.enter_context(sock) for sock in await peer.connect_raw(_STREAMS)]
            nodes = {}
            for number, transports in enumerate((("shm", "tcp"), ("tcp",))):
                dd = adt.DataDist(PEER_ID + 1 + number, adt.Role.DECODER, config=config(*transports))
                nodes[transports[0]] = await stack.enter_async_context(dd)
                await dd.link(adt.ClusterInfo(PEER_ID, peer.address))
            yield cls(peer, nodes, raw, scale, rows, progress)

    # Caches. -------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def site(self, path: str, block: int, count: int, blocks: int = 0, tensors: int = 1) -> AsyncIterator[Site]:
        """Have caches of `blocks` blocks in both processes around the body; `count` blocks take part, scattered."""
        blocks = blocks or POOL_FACTOR * count
        dd = self.nodes["tcp" if path == "tcp" else "shm"]
        key = adt.BlocksCacheKey(PEER_ID, next(self._models))
        shape: dict[str, Any] = {"memory": MEMORY[path], "blocks": blocks, "block": block, "tensors": tensors}
        address = await self.peer.call("prepare", model_id=key.model_id, taking_part=count, **shape)
        cache = allocate(dd, **shape, remote=None)
        try:
            await cache.ready()
            await self.announced(dd, key)
            here = Half.of(cache.tensors[0], scattered(blocks, count, -key.model_id & 0xFFFF))
            yield Site(dd, key, cache, here, Remote(self.peer.pid, address, scattered(blocks, count, key.model_id)))
        finally:
            await dd.cache_manager.unregister_cache(cache)
            await self.peer.call("forget", model_id=key.model_id)

    @staticmethod
    async def announced(dd: adt.DataDist, key: adt.BlocksCacheKey) -> None:
        """Wait until the peer's cache is known here."""
        events = dd.events()
        async with asyncio.timeout(_ANNOUNCE_SECONDS):
            while key not in dd.links[key.cluster_id].table:
                await anext(events)

    async def reached(self, path: str) -> str:
        """Return why a path cannot be measured here, or an empty string."""
        if path not in PATHS:
            return f"there is no path {path}"
        async with self.site(path, 4096, 1) as site:
            link = site.dd.links[PEER_ID]
            entry = link.table[site.key]
            found = entry.native.path if entry.native is not None else "unreachable"
            why = entry.native.reasons if entry.native is not None else str(entry.error)
            return "" if found == path else f"it is {found} here: {why or link.path}"

    # Moving and checking. ------------------------------------------------------------------------------------

    async def _verify(
        self,
        site: Site,
        what: str,
        path: str,
        step: Callable[[], Awaitable[Any]],
        pull: bool,
        window: Window | None = None,
    ) -> None:
        """Run a step once, which also warms up, and look at every block that it moved.

        A push must come after a pull of all blocks: what it sends came with that, and goes back to where it was.
        """
        if pull:
            site.here.clear()
        else:
            await self.peer.call("clear", model_id=site.key.model_id)
        await step()
        first, count = (window.first, window.count) if window else (0, len(site.here.index))
        if pull:
            wrong = site.here.part(first, count).wrong(site.remote.index[first : first + count])
        else:
            wrong = await self.peer.call("wrong", model_id=site.key.model_id, first=first, count=count)
        if wrong:
            raise CommandError(
                f"{what} over {path} with blocks of {size_text(site.here.block)}: {wrong} of {count} blocks are not "
                "what was sent"
            )

    async def _raw_limit(self, site: Site, direction: Direction, streams: int) -> float:
        """Move the blocks over plain sockets; return the seconds."""
        sends = direction == "push"
        await self.peer.call("serve_raw", model_id=site.key.model_id, sends=not sends, streams=streams)
        took = site.here.sockets([sock.fileno() for sock in self._raw[:streams]], sends=sends, asks=True)
        await self.peer.call("served_raw")
        return took

    async def _raw_each(self, site: Site, direction: Direction, first: int, count: int) -> Seconds:
        """Move blocks over a plain socket one by one; return the seconds of each."""
        sends = direction == "push"
        await self.peer.call("serve_raw", model_id=site.key.model_id, sends=not sends, first=first, count=count)
        took = site.here.part(first, count).socket_each(self._raw[0].fileno(), sends=sends, asks=True)
        await self.peer.call("served_raw")
        return took

    # Bandwidth. ----------------------------------------------------------------------------------------------

    async def bandwidth(self, paths: Sequence[str], blocks: Sequence[int]) -> None:
        """Measure pulls and pushes of scattered blocks, and pulls of neighbouring ones."""
        for block in blocks:
            for path in paths:
                self._progress(f"bandwidth: {path}, blocks of {size_text(block)}")
                await self._bandwidth(path, block)
        for path in paths:
            self._progress(f"bandwidth: {path}, neighbouring blocks")
            await self._runs(path, min(blocks))

    async def _bandwidth(self, path: str, block: int) -> None:
        async with self.site(path, block, self._scale.count(block)) as site, self._copies(path, site) as copies:
            steps: dict[str, Callable[[], Awaitable[float]]] = {}
            limits: dict[Direction, list[str]] = {"pull": [], "push": []}  # all raw ways
            held: dict[Direction, list[str]] = {"pull": [], "push": []}  # those that the library is held against

            def limit(
                name: str, directions: Sequence[Direction], step: Callable[[], Awaitable[float]], counts: bool
            ) -> None:
                steps[name] = step
                for direction in directions:
                    limits[direction].append(name)
                    if counts:
                        held[direction].append(name)

            for name, step in copies.items():
                limit(name, ("pull", "push"), step, name.startswith("NT copy"))
            if path == "shm-process_vm":
                for direction, threads, iovecs in itertools.product(DIRECTIONS, (1, 2), (1, 1024)):
                    name = f"{_VM_CALLS[direction]}, {_counted(threads, 'thread')}, {_counted(iovecs, 'iovec')}"
                    limit(name, (direction,), _process_vm(site, direction, threads, iovecs), threads * iovecs == 2048)
            if path == "tcp":
                for direction, streams in itertools.product(DIRECTIONS, range(1, _STREAMS + 1)):
                    name = f"raw sockets, {_counted(streams, 'stream')}, {direction}"
                    limit(name, (direction,), _bound(self._raw_limit, site, direction, streams), streams == _STREAMS)
            for direction in DIRECTIONS:
                steps[direction] = _timed_move(site, direction)
            pushes = {"push", *limits["push"]} - set(limits["pull"])
            # Pulls first: what is pushed back came with them.
            for name in sorted(steps, key=lambda name: name in pushes):
                if name in DIRECTIONS or (path, name) not in self._verified:
                    await self._verify(site, name, path, steps[name], name not in pushes)
                    self._verified.add((path, name))
            seconds = await in_turn(steps, self._scale.repeat)
            speeds = {name: [site.here.nbytes / took / 1e9 for took in found] for name, found in seconds.items()}
            for name in steps:
                if name not in DIRECTIONS:
                    self._rows.add("bandwidth limit", name, block, speeds[name], "GB/s", "higher")
            for direction in DIRECTIONS:
                best = max(held[direction], key=lambda name: float(np.median(speeds[name])))
                self._rows.add(
                    f"bandwidth {direction}", path, block, speeds[direction], "GB/s", "higher",
                    (best, speeds[best]), _BANDWIDTH_TARGET,
                )  # fmt: skip

    @contextlib.asynccontextmanager
    async def _copies(self, path: str, site: Site) -> AsyncIterator[dict[str, Callable[[], Awaitable[float]]]]:
        """Have a second pool in this process for the raw copies of the mapped path; empty for other paths."""
        if path != "shm-mapped":
            yield {}
            return
        async with self._second(site) as source:
            ways: tuple[tuple[str, int, Literal["memcpy", "stream", "stream-prefetch"]], ...] = (
                ("memcpy, 1 thread", 1, "memcpy"),
                ("memcpy, 2 threads", 2, "memcpy"),
                ("NT copy, 2 threads", 2, "stream"),
                ("NT copy with prefetch, 2 threads", 2, "stream-prefetch"),
            )
            yield {name: _copy(site.here, source, threads, loop) for name, threads, loop in ways}

    @contextlib.asynccontextmanager
    async def _second(self, site: Site) -> AsyncIterator[Half]:
        """Have a pool in this process that holds what the peer's holds, in the same kind of memory."""
        blocks, block = site.cache.geometry.num_blocks, site.here.block
        cache = allocate(site.dd, "library", blocks, block, 1, remote=None)
        try:
            await cache.ready()
            source = Half.of(cache.tensors[0], site.remote.index)
            source.fill()
            yield source
        finally:
            await site.dd.cache_manager.unregister_cache(cache)

    async def _runs(self, path: str, block: int) -> None:
        count = min(_RUN, self._scale.count(block))
        async with self.site(path, block, count, count) as small, self.site(path, block * count, 1, 1) as large:
            order = np.arange(count)

            def pull(site: Site, blocks: Any) -> Callable[[], Awaitable[float]]:
                async def step() -> float:
                    began = perf_counter()
                    await site.dd.cache_manager.pull_blocks(site.key, site.cache, blocks, blocks)
                    return perf_counter() - began

                return step

            steps = {"blocks": pull(small, order), "one": pull(large, [0])}
            for step in steps.values():
                await step()
            if not np.array_equal(small.here.words.reshape(-1), large.here.words.reshape(-1)):
                raise CommandError(f"neighbouring blocks over {path} are not what was sent")
            found = await in_turn(steps, self._scale.repeat * 3)
        millis = {name: [took * 1e3 for took in samples] for name, samples in found.items()}
        self._rows.add(
            f"bandwidth pull of {count:,} neighbours", path, block, millis["blocks"], "ms", "lower",
            (f"one block of {count * block:,} bytes", millis["one"]), _RUN_TARGET,
        )  # fmt: skip

    # Latency. ------------------------------------------------------------------------------------------------

    async def latency(self, paths: Sequence[str], blocks: Sequence[int]) -> None:
        """Measure awaited transfers of one block, one at a time."""
        for block in blocks:
            for path in paths:
                self._progress(f"latency: {path}, one block of {size_text(block)}")
                async with self.site(path, block, self._scale.count(block)) as site:
                    await self._latency(path, site)
        # The drop-in takes its transports from the environment: over shm wherever that works.
        for path in (path for path in paths if path != "tcp"):
            block = min(blocks)
            self._progress(f"latency: {path}, blocking calls, one block of {size_text(block)}")
            async with self.site(path, block, self._scale.count(block)) as site:
                await self._blocking(path, site)

    def _raw_step(self, site: Site, direction: Direction, window: Window) -> Callable[[], Awaitable[Seconds]]:
        async def step() -> Seconds:
            return await self._raw_each(site, direction, window.advance(), window.count)

        return step

    async def _latency(self, path: str, site: Site) -> None:
        count = min(self._scale.samples, len(site.here.index))
        window = Window(len(site.here.index), count)
        async with contextlib.AsyncExitStack() as stack:
            steps: dict[str, Callable[[], Awaitable[Seconds]]] = {}
            limits: dict[Direction, str] = {}
            if path == "shm-mapped":
                source = await stack.enter_async_context(self._second(site))

                async def copy() -> Seconds:
                    first = window.advance()
                    return site.here.part(first, count).copy_each(source.part(first, count))

                steps["memcpy"] = copy
                limits = {"pull": "memcpy", "push": "memcpy"}
            for direction in DIRECTIONS:
                if path == "shm-process_vm":
                    limits[direction] = _VM_CALLS[direction]
                    steps[limits[direction]] = _process_vm_each(site, direction, window)
                elif path == "tcp":
                    limits[direction] = f"raw socket round trip, {direction}"
                    steps[limits[direction]] = self._raw_step(site, direction, window)
                steps[direction] = _timed_each(site, direction, window)
            pushes = {"push", limits["push"]} - {limits["pull"]}
            for name in steps:
                if name not in pushes:
                    await self._verify(site, name, path, steps[name], True, window)
            # All blocks once: they are what is pushed, and no page is new.
            await self._verify(site, "pull", path, _timed_move(site, "pull"), True)
            for name in pushes:
                await self._verify(site, name, path, steps[name], False, window)
            # The pushes cleared more than they sent.
            await self._verify(site, "push", path, _timed_move(site, "push"), False)
            found = await in_turn(steps, self._scale.repeat)
        for percent in (50, 99):
            micros = {
                name: [float(np.percentile(each, percent)) * 1e6 for each in rounds] for name, rounds in found.items()
            }
            for direction in DIRECTIONS:
                limit = limits[direction], micros[limits[direction]]
                target = None
                if (direction, percent, site.here.block) == ("pull", 50, _LATENCY_BLOCK):
                    target = _latency_target(path, float(np.median(limit[1])))
                name = f"latency {direction} p{percent}"
                self._rows.add(name, path, site.here.block, micros[direction], "us", "lower", limit, target)

    async def _blocking(self, path: str, site: Site) -> None:
        """Measure blocking calls of the drop-in in a thread, beside the await with a wake-up before and behind it."""
        count = min(self._scale.samples, len(site.here.index))
        by_hand = handed_over_pulls(site, count, asyncio.get_running_loop())
        # This loop serves both meanwhile: opening and closing block, too.
        pulls = blocking_pulls(site, self.peer.address, count)
        pull = await asyncio.to_thread(pulls.__enter__)
        try:
            steps = {"by hand": partial(asyncio.to_thread, by_hand), "blocking": partial(asyncio.to_thread, pull)}
            found = await in_turn(steps, self._scale.repeat)
        finally:
            await asyncio.to_thread(pulls.__exit__, None, None, None)
        micros = {name: [float(np.median(each)) * 1e6 for each in rounds] for name, rounds in found.items()}
        self._rows.add(
            "latency blocking pull p50", path, site.here.block, micros["blocking"], "us", "lower",
            ("await between two thread wake-ups", micros["by hand"]),
        )  # fmt: skip

    # Completions. --------------------------------------------------------------------------------------------

    async def completions(self, paths: Sequence[str], blocks: Sequence[int], loop: str) -> None:
        """Measure awaited transfers per second on the event loop that runs, whose name is `loop`."""
        for block in blocks:
            for path in paths:
                self._progress(f"completions: {path}, blocks of {size_text(block)}, {loop}")
                async with self.site(path, block, self._scale.count(block)) as site:
                    await self._completions(path, site, loop)

    async def _completions(self, path: str, site: Site, loop: str) -> None:
        count = min(self._scale.samples * (1 if path == "tcp" else 8), len(site.here.index))
        # Lists of one block, as a scheduler has them.
        pairs = [([int(there)], [int(here)]) for there, here in zip(site.remote.index, site.here.index, strict=True)]
        pull = site.dd.cache_manager.pull_blocks
        key, cache = site.key, site.cache

        async def some(part: Sequence[tuple[list[int], list[int]]]) -> None:
            for there, here in part:
                await pull(key, cache, there, here)

        async def tasks() -> float:
            parts = [pairs[i:count:_TASKS] for i in range(_TASKS)]
            began = perf_counter()
            async with asyncio.TaskGroup() as group:
                for part in parts:
                    group.create_task(some(part))
            return count / (perf_counter() - began)

        async def gathered() -> float:
            began = perf_counter()
            for at in range(0, count, _TASKS):
                await asyncio.gather(
                    *(pull(key, cache, there, here) for there, here in pairs[at : min(at + _TASKS, count)])
                )
            return count / (perf_counter() - began)

        async with contextlib.AsyncExitStack() as stack:
            if path == "shm-mapped":
                source = await stack.enter_async_context(self._second(site))
                whole = _copy(site.here, source, 1, "memcpy")
                limit = "memcpy, 1 thread"
            elif path == "shm-process_vm":
                whole = _process_vm(site, "pull", 1, 1)
                limit = "process_vm_readv, 1 thread, 1 iovec"
            else:
                limit = "raw socket round trips, 1 stream"

            async def raw() -> float:
                if path == "tcp":
                    return 1 / float(np.mean(await self._raw_each(site, "pull", 0, count)))
                return len(site.here.index) / await whole()

            steps = {"64 tasks": tasks, "gather of 64": gathered, limit: raw}
            await self._verify(site, "pull", path, _timed_move(site, "pull"), True)
            site.here.words[site.here.index[:count]] = 0
            await tasks()
            if wrong := site.here.wrong(site.remote.index):
                raise CommandError(f"{_TASKS} tasks over {path}: {wrong} blocks are not what was sent")
            await gathered()
            found = await in_turn(steps, self._scale.repeat)
        for name, target in _COMPLETIONS_TARGETS[loop].items():
            self._rows.add(
                f"completions {name}, {loop}", path, site.here.block, found[name], "1/s", "higher",
                (limit, found[limit]), target if path != "tcp" and site.here.block == _LATENCY_BLOCK else None,
            )  # fmt: skip

    # Submit. -------------------------------------------------------------------------------------------------

    async def submit(self, paths: Sequence[str]) -> None:
        """Measure what starting a transfer of many blocks takes from the loop's thread."""
        for path in paths:
            self._progress(f"submit: {path}")
            await self._submit(path)

    async def _submit(self, path: str) -> None:
        blocks = POOL_FACTOR * _SUBMIT_BLOCKS
        shape = _SUBMIT_BYTES, _SUBMIT_BLOCKS, blocks
        async with self.site(path, *shape, _SUBMIT_TENSORS) as many, self.site(path, *shape) as one:

            def submit(site: Site, source: Any, target: Any) -> Callable[[], Awaitable[float]]:
                async def step() -> float:
                    took = []
                    for _ in range(_SUBMITS):
                        began = perf_counter()
                        transfer = site.dd.cache_manager.pull_blocks(site.key, site.cache, source, target)
                        took.append(perf_counter() - began)
                        await transfer
                    return float(np.median(took)) * 1e6

                return step

            steps = {}
            for site, tensors in ((many, f"{_SUBMIT_TENSORS} tensors"), (one, "1 tensor")):
                there, here = site.remote.index, site.here.index
                steps[f"{tensors}, arrays"] = submit(site, there, here)
                steps[f"{tensors}, lists"] = submit(site, there.tolist(), here.tolist())
                await self._verify(site, "submit", path, steps[f"{tensors}, lists"], True)
                await self._verify(site, "submit", path, steps[f"{tensors}, arrays"], True)
            steps["cold"] = _cold_reads(self._scale.nbytes)
            found = await in_turn(steps, self._scale.repeat)
        self._rows.add(f"submit reading {_COLD_READS:,} cold numbers", path, None, found.pop("cold"), "us", "lower")
        limit = f"{_SUBMIT_MICROS / 1e3} ms", [_SUBMIT_MICROS]
        for name, micros in found.items():
            name = f"submit {_SUBMIT_BLOCKS:,} blocks x {name}"
            self._rows.add(name, path, _SUBMIT_BYTES, micros, "us", "lower", limit, 1.0)


# Steps. -----------------------------------------------------------------------------------------------------

_VM_CALLS: Final = {"pull": "process_vm_readv", "push": "process_vm_writev"}


def _latency_target(path: str, limit: float) -> float:
    """Return the ratio that the await of one small block should keep, beside a limit in microseconds."""
    return _LATENCY_TCP_TARGET if path == "tcp" else 1 + _LATENCY_ALLOWANCE[path] / limit


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count > 1)}"


def _bound(function: Callable[..., Awaitable[Any]], *arguments: Any) -> Callable[[], Awaitable[Any]]:
    async def step() -> Any:
        return await function(*arguments)

    return step


def _cold_reads(nbytes: int) -> Callable[[], Awaitable[float]]:
    """Read numbers all over memory of this size; return the microseconds."""
    numbers = np.arange(nbytes // 8)
    random = np.random.default_rng(0)

    async def step() -> float:
        took = []
        for _ in range(_SUBMITS):
            places = random.integers(len(numbers), size=_COLD_READS)  # new ones: those before are in a cache
            began = perf_counter()
            numbers.take(places)
            took.append(perf_counter() - began)
        return float(np.median(took)) * 1e6

    return step


def _copy(
    to: Half, source: Half, threads: int, loop: Literal["memcpy", "stream", "stream-prefetch"]
) -> Callable[[], Awaitable[float]]:
    async def step() -> float:
        return to.copy(source, threads, loop)

    return step


def _process_vm(site: Site, direction: Direction, threads: int, iovecs: int) -> Callable[[], Awaitable[float]]:
    async def step() -> float:
        return site.here.process_vm(site.remote, threads, iovecs, write=direction == "push")

    return step


def _process_vm_each(site: Site, direction: Direction, window: Window) -> Callable[[], Awaitable[Seconds]]:
    async def step() -> Seconds:
        first = window.advance()
        here, there = site.here.part(first, window.count), site.remote.part(first, window.count)
        return here.process_vm_each(there, write=direction == "push")

    return step


def _timed_move(site: Site, direction: Direction) -> Callable[[], Awaitable[float]]:
    async def step() -> float:
        began = perf_counter()
        await site.move(direction)
        return perf_counter() - began

    return step


def _timed_each(site: Site, direction: Direction, window: Window) -> Callable[[], Awaitable[Seconds]]:
    """Await one block after the other. Like the raw loops: the clock is read around each."""
    caches, key, cache = site.dd.cache_manager, site.key, site.cache

    def lists() -> Iterator[tuple[list[int], list[int]]]:
        part = slice(first := window.advance(), first + window.count)
        here, there = site.here.index[part].tolist(), site.remote.index[part].tolist()
        return zip([[block] for block in there], [[block] for block in here], strict=True)

    async def pull() -> Seconds:
        took = []
        for source, target in lists():
            began = perf_counter_ns()
            await caches.pull_blocks(key, cache, source, target)
            took.append(perf_counter_ns() - began)
        return np.array(took) * 1e-9

    async def push() -> Seconds:
        took = []
        for there, here in lists():
            began = perf_counter_ns()
            await caches.push_blocks(key, cache, here, there)
            took.append(perf_counter_ns() - began)
        return np.array(took) * 1e-9

    return pull if direction == "pull" else push
