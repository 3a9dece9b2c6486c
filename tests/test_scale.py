"""Many transfers, many blocks: what they cost grows with their number and no faster.

What is pending is held up by a peer process that is stopped. Costs are CPU time of the calling thread, as a ratio to
what numpy takes for one look at the same list, and memory; neither depends on how fast the machine is.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np
import pytest

import aiodatadist as adt
from aiodatadist import _core
from aiodatadist.commands.bench_peer import resident, sparse

from .pairs import OWNER, linked, pattern
from .peers import PeerProcess, spawn

KEY = adt.BlocksCacheKey(OWNER)
VALUE = 0x5A


def allocated() -> int:
    """Bytes that the C library's allocator has given out: to the engine, and to Python for what is large."""

    class Info(ctypes.Structure):
        # As mallinfo2 has them; single letters are not of interest.
        _fields_ = [(name, ctypes.c_size_t) for name in (*"abcd", "mapped", *"ef", "used", *"gh")]

    call = ctypes.CDLL(None).mallinfo2
    call.restype = Info
    info = call()
    return int(info.used + info.mapped)


@contextlib.contextmanager
def traced() -> Iterator[Callable[[], int]]:
    """Give the most bytes that Python's allocators have held at once since the last look."""
    tracemalloc.start()
    base = tracemalloc.get_traced_memory()[0]

    def peak() -> int:
        nonlocal base
        most = tracemalloc.get_traced_memory()[1] - base
        tracemalloc.reset_peak()
        base = tracemalloc.get_traced_memory()[0]
        return most

    try:
        yield peak
    finally:
        tracemalloc.stop()


@contextlib.asynccontextmanager
async def beside_a_peer(
    blocks: int, width: int, tensors: int = 1
) -> AsyncIterator[tuple[PeerProcess, adt.CacheManager, adt.Cache]]:
    """A peer process over tcp whose cache holds `VALUE` everywhere, and a cache here that fits it."""
    config = adt.Config(transports=("tcp",), drain_timeout=0.2, heartbeat_limit=120.0)
    async with (
        spawn(OWNER, transports=("tcp",), heartbeat_limit=120.0) as peer,
        adt.DataDist(2, config=config) as dd,
    ):
        await peer.cache("kv", tensors=tensors, shape=(blocks, width), value=VALUE)
        link = await dd.link(peer.info)
        while KEY not in link.table:
            await asyncio.sleep(0.001)
        mine = dd.cache_manager.register_blocks_cache([np.zeros((blocks, width), np.uint8) for _ in range(tensors)])
        await mine.ready()
        yield peer, dd.cache_manager, mine


@pytest.mark.loop
async def test_a_thousand_transfers_pending_at_once() -> None:
    number, blocks_each = 1000, 4
    blocks = number * blocks_each
    async with beside_a_peer(blocks, 1024) as (peer, manager, mine):
        dd = manager._dd
        order = np.random.default_rng(0).permutation(blocks).reshape(number, blocks_each)
        peer.stop()
        start = {True: manager.pull_blocks, False: manager.push_blocks}
        # Pushes carry the peer's own value, so that the order of the two does not matter.
        mine.tensors[0][order[1::2].ravel()] = VALUE
        pending: list[adt.Transfer[None]] = []
        used = []
        with traced() as peak:
            for quarter in np.split(np.arange(number), 4):
                pending += [start[i % 2 == 0](KEY, mine, order[i], order[i], timeout=None) for i in quarter]
                used.append(peak())
        assert not any(transfer.done() for transfer in pending)
        rows = dd.dump()
        assert len(rows) == number
        assert {row.state for row in rows} == {"moving"}
        assert dd.stats()["pending"] == number
        assert sum(row.bytes_total for row in rows) == blocks * 1024
        # The last hundreds cost as the first: nothing is kept or walked that grows with what is pending already.
        assert max(used) < 2 * min(used) + 65536, used
        # A loop in debug mode keeps the stack of each future's start.
        assert max(used) < number // 4 * (32768 if asyncio.get_running_loop().get_debug() else 2048), used
        cancelled = pending[::3]
        for transfer in cancelled:
            transfer.cancel()
        ends = await asyncio.gather(*cancelled, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ends)
        assert not any(transfer.done() for i, transfer in enumerate(pending) if i % 3)
        peer.resume()
        await asyncio.gather(*(transfer for i, transfer in enumerate(pending) if i % 3))
        for i in range(number):
            if i % 3:
                assert (mine.tensors[0][order[i]] == VALUE).all()
        while dd.dump():
            await asyncio.sleep(0.005)
        counts = dd.stats()["total"]
        assert (counts["cancelled"], counts["ok"], counts["pending"]) == (len(cancelled), number - len(cancelled), 0)
        assert dd.links[OWNER].error is None


