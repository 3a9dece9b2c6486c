"""The transport hixl over the STAND-IN for HIXL: NPU memory, HIXL's rules, and what HIXL can do to a transfer."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiodatadist as adt

from .hixl_standin import Acl, Controls
from .layer_pairs import LAYERS, SRC, both, layers_there, push
from .pairs import OWNER, USER, Pair, linked, pattern
from .peers import PeerProcess, spawn
from .waiting import PATIENCE, until

pytestmark = [pytest.mark.hixl, pytest.mark.loop, pytest.mark.sanitize]

KEY = adt.BlocksCacheKey(OWNER)
BLOCKS, BLOCK_BYTES = 16, 4096
WHOLE = list(range(BLOCKS))
STALE = 0xEE  # what the stand-in writes for a request that was given up
LINK_ENDED = (adt.PeerLostError, adt.ClosedError, adt.NotLinkedError)


@pytest.fixture(scope="module")
def acl() -> Acl:
    return Acl()


class OnNpu:
    """Tensors in the memory of the stand-in's NPU, which the host cannot touch, and the cache over them."""

    def __init__(self, acl: Acl, tensors: int = 2) -> None:
        self.acl = acl
        acl.set_device()
        self.addresses = [acl.malloc(BLOCKS * BLOCK_BYTES) for _ in range(tensors)]
        self.desc = adt.CacheDesc(tensors, (BLOCKS, BLOCK_BYTES), "uint8", placement=adt.Placement.DEVICE)

    async def register(self, dd: adt.DataDist, **options: Any) -> adt.Cache:
        cache = dd.cache_manager.register_blocks_cache(self.addresses, desc=self.desc, **options)
        assert cache.placement is adt.Placement.DEVICE
        return await cache.ready() or cache

    def fill(self, *values: int) -> None:
        """Fill each tensor with its byte, or all with one."""
        for address, value in zip(self.addresses, itertools.cycle(values)):
            self.acl.write(address, bytes([value]) * (BLOCKS * BLOCK_BYTES))

    def rows(self) -> list[np.ndarray[Any, np.dtype[np.uint8]]]:
        """Return a copy of the tensors, a row for each block."""
        read = [self.acl.read(address, BLOCKS * BLOCK_BYTES) for address in self.addresses]
        return [np.frombuffer(content, np.uint8).reshape(BLOCKS, BLOCK_BYTES) for content in read]

    def full_of(self, value: int) -> bool:
        return all(bool((rows == value).all()) for rows in self.rows())

    def free(self) -> None:
        for address in self.addresses:
            self.acl.free(address)


@contextlib.contextmanager
def npu(acl: Acl, count: int = 2) -> Iterator[list[OnNpu]]:
    made = [OnNpu(acl) for _ in range(count)]
    try:
        yield made
    finally:
        for memory in made:
            memory.free()


@contextlib.asynccontextmanager
async def on_npus(acl: Acl, **options: Any) -> AsyncIterator[tuple[Pair, adt.Cache, OnNpu, OnNpu]]:
    """A linked pair with a cache on an NPU each: of 1s at the user, whose cache is given, and of 2s at the owner."""
    with npu(acl) as (here, there):
        here.fill(1)
        there.fill(2)
        async with linked("hixl", user=options, owner=options) as pair:
            await pair.shown(await there.register(pair.owner, key=KEY))
            yield pair, await here.register(pair.user), here, there


# Memory of NPUs. ------------------------------------------------------------------------------------------------------


async def test_blocks_between_two_npus(acl: Acl) -> None:
    async with on_npus(acl) as (pair, cache, here, there):
        caches = pair.user.cache_manager
        there.fill(2, 3)
        await caches.pull_blocks(KEY, cache, [0, 3, 5], [1, 2, 7])
        for rows, value in zip(here.rows(), (2, 3), strict=True):
            assert [int(row[0]) for row in rows if (row == row[0]).all()] == [
                value if block in (1, 2, 7) else 1 for block in WHOLE
            ]
        await caches.push_blocks(KEY, cache, [0, 8], [4, 6])
        for rows, value in zip(there.rows(), (2, 3), strict=True):
            assert [int(row[0]) for row in rows] == [1 if block in (4, 6) else value for block in WHOLE]
        assert pair.link.path.transport == "hixl"


@pytest.mark.parametrize("device", ["user", "owner"])
async def test_blocks_between_an_npu_and_a_host(acl: Acl, device: str) -> None:
    with npu(acl, 1) as (memory,):
        memory.fill(1)
        async with linked("hixl") as pair:
            host = np.full((BLOCKS, BLOCK_BYTES), 2, np.uint8)
            tensors = [host, host + 1]
            if device == "user":
                await pair.offer(tensors)
                cache = await memory.register(pair.user)
            else:
                await pair.shown(await memory.register(pair.owner, key=KEY))
                cache = await pair.take(tensors)
            await pair.user.cache_manager.pull_blocks(KEY, cache, [0], [1])
            await pair.user.cache_manager.push_blocks(KEY, cache, [1, 2], [3, 4])
            near, far = (memory.rows(), tensors) if device == "user" else (tensors, memory.rows())
            for mine, theirs in zip(near, far, strict=True):
                np.testing.assert_array_equal(mine[1], theirs[0])
                np.testing.assert_array_equal(mine[[1, 2]], theirs[[3, 4]])
                assert mine[2, 0] != mine[1, 0]


async def test_layers_leave_an_npu_as_they_are_recorded(acl: Acl) -> None:
    async with on_npus(acl) as (pair, cache, here, there):
        gate = adt.LayerGate(2)
        target = adt.TransferWithCacheKeyConfig(KEY)
        task = pair.user.cache_manager.transfer_cache_async(
            cache, gate, [target], WHOLE, WHOLE, tensor_num_per_layer=1, notify=b"all"
        )
        here.fill(7, 8)
        gate.record(1)
        async for _, layer in task.layers():
            assert layer == 1
            break
        assert [int(rows[0, 0]) for rows in there.rows()] == [2, 8]
        gate.record(0)
        (result,) = await task
        assert (result.error, result.layers_done) == (None, 2)
        assert (await anext(pair.owner.notifications())).payload == b"all"
        assert [int(rows.max()) for rows in there.rows()] == [7, 8]


async def test_npus_of_two_processes(acl: Acl) -> None:
    theirs = """
        from tests.hixl_standin import Acl
        acl = kept["acl"] = Acl()
        acl.set_device()
        kept["places"] = [acl.malloc(size) for _ in range(2)]
        for place in kept["places"]:
            acl.write(place, bytes([5]) * size)
        desc = adt.CacheDesc(2, (blocks, size // blocks), "uint8", placement=adt.Placement.DEVICE)
        kept["cache"] = dd.cache_manager.register_blocks_cache(kept["places"], desc=desc, key=adt.BlocksCacheKey(1))
        await kept["cache"].ready()
    """
    config = adt.Config(transports=("hixl",))
    with npu(acl, 1) as (here,):
        here.fill(1)
        async with spawn(OWNER, transports=("hixl",)) as peer, adt.DataDist(USER, config=config) as dd:
            await peer.run(unindented(theirs), size=BLOCKS * BLOCK_BYTES, blocks=BLOCKS)
            cache = await here.register(dd)
            await dd.link(peer.info)
            await dd.cache_manager.pull_blocks(KEY, cache, WHOLE, WHOLE)
            assert here.full_of(5)
            here.fill(6)
            await dd.cache_manager.push_blocks(KEY, cache, WHOLE, WHOLE, notify=b"there")
            read = "return [acl.read(place, size).count(6) for place in kept['places']]"
            assert await peer.run(read, size=BLOCKS * BLOCK_BYTES) == [BLOCKS * BLOCK_BYTES] * 2


def unindented(text: str) -> str:
    return "\n".join(line[8:] for line in text.splitlines())