async def test_ten_thousand_pending_transfers_cost_what_a_thousand_cost() -> None:
    """Each: the time of the loop's thread to start it, and the memory it holds while it is under way."""
    number, blocks_each, part = 10_000, 4, 1000
    blocks = number * blocks_each
    async with beside_a_peer(blocks, 64) as (peer, manager, mine):
        order = np.random.default_rng(0).permutation(blocks).reshape(number, blocks_each)
        peer.stop()
        pending: list[adt.Transfer[None]] = []
        took, used = [], []
        with traced() as peak:
            for each in np.split(order, number // part):
                before, began = allocated(), time.thread_time()
                pending += [manager.pull_blocks(KEY, mine, some, some, timeout=None) for some in each]
                took.append(time.thread_time() - began)
                used.append(peak() + allocated() - before)
        assert not any(transfer.done() for transfer in pending)
        assert manager._dd.stats()["pending"] == number
        # Of the later thousands the cheapest: other threads and the collector may come in the way of one or the other.
        assert min(took[5:]) < 2 * min(took[:5]), took
        assert sum(used[1:]) < 2 * (number // part - 1) * used[0], used
        peer.resume()
        await asyncio.gather(*pending)
        assert (mine.tensors[0] == VALUE).all()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_a_hundred_gib_of_sparse_memory_in_one_cache(transport: str) -> None:
    """Registering it touches none of it, and a transfer touches what it moves."""
    block, total, number = 65536, 100 << 30, 256
    gib = total >> 30
    async with linked(transport) as pair:
        memory = [sparse(total, block) for _ in range(2)]
        before = resident()
        await pair.offer(memory[:1])
        mine = await pair.take(memory[1:])
        assert resident() - before < gib << 20  # a thousandth of it
        random = np.random.default_rng(0)
        src, dst = (random.permutation(total // block - 1)[:number] for _ in range(2))
        src[3] = dst[5] = total // block - 1  # the last block, whose offset is the largest
        values = random.integers(1, 256, (number, block), np.uint8)
        memory[0][src] = values
        before = resident()
        await pair.user.cache_manager.pull_blocks(KEY, mine, src, dst, timeout=None)
        assert resident() - before < 4 * number * block
        np.testing.assert_array_equal(memory[1][dst], values)


@pytest.mark.loop
@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_twenty_pulls_on_one_link_at_once(transport: str) -> None:
    """They take turns: when the first is done, most have moved something; and all end well."""
    number, each = 20, 4096
    async with linked(transport) as pair:
        theirs = await pair.offer(pattern(1, (number * each, 64)))
        mine = await pair.take([np.zeros((number * each, 64), np.uint8) for _ in range(2)])
        order = np.random.default_rng(0).permutation(number * each).reshape(number, each)
        for _ in range(50):
            for tensor in mine.tensors:
                tensor[:] = 0
            pulls = [pair.user.cache_manager.pull_blocks(KEY, mine, part, part, timeout=None) for part in order]
            _ = await asyncio.wait(pulls, return_when=asyncio.FIRST_COMPLETED)
            moved = [pull.progress.bytes_done for pull in pulls]
            await asyncio.gather(*pulls)
            for here, there in zip(mine.tensors, theirs.tensors, strict=True):
                np.testing.assert_array_equal(here, there)
            # The first may be over before many have begun, if this thread had to wait for a processor.
            if sum(done > 0 for done in moved) > number // 2:
                break
        else:
            raise AssertionError("they never took turns")
        assert pair.link.epoch == 1


@pytest.mark.loop
@pytest.mark.parametrize("opcode", ["pull", "push"])
@pytest.mark.parametrize(("transport", "memory"), [("shm", "library"), ("shm", "ordinary"), ("tcp", "ordinary")])
async def test_a_million_blocks_in_one_transfer(transport: str, memory: str, opcode: str) -> None:
    blocks = 1 << 20
    values = np.arange(blocks, dtype=np.uint32)
    async with linked(transport) as pair:
        if memory == "library":
            theirs = await pair.allocate(adt.CacheDesc(1, (blocks,), "uint32"))
            theirs.tensors[0][:] = values
        else:
            theirs = await pair.offer([values.copy()])
        mine = await pair.take([values[::-1].copy()])
        manager = pair.user.cache_manager
        start = manager.pull_blocks if opcode == "pull" else manager.push_blocks
        there, here = np.random.default_rng(1).permutation(blocks), np.arange(blocks)
        src, dst = (there, here) if opcode == "pull" else (here, there)
        transfer = start(KEY, mine, src, dst, timeout=None)
        await transfer
        assert transfer.progress == (4 * blocks, 4 * blocks)
        np.testing.assert_array_equal(mine.tensors[0], theirs.tensors[0][there])


async def test_memory_of_a_transfer_grows_with_its_blocks() -> None:
    """While it is pending: some tens of bytes for each block, none of them Python's."""
    few, many = 1 << 18, 1 << 20
    async with beside_a_peer(many, 8) as (peer, manager, mine):
        peer.stop()
        order = np.random.default_rng(0).permutation(many)
        grown, pending = [], []
        with traced() as peak:
            for number in (few, many):
                blocks = order[:number]
                before = allocated()
                _ = peak()
                pending.append(manager.pull_blocks(KEY, mine, blocks, blocks, timeout=None))
                assert peak() < 65536
                grown.append(allocated() - before)
        assert not any(transfer.done() for transfer in pending)
        assert 24 * few < grown[0] < 100 * few, grown
        assert 24 * many < grown[1] < 100 * many, grown
        for transfer in pending:
            transfer.cancel()
        peer.resume()
        await asyncio.gather(*pending, return_exceptions=True)


def cpu_seconds(call: Callable[[], Any], repeats: int = 15) -> float:
    """Least CPU time of this thread for a call."""
    least = float("inf")
    for _ in range(repeats):
        began = time.thread_time()
        call()
        least = min(least, time.thread_time() - began)
    return least


@pytest.mark.skipif(_core.debug, reason="a debug build has no speed to speak of")
@pytest.mark.parametrize("form", ["list", "array"])
@pytest.mark.parametrize("way", ["shm", "tcp", "copy"])
async def test_e3_starting_a_transfer_of_many_blocks_is_cheap(way: str, form: str) -> None:
    """Of the order of one conversion of the lists, which is how long the loop is held up."""
    blocks = 10_000
    order = np.random.default_rng(0).permutation(2 * blocks)
    src, dst = (list(map(int, part)) if form == "list" else part for part in (order[:blocks], order[blocks:]))
    async with linked("tcp" if way == "tcp" else "shm") as pair:
        await pair.offer(pattern(1, (2 * blocks, 64), tensors=8))
        mine = await pair.take(pattern(2, (2 * blocks, 64), tensors=8))
        manager = pair.user.cache_manager
        pairs = np.stack([order[:blocks], order[blocks:]], 1)
        # One conversion of a list of Python's integers, which is what a list costs at the least.
        values = list(map(int, order[:blocks]))
        unit = 2 * cpu_seconds(lambda: np.array(values, np.int64))
        costs = []
        for _ in range(15):
            began = time.thread_time()
            if way == "copy":
                transfer = manager.copy_blocks(mine, pairs, timeout=None)
            else:
                transfer = manager.pull_blocks(KEY, mine, src, dst, timeout=None)
            costs.append(time.thread_time() - began)
            await transfer
        assert min(costs) < 5 * unit, (min(costs), unit)


async def test_e4_no_python_object_and_no_descriptor_for_each_block_of_each_tensor() -> None:
    """6.5 million pieces: what a transfer holds grows with its blocks alone, and Python holds none of it."""
    blocks, tensors = 65_000, 100
    async with linked("shm") as pair:
        theirs = await pair.allocate(adt.CacheDesc(tensors, (blocks, 1), "uint8"))
        for i, tensor in enumerate(theirs.tensors):
            tensor[:, 0] = np.resize(np.arange(i, i + 251, dtype=np.uint8), blocks)
        mine = await pair.take([np.ones((blocks, 1), np.uint8) for _ in range(tensors)])
        src = np.random.default_rng(1).permutation(blocks)
        dst = np.random.default_rng(2).permutation(blocks)
        with traced() as peak:
            before = allocated()
            _ = peak()
            transfer = pair.user.cache_manager.pull_blocks(KEY, mine, src, dst, timeout=None)
            assert peak() < 65536
            grown = allocated() - before
        await transfer
        assert transfer.progress.bytes_done == blocks * tensors
        # A descriptor of 24 bytes for each piece would be 156 MB.
        assert grown < 100 * blocks + (8 << 20), grown
        for here, there in zip(mine.tensors, theirs.tensors, strict=True):
            np.testing.assert_array_equal(here[dst], there[src])