# A transfer that was given up. ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["deadline", "cancel"])
@pytest.mark.parametrize("kind", ["pull", "push"])
async def test_memory_is_quiet_only_when_the_disconnect_has_returned(
    hixl: Controls, acl: Acl, kind: str, end: str
) -> None:
    """HIXL goes on writing after a timeout, and stops when Disconnect returns: nothing may be done before that."""
    async with on_npus(acl, drain_timeout=0.05) as (pair, cache, here, there):
        await pair.user.cache_manager.pull_blocks(KEY, cache, [0], [0])
        target = here if kind == "pull" else there
        hixl.set("STALL", 1)
        hixl.set("DISCONNECT_MS", 500)
        before, seen = hixl.count("disconnects"), []
        start = pair.user.cache_manager.pull_blocks if kind == "pull" else pair.user.cache_manager.push_blocks
        transfer = start(KEY, cache, WHOLE, WHOLE, timeout=0.05 if end == "deadline" else 60.0)

        def done(_: object) -> None:
            seen.append((hixl.count("disconnects"), hixl.count("late_writes")))
            target.fill(9)

        transfer.add_done_callback(done)
        await until(lambda: hixl.count("late_writes") > 3)
        assert not transfer.done()
        assert target.rows()[0][0, 0] == STALE  # it is still being written
        if end == "cancel":
            transfer.cancel()
        (outcome,) = await asyncio.gather(transfer, return_exceptions=True)
        assert isinstance(outcome, adt.TransferTimeout if end == "deadline" else asyncio.CancelledError)
        ((disconnects, late_writes),) = seen
        assert disconnects == before + 1
        await asyncio.sleep(0.05)
        assert hixl.count("late_writes") == late_writes
        assert target.full_of(9)
        # The link is as good as new.
        await pair.user.cache_manager.pull_blocks(KEY, cache, WHOLE, WHOLE)
        assert pair.link.state is adt.LinkState.READY


async def test_a_fence_of_the_owner_waits_for_the_disconnect(hixl: Controls, acl: Acl) -> None:
    async with on_npus(acl, drain_timeout=0.05) as (pair, cache, _, there):
        hixl.set("STALL", 1)
        hixl.set("DISCONNECT_MS", 100)
        pushing = pair.user.cache_manager.push_blocks(KEY, cache, WHOLE, WHOLE, timeout=60.0)
        await until(lambda: hixl.count("late_writes") > 0)
        pushing.cancel()
        await pair.owner.fence(USER)
        there.fill(9)
        await asyncio.sleep(0.02)
        assert there.full_of(9)
        await asyncio.wait((pushing,))


async def test_cancelling_what_stalls_lets_the_others_finish(hixl: Controls, acl: Acl) -> None:
    async with on_npus(acl, drain_timeout=0.05) as (pair, cache, here, _):
        hixl.set("DELAY_US", 20_000)
        hixl.set("STALL", 3)
        pulls = [pair.user.cache_manager.pull_blocks(KEY, cache, [b], [b], timeout=60.0) for b in range(8)]
        await until(lambda: hixl.count("stalls") > 0)
        hixl.set("DELAY_US", 0)
        await until(lambda: sum(not pull.done() for pull in pulls) == 1)
        (stalled,) = (pull for pull in pulls if not pull.done())
        more = [pair.user.cache_manager.pull_blocks(KEY, cache, [b], [b], timeout=60.0) for b in range(8, BLOCKS)]
        stalled.cancel()
        ends = await asyncio.gather(*pulls, *more, return_exceptions=True)
        assert [type(end) for end in ends if end is not None] == [asyncio.CancelledError]
        lost = pulls.index(stalled)
        for rows in here.rows():
            assert {b for b in WHOLE if not (rows[b] == 2).all()} <= {lost}
        assert pair.link.state is adt.LinkState.READY


async def test_what_drains_in_time_costs_no_connection(hixl: Controls, acl: Acl) -> None:
    async with on_npus(acl, drain_timeout=30.0) as (pair, cache, here, _):
        await pair.user.cache_manager.pull_blocks(KEY, cache, [0], [0])
        before = hixl.count("disconnects")
        hixl.set("STALL", 1)
        hixl.set("STALL_MS", 50)
        transfer = pair.user.cache_manager.pull_blocks(KEY, cache, WHOLE, WHOLE)
        await until(lambda: hixl.count("stalls") > 0)
        transfer.cancel()
        await asyncio.wait((transfer,))
        assert transfer.cancelled()
        here.fill(9)
        await asyncio.sleep(0.02)
        assert here.full_of(9)
        assert hixl.count("disconnects") == before


@pytest.mark.parametrize("device", [False, True])
async def test_closing_ends_what_stalls(hixl: Controls, acl: Acl, device: bool) -> None:
    with npu(acl) as (here, there):
        async with linked("hixl", user={"drain_timeout": 0.05}) as pair:
            if device:
                await pair.shown(await there.register(pair.owner, key=KEY))
                cache = await here.register(pair.user)
            else:
                await pair.offer(pattern(1, (BLOCKS, BLOCK_BYTES)))
                cache = await pair.take(pattern(2, (BLOCKS, BLOCK_BYTES)))
            hixl.set("STALL", -1)
            transfer = pair.user.cache_manager.pull_blocks(KEY, cache, WHOLE, WHOLE, timeout=60.0)
            await until(lambda: hixl.count("late_writes") > 0)
            pair.user.abort()
            await pair.user.wait_closed()
            assert transfer.done()
            assert isinstance(transfer.exception(), adt.ClosedError)
            written = hixl.count("late_writes")
            await asyncio.sleep(0.02)
            assert hixl.count("late_writes") == written


# The poller. ----------------------------------------------------------------------------------------------------------


def poller_switches() -> dict[str, str]:
    """Return how often each thread of the transport has run so far."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().startswith("adt-hixl"):
            lines = (task / "status").read_text().splitlines()
            found[task.name] = " ".join(line for line in lines if "ctxt_switches" in line)
    return found


async def test_nothing_is_asked_while_nothing_is_under_way(hixl: Controls, acl: Acl) -> None:
    async with on_npus(acl) as (pair, cache, *_):
        await pair.user.cache_manager.pull_blocks(KEY, cache, WHOLE, WHOLE)
        await asyncio.sleep(0.1)
        queries, switches = hixl.count("queries"), poller_switches()
        assert queries > 0
        assert switches
        await asyncio.sleep(0.5)
        assert hixl.count("queries") == queries
        assert poller_switches() == switches


async def test_a_long_wait_costs_little(hixl: Controls, acl: Acl) -> None:
    """The pauses between two looks grow while a request takes its time."""
    async with on_npus(acl) as (pair, cache, *_):
        await pair.user.cache_manager.pull_blocks(KEY, cache, WHOLE, WHOLE)
        before = hixl.count("queries")
        hixl.set("DELAY_US", 500_000)
        await pair.user.cache_manager.pull_blocks(KEY, cache, WHOLE, WHOLE)
        assert hixl.count("queries") - before < 1500


@pytest.mark.parametrize("engine", ["client-server", "hccl-comm"])
@pytest.mark.parametrize("reuse", [0, 1])
async def test_with_and_without_the_bulk_query(
    monkeypatch: pytest.MonkeyPatch, hixl: Controls, acl: Acl, engine: str, reuse: int
) -> None:
    """No request is asked for after its end (the fixture sees that), also where its handle is another's by then."""
    monkeypatch.setenv("HIXL_STANDIN_ENGINE", engine)
    hixl.set("REUSE", reuse)
    bulk = hixl.count("bulk_queries")
    async with on_npus(acl) as (pair, cache, here, _):
        requests = hixl.count("requests")
        for turn in range(4):
            hixl.set("DELAY_US", 1000 * (turn % 2))
            caches = pair.user.cache_manager
            await asyncio.gather(*(caches.pull_blocks(KEY, cache, [b, (b + 1) % 4], [b, b + 4]) for b in range(4)))
        assert hixl.count("requests") - requests >= 16
        assert all((rows[:8] == 2).all() for rows in here.rows())
    asked = hixl.count("bulk_queries") - bulk
    assert asked > 4 if engine == "client-server" else asked <= 2  # one of each engine says that it cannot


async def test_queries_that_fail_now_and_then_lose_nothing(hixl: Controls, acl: Acl) -> None:
    async with on_npus(acl) as (pair, cache, here, _):
        for number in range(1, 4):
            hixl.set("QUERY_FAILS", number)
            await pair.user.cache_manager.pull_blocks(KEY, cache, WHOLE, WHOLE)
            assert here.full_of(2)
            here.fill(1)


async def test_queries_that_always_fail_end_in_an_error_and_quiet(hixl: Controls, acl: Acl) -> None:
    async with on_npus(acl, drain_timeout=0.05) as (pair, cache, here, _):
        await pair.user.cache_manager.pull_blocks(KEY, cache, WHOLE, WHOLE)
        hixl.set("QUERY_FAILS", -1)
        hixl.set("STALL", -1)
        transfer = pair.user.cache_manager.pull_blocks(KEY, cache, WHOLE, WHOLE, timeout=1.0)
        (why,) = await asyncio.gather(transfer, return_exceptions=True)
        written = hixl.count("late_writes")
        here.fill(9)
        assert isinstance(why, adt.TransferTimeout | adt.PeerLostError | adt.TransportError), why
        await asyncio.sleep(0.02)
        assert hixl.count("late_writes") == written
        assert here.full_of(9)


# HIXL's rules, hidden behind ours. ------------------------------------------------------------------------------------


async def test_memory_may_be_registered_after_linking(hixl: Controls, acl: Acl) -> None:
    """HIXL reaches only what was registered before the connection: it is made again, and nobody notices."""
    async with on_npus(acl) as (pair, cache, *_):
        await pair.user.cache_manager.pull_blocks(KEY, cache, WHOLE, WHOLE)
        epoch, connects = pair.link.epoch, hixl.count("connects")
        hixl.set("DELAY_US", 2000)
        with npu(acl) as (here, there):
            there.fill(4)
            running = [pair.user.cache_manager.pull_blocks(KEY, cache, [b], [b]) for b in WHOLE]
            key = adt.BlocksCacheKey(OWNER, model_id=1)
            offered = await pair.shown(await there.register(pair.owner, key=key))
            mine = await here.register(pair.user)
            await asyncio.gather(*running, pair.user.cache_manager.pull_blocks(key, mine, WHOLE, WHOLE))
            assert here.full_of(4)
            assert hixl.count("connects") > connects
            assert pair.link.epoch == epoch
            await pair.user.cache_manager.unregister_cache(mine)
            await pair.owner.cache_manager.unregister_cache(offered)


async def test_memory_can_be_taken_back_while_linked(hixl: Controls, acl: Acl) -> None:
    """HIXL refuses to deregister while anybody is connected: peers are asked to disconnect first, and come back."""
    async with on_npus(acl) as (pair, cache, here, _):
        caches = pair.user.cache_manager
        await caches.pull_blocks(KEY, cache, WHOLE, WHOLE)
        with npu(acl, 1) as (extra,):
            key = adt.BlocksCacheKey(OWNER, model_id=1)
            offered = await pair.shown(await extra.register(pair.owner, key=key))
            await caches.pull_blocks(key, cache, WHOLE, WHOLE)
            hixl.set("DELAY_US", 2000)
            running = [caches.pull_blocks(KEY, cache, [b], [b], timeout=60.0) for b in WHOLE]
            await pair.owner.cache_manager.unregister_cache(offered)
            await asyncio.gather(*running)
        # The memory has gone, which the next transfers do not meet.
        await caches.pull_blocks(KEY, cache, WHOLE, WHOLE)
        assert here.full_of(2)
        assert pair.link.state is adt.LinkState.READY


async def test_memory_of_a_peer_that_gave_it_back_is_free(hixl: Controls, acl: Acl) -> None:
    """Both sides, one after the other, while both are connected to each other."""
    async with on_npus(acl) as (pair, cache, here, there):
        await pair.user.cache_manager.pull_blocks(KEY, cache, WHOLE, WHOLE)
        (theirs,) = pair.owner.cache_manager.caches.values()
        await pair.user.cache_manager.unregister_cache(cache)
        await pair.owner.cache_manager.unregister_cache(theirs)
        again = await here.register(pair.user)
        await pair.shown(await there.register(pair.owner, key=KEY))
        here.fill(1)
        await pair.user.cache_manager.pull_blocks(KEY, again, WHOLE, WHOLE)
        assert here.full_of(2)


@pytest.mark.parametrize("device", [False, True])
async def test_tensors_that_touch_are_registered_apart(acl: Acl, device: bool) -> None:
    """A piece that reaches from one tensor into the next is of no one registration, and HIXL refuses it."""
    size = BLOCKS * BLOCK_BYTES
    with contextlib.ExitStack() as stack:
        async with linked("hixl") as pair:
            if device:
                desc = adt.CacheDesc(2, (BLOCKS, BLOCK_BYTES), "uint8", placement=adt.Placement.DEVICE)
                (first, second) = stack.enter_context(acl.memory(2 * size, 2 * size))
                acl.write(first, bytes([1]) * size + bytes([2]) * size)
                there = pair.owner.cache_manager.register_blocks_cache([first, first + size], desc=desc, key=KEY)
                await pair.shown(there)
                here = pair.user.cache_manager.register_blocks_cache([second, second + size], desc=desc)
            else:
                whole = np.repeat(np.array([1, 2], np.uint8), size).reshape(2, BLOCKS, BLOCK_BYTES)
                await pair.offer(list(whole))
                mine = np.zeros_like(whole)
                here = pair.user.cache_manager.register_blocks_cache(list(mine))
            await pair.user.cache_manager.pull_blocks(KEY, here, WHOLE, WHOLE)
            if device:
                assert acl.read(second, 2 * size) == bytes([1]) * size + bytes([2]) * size
            else:
                np.testing.assert_array_equal(mine, whole)


async def test_too_many_registrations_are_an_error_that_names_the_limit(hixl: Controls) -> None:
    hixl.set("MAX_REGISTRATIONS", 3)
    async with linked("hixl") as pair:
        await pair.offer(pattern(1, (4, 64), tensors=3))
        await pair.take(pattern(1, (4, 64), tensors=3))
        cache = pair.user.cache_manager.register_blocks_cache(pattern(2, (4, 64), tensors=1))
        with pytest.raises(
            adt.RegistrationError, match=r"hixl: .*HIXL refuses 256 bytes .*RESOURCE_EXHAUSTED"
        ) as refusal:
            await cache.ready()
        assert "unregister caches" in str(refusal.value.hint)
        assert "ulimit" not in f"{refusal.value} {refusal.value.hint}"
        # One cache less, and it fits.
        await pair.user.cache_manager.unregister_cache(pair.user.cache_manager.caches[1])
        await pair.take(pattern(2, (4, 64), tensors=1))


async def test_more_requests_than_hixl_takes_wait_their_turn(hixl: Controls, acl: Acl) -> None:
    hixl.set("MAX_REQUESTS", 2)
    async with on_npus(acl) as (pair, cache, here, _):
        caches = pair.user.cache_manager
        await asyncio.gather(*(caches.pull_blocks(KEY, cache, [b], [b]) for b in WHOLE))
        assert here.full_of(2)


async def test_a_request_that_fails_once_is_made_again(hixl: Controls, acl: Acl) -> None:
    """A failure breaks HIXL's connection for all: it is made anew, and what was under way is posted again."""
    async with on_npus(acl) as (pair, cache, here, _):
        caches = pair.user.cache_manager
        await caches.pull_blocks(KEY, cache, [0], [0])
        hixl.set("FAIL", 2)
        ends = await asyncio.gather(*(caches.pull_blocks(KEY, cache, [b], [b]) for b in WHOLE), return_exceptions=True)
        failed = [end for end in ends if end is not None]
        assert len(failed) <= 1, failed
        await caches.pull_blocks(KEY, cache, WHOLE, WHOLE)
        assert here.full_of(2)
        assert pair.link.state is adt.LinkState.READY


async def test_a_request_that_always_fails_is_an_error(hixl: Controls, acl: Acl) -> None:
    async with on_npus(acl) as (pair, cache, *_):
        hixl.set("FAIL", -1)
        with pytest.raises(adt.DataDistError) as why:
            await pair.user.cache_manager.pull_blocks(KEY, cache, WHOLE, WHOLE, timeout=20.0)
        assert not isinstance(why.value, adt.TransferTimeout), why.value


async def test_each_side_connects_to_the_other(acl: Acl) -> None:
    """In HIXL only the side that connected may ask; a link carries both directions."""
    async with on_npus(acl) as (pair, cache, here, there):
        offered = await here.register(pair.user, key=adt.BlocksCacheKey(USER))
        (theirs,) = pair.owner.cache_manager.caches.values()
        await until(lambda: adt.BlocksCacheKey(USER) in pair.owner.links[USER].table)
        await pair.owner.cache_manager.pull_blocks(adt.BlocksCacheKey(USER), theirs, [0], [5])
        assert all(rows[5, 0] == 1 for rows in there.rows())
        await pair.user.cache_manager.pull_blocks(KEY, cache, [1], [2])
        assert all(rows[2, 0] == 2 for rows in here.rows())
        await pair.user.cache_manager.unregister_cache(offered)


# Links. ---------------------------------------------------------------------------------------------------------------


async def test_a_connection_that_stalls_leaves_the_link_to_another_transport(acl: Acl) -> None:
    """The peer's engine never answers: the link goes on without HIXL, and says why."""
    names = ("hixl", "tcp")
    async with (
        spawn(OWNER, transports=names, env={"HIXL_STANDIN_CONNECT_STALLS": "1"}) as peer,
        adt.DataDist(USER, config=adt.Config(transports=names, link_timeout=3.0)) as dd,
    ):
        await peer.cache("kv", tensors=2, shape=(BLOCKS, BLOCK_BYTES), value=3)
        link = await dd.link(peer.info, timeout=30.0)
        assert link.path.transport == "tcp"
        assert "HIXL cannot connect to 127.0.0.1:" in link.path.reasons["hixl"]
        cache = dd.cache_manager.register_blocks_cache([np.zeros((BLOCKS, BLOCK_BYTES), np.uint8) for _ in range(2)])
        await dd.cache_manager.pull_blocks(adt.BlocksCacheKey(OWNER, model_id=0), cache, WHOLE, WHOLE)
        assert (cache.tensors[0] == 3).all()


@pytest.mark.parametrize("when", ["before", "after"])
async def test_host_memory_that_hixl_refuses_is_served_by_another_transport(
    hixl: Controls, acl: Acl, when: str
) -> None:
    """As over RoCE, where HIXL connects only while it has no host memory but that of aclrtMallocHost."""
    hixl.set("PINNED_HOST", 1)
    config = adt.Config(transports=("hixl", "tcp"))
    host_key = adt.BlocksCacheKey(OWNER, model_id=1)
    offered, taken = (pattern(seed, (BLOCKS, BLOCK_BYTES)) for seed in (1, 2))
    with npu(acl) as (here, there):
        there.fill(2)
        async with (
            adt.DataDist(OWNER, listen="127.0.0.1:0", config=config) as owner,
            adt.DataDist(USER, config=config) as user,
        ):
            await there.register(owner, key=KEY)
            mine = await here.register(user)
            info = adt.ClusterInfo(OWNER, str(owner.listen_address))
            if when == "after":
                link = await user.link(info)
            theirs = owner.cache_manager.register_blocks_cache(offered, key=host_key)
            ours = user.cache_manager.register_blocks_cache(taken)
            await asyncio.gather(theirs.ready(), ours.ready())
            if when == "before":
                link = await user.link(info)
            assert link.path.memory["device"] == "hixl"
            assert link.path.memory["refused by hixl"] == "tcp"
            assert "aclrtMallocHost" in str(link.path)
            await until(lambda: KEY in link.table and host_key in link.table)
            epoch, caches = link.epoch, user.cache_manager
            await caches.pull_blocks(KEY, mine, WHOLE, WHOLE)
            assert here.full_of(2)
            await caches.pull_blocks(host_key, ours, WHOLE, WHOLE)
            for got, wanted in zip(taken, offered, strict=True):
                np.testing.assert_array_equal(got, wanted)
            for key, cache in ((KEY, ours), (host_key, mine)):
                with pytest.raises(adt.TransportUnavailable):
                    await caches.pull_blocks(key, cache, WHOLE, WHOLE)
            # What comes from aclrtMallocHost is borne, and meets an NPU's memory.
            pinned = [acl.malloc_host(BLOCKS * BLOCK_BYTES) for _ in range(2)]
            desc = adt.CacheDesc(2, (BLOCKS, BLOCK_BYTES), "uint8")
            good = caches.register_blocks_cache(pinned, desc=desc)
            await good.ready()
            await caches.pull_blocks(KEY, good, WHOLE, WHOLE)
            assert ctypes.string_at(pinned[1], BLOCKS * BLOCK_BYTES) == bytes([2]) * (BLOCKS * BLOCK_BYTES)
            assert (link.state, link.epoch, user.links[OWNER]) == (adt.LinkState.READY, epoch, link)
            for dd in (owner, user):
                for cache in list(dd.cache_manager.caches.values()):
                    await dd.cache_manager.unregister_cache(cache)
            for address in pinned:
                acl.free_host(address)
            assert user.stats()["hixl"]["registrations"] == 0


async def test_registering_host_memory_that_hixl_refuses_disturbs_no_transfer(hixl: Controls, acl: Acl) -> None:
    with npu(acl) as (here, there):
        there.fill(2)
        async with linked("hixl", "tcp") as pair:
            await pair.shown(await there.register(pair.owner, key=KEY))
            mine = await here.register(pair.user)
            hixl.set("DELAY_US", 20_000)
            hixl.set("PINNED_HOST", 1)
            caches, epoch = pair.user.cache_manager, pair.link.epoch
            running = [caches.pull_blocks(KEY, mine, [b], [b]) for b in WHOLE]
            for seed in range(3):
                cache = await pair.take(pattern(seed, (BLOCKS, BLOCK_BYTES)))
                running.append(caches.pull_blocks(KEY, mine, WHOLE, WHOLE))
                await caches.unregister_cache(cache)
            await asyncio.gather(*running)
            assert here.full_of(2)
            assert (pair.link.state, pair.link.epoch) == (adt.LinkState.READY, epoch)


async def test_without_another_transport_the_link_fails_and_says_why() -> None:
    async with (
        spawn(OWNER, transports=("hixl",), env={"HIXL_STANDIN_CONNECT_STALLS": "1"}) as peer,
        adt.DataDist(USER, config=adt.Config(transports=("hixl",), link_timeout=3.0)) as dd,
    ):
        with pytest.raises(adt.TransportUnavailable, match=r"HIXL cannot connect to 127\.0\.0\.1:"):
            await dd.link(peer.info, timeout=30.0)


async def begin_endless(peer: PeerProcess, dd: adt.DataDist, cache: adt.Cache) -> list[adt.Transfer[None]]:
    await dd.link(peer.info)
    key = adt.BlocksCacheKey(OWNER, model_id=0)
    await until(lambda: key in dd.links[OWNER].table)
    return [dd.cache_manager.pull_blocks(key, cache, [b], [b], timeout=60.0) for b in WHOLE]


async def test_a_peer_that_is_killed_fails_what_is_under_way_at_once(hixl: Controls, acl: Acl) -> None:
    config = adt.Config(transports=("hixl",), heartbeat_limit=600.0, drain_timeout=0.05)
    with npu(acl, 1) as (here,):
        async with adt.DataDist(USER, listen="127.0.0.1:0", config=config) as dd:
            cache = await here.register(dd)
            for value in (3, 4):
                async with spawn(OWNER, transports=("hixl",)) as peer:
                    await peer.cache("kv", tensors=2, shape=(BLOCKS, BLOCK_BYTES), value=value)
                    hixl.set("STALL", -1)
                    running = await begin_endless(peer, dd, cache)
                    await until(lambda: hixl.count("stalls") > 0)
                    peer.kill()
                    ends = await asyncio.gather(*running, return_exceptions=True)
                    here.fill(9)
                    written = hixl.count("late_writes")
                    assert {type(end) for end in ends} == {adt.PeerLostError}
                    async with asyncio.timeout(PATIENCE):
                        await dd.fence(OWNER)
                    assert hixl.count("late_writes") == written
                    assert here.full_of(9)
                    hixl.set("STALL", 0)
                async with spawn(OWNER, transports=("hixl",)) as peer:
                    await peer.cache("kv", tensors=2, shape=(BLOCKS, BLOCK_BYTES), value=value + 10)
                    await asyncio.gather(*await begin_endless(peer, dd, cache))
                    assert here.full_of(value + 10)
                    await dd.unlink(peer.info)


async def test_layers_land_over_host_memory(hixl: Controls) -> None:
    hixl.set("DELAY_US", 500)
    async with linked("hixl") as pair:
        here, there = await both(pair)
        gate = adt.LayerGate(LAYERS)
        task = push(pair, here, gate)
        for layer in (2, 0, 3, 1):
            gate.record(layer)
        (result,) = await task
        assert (result.error, result.layers_done) == (None, LAYERS)
        assert result.bytes_done == 2 * LAYERS * len(SRC) * 512
        assert layers_there(here, there) == list(range(LAYERS))
