"""The transport hixl, over the STAND-IN for HIXL: no line of this has run on an NPU."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiodatadist as adt
from aiodatadist import _core, _hixl

from .conftest import Scale
from .hixl_standin import Acl, Controls
from .pairs import OWNER, USER, Pair, linked, pattern
from .waiting import until

pytestmark = pytest.mark.hixl

KEY = adt.BlocksCacheKey(OWNER)
SHAPE = (64, 4096)
# A stalled request writes until its connection has ended: seconds, in which nothing may be said to be quiet.
SLOW_END = 0.4


async def caches(pair: Pair) -> tuple[adt.Cache, adt.Cache]:
    """The owner's cache and the user's, of the same shape. Both connections reach them when this returns."""
    theirs, mine = await pair.offer(pattern(1, SHAPE)), await pair.take(pattern(2, SHAPE))
    await pair.user.cache_manager.pull_blocks(KEY, mine, [0], [0])
    return theirs, mine


def same(theirs: adt.Cache, mine: adt.Cache, src: list[int], dst: list[int]) -> None:
    for there, here in zip(theirs.tensors, mine.tensors, strict=True):
        np.testing.assert_array_equal(there[src], here[dst])


def stats() -> dict[str, int]:
    return _core.hixl_stats()


@contextlib.asynccontextmanager
async def over_hixl(*others: str, **config: Any) -> AsyncIterator[Pair]:
    """Two linked DataDists; at the end nothing of HIXL's is left."""
    async with linked("hixl", *others, owner=config, user=config) as pair:
        yield pair
    for name in ("engines", "registrations", "registered_bytes", "connections"):
        assert stats()[name] == 0, name


@pytest.mark.parametrize("bulk", [1, 0])
async def test_blocks_are_pulled_and_pushed(hixl: Controls, monkeypatch: pytest.MonkeyPatch, bulk: int) -> None:
    monkeypatch.setenv("HIXL_STANDIN_ENGINE", "client-server" if bulk else "hccl-comm")
    asked = hixl.count("bulk_queries")
    async with over_hixl("tcp") as pair:
        theirs, mine = await caches(pair)
        before = stats()
        src, dst = [3, 4, 5, 60, 0], [10, 11, 13, 7, 1]
        await pair.user.cache_manager.pull_blocks(KEY, mine, src, dst)
        same(theirs, mine, src, dst)
        mine.tensors[0][20:30] = 7
        await pair.user.cache_manager.push_blocks(KEY, mine, [20, 29], [40, 2], notify=b"done")
        np.testing.assert_array_equal(theirs.tensors[0][[40, 2]], mine.tensors[0][[20, 29]])
        async for note in pair.owner.notifications():
            assert bytes(note.payload) == b"done"
            break
        assert pair.link.path.transport == "hixl"
        assert pair.user.stats()["hixl"]["requests"] > before["requests"]
        # The ordinary case ends no connection.
        assert stats()["disconnects"] == before["disconnects"]
        assert (hixl.count("bulk_queries") - asked > 2) == bool(bulk)
        # Every request is asked for until it is over.
        assert pair.user.dump() == []


async def test_both_sides_ask_and_much_is_moved(hixl: Controls) -> None:
    hixl.set("MAX_REQUESTS", 3)  # what HIXL has no room for waits here
    async with over_hixl() as pair:
        theirs = await pair.offer(pattern(1, (512, 65536), tensors=2))
        mine = await pair.take(pattern(2, (512, 65536), tensors=2), key=adt.BlocksCacheKey(USER))
        order = [int(n) for n in np.random.default_rng(3).permutation(512)]
        back = pair.owner.cache_manager
        while adt.CacheKeyByIdAndIndex(USER, mine.id) not in pair.owner.links[USER].table:
            await asyncio.sleep(0.001)
        pulls = [
            pair.user.cache_manager.pull_blocks(KEY, mine, order[i : i + 64], order[i : i + 64])
            for i in range(0, 256, 64)
        ]
        others = [
            back.pull_blocks(adt.BlocksCacheKey(USER), theirs, order[i : i + 64], order[i : i + 64])
            for i in range(256, 512, 64)
        ]
        await asyncio.gather(*pulls, *others)
        same(theirs, mine, order, order)


async def test_nothing_is_asked_while_nothing_is_under_way(hixl: Controls) -> None:
    async with over_hixl() as pair:
        await caches(pair)
        await asyncio.sleep(0.05)
        before, used = hixl.count("queries"), _seconds_of("adt-hixl")
        await asyncio.sleep(0.5)
        assert hixl.count("queries") == before
        assert _seconds_of("adt-hixl") == used
        assert len(used) >= 2


def _seconds_of(name: str) -> list[str]:
    """Processor time of the threads of this name, in ticks."""
    found = []
    for task in sorted(Path("/proc/self/task").iterdir()):
        fields = (task / "stat").read_text().rpartition(")")
        if f"({name}" in fields[0]:
            found.append(" ".join(fields[2].split()[11:13]))
    return found


async def test_a_cancel_drains_and_ends_no_connection(hixl: Controls) -> None:
    async with over_hixl(drain_timeout=20.0) as pair:
        theirs, mine = await caches(pair)
        before = stats()["disconnects"]
        hixl.set("DELAY_US", 300000)
        pulls = [pair.user.cache_manager.pull_blocks(KEY, mine, [i], [i + 20]) for i in range(10)]
        await asyncio.sleep(0.01)
        pulls[4].cancel()
        results = await asyncio.gather(*pulls, return_exceptions=True)
        assert [isinstance(result, BaseException) for result in results] == [i == 4 for i in range(10)]
        rest = [i for i in range(10) if i != 4]
        same(theirs, mine, rest, [i + 20 for i in rest])
        assert stats()["disconnects"] == before


@pytest.mark.parametrize("engine", ["client-server", "hccl-comm"])
@pytest.mark.parametrize("why", ["cancel", "deadline"])
async def test_what_does_not_drain_is_quiet_only_after_the_disconnect(
    hixl: Controls, monkeypatch: pytest.MonkeyPatch, engine: str, why: str
) -> None:
    """A transfer that HIXL does not end may write until its connection has ended: so long it is not done."""
    monkeypatch.setenv("HIXL_STANDIN_ENGINE", engine)
    hixl.set("REUSE", 1)
    async with over_hixl(drain_timeout=0.05) as pair:
        theirs, mine = await caches(pair)
        hixl.set("DISCONNECT_MS", int(SLOW_END * 1000))
        hixl.set("STALL", 1)
        ended, stalls, late, forced = *map(hixl.count, ("disconnects", "stalls", "late_writes")), stats()["forced"]
        timeout = 0.05 if why == "deadline" else 30.0
        stalled = pair.user.cache_manager.pull_blocks(KEY, mine, list(range(8)), list(range(8)), timeout=timeout)
        await until(lambda: hixl.count("stalls") > stalls)
        others = [pair.user.cache_manager.pull_blocks(KEY, mine, [i], [i + 20]) for i in range(19)]
        if why == "cancel":
            stalled.cancel()
        while not stalled.done():
            await asyncio.sleep(0.001)
        assert hixl.count("disconnects") > ended
        assert hixl.count("late_writes") > late
        quiet = [tensor[:8].copy() for tensor in mine.tensors]
        with pytest.raises(asyncio.CancelledError if why == "cancel" else adt.TransferTimeout):
            await stalled
        await asyncio.gather(*others)
        same(theirs, mine, list(range(19)), [i + 20 for i in range(19)])
        for tensor, was in zip(mine.tensors, quiet, strict=True):
            np.testing.assert_array_equal(tensor[:8], was)
        assert stats()["forced"] == forced + 1
        hixl.set("DISCONNECT_MS", 0)


@pytest.mark.parametrize("engine", ["client-server", "hccl-comm"])
async def test_a_failed_request_is_tried_once_more_by_a_new_connection(
    hixl: Controls, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    monkeypatch.setenv("HIXL_STANDIN_ENGINE", engine)
    async with over_hixl() as pair:
        theirs, mine = await caches(pair)
        failures = stats()["failures"]
        hixl.set("FAIL", 2)
        pulls = [pair.user.cache_manager.pull_blocks(KEY, mine, [i], [i + 20]) for i in range(10)]
        await asyncio.gather(*pulls)
        same(theirs, mine, list(range(10)), list(range(20, 30)))
        assert stats()["failures"] > failures
        hixl.set("FAIL", -1)
        with pytest.raises(adt.TransportError):
            await pair.user.cache_manager.pull_blocks(KEY, mine, [0], [1])
        hixl.set("FAIL", 0)
        await pair.user.cache_manager.pull_blocks(KEY, mine, [5], [1])
        same(theirs, mine, [5], [1])


async def test_a_query_that_fails_ends_the_connection_and_not_the_transfer(hixl: Controls) -> None:
    async with over_hixl() as pair:
        theirs, mine = await caches(pair)
        hixl.set("QUERY_FAILS", 1)
        await pair.user.cache_manager.pull_blocks(KEY, mine, [7], [8])
        same(theirs, mine, [7], [8])


async def test_what_is_registered_late_is_reached(hixl: Controls) -> None:
    """HIXL shows a peer what was registered before he connected; so the path drains and connects again."""
    async with over_hixl() as pair:
        theirs, mine = await caches(pair)
        hixl.set("DELAY_US", 2000)
        forced = stats()["forced"]
        running = [pair.user.cache_manager.pull_blocks(KEY, mine, [i], [i + 20]) for i in range(10)]
        late = await pair.offer(pattern(5, SHAPE), key=adt.BlocksCacheKey(OWNER, model_id=1))
        here = await pair.take(pattern(6, SHAPE))
        await pair.user.cache_manager.pull_blocks(adt.BlocksCacheKey(OWNER, model_id=1), here, [1, 2], [3, 4])
        await asyncio.gather(*running)
        same(late, here, [1, 2], [3, 4])
        same(theirs, mine, list(range(10)), list(range(20, 30)))
        assert stats()["forced"] == forced


@pytest.mark.parametrize("engine", ["client-server", "hccl-comm"])
async def test_unregistering_asks_the_peers_to_disconnect_first(
    hixl: Controls, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    monkeypatch.setenv("HIXL_STANDIN_ENGINE", engine)
    async with over_hixl() as pair:
        theirs, mine = await caches(pair)
        other = await pair.offer(pattern(5, SHAPE), key=adt.BlocksCacheKey(OWNER, model_id=1))
        held = stats()["registrations"]
        hixl.set("DELAY_US", 5000)
        running = [pair.user.cache_manager.pull_blocks(KEY, mine, [i], [i + 20]) for i in range(10)]
        await pair.owner.cache_manager.unregister_cache(other, timeout=60.0)
        assert stats()["registrations"] == held - 2
        await asyncio.gather(*running)
        same(theirs, mine, list(range(10)), list(range(20, 30)))
        await pair.user.cache_manager.pull_blocks(KEY, mine, [40], [41])
        same(theirs, mine, [40], [41])
        await pair.user.cache_manager.unregister_cache(mine, timeout=60.0)
        await pair.owner.cache_manager.unregister_cache(theirs, timeout=60.0)
        assert stats()["registrations"] == 0


async def test_a_peer_that_is_slow_to_disconnect_holds_up_no_other_transfer_for_long(hixl: Controls) -> None:
    """The try to take memory back ends, links go on, and a later one succeeds."""
    async with over_hixl(drain_timeout=0.02) as pair:
        theirs, mine = await caches(pair)
        other = await pair.offer(pattern(5, SHAPE), key=adt.BlocksCacheKey(OWNER, model_id=1))
        hixl.set("DISCONNECT_MS", 1300)
        going = pair.owner.cache_manager.unregister_cache(other)
        await asyncio.sleep(0.2)
        assert not going.done()
        await pair.user.cache_manager.pull_blocks(KEY, mine, [5], [6])
        same(theirs, mine, [5], [6])
        hixl.set("DISCONNECT_MS", 0)
        await going
        await pair.user.cache_manager.pull_blocks(KEY, mine, [7], [8])
        same(theirs, mine, [7], [8])


async def test_caches_over_one_memory_share_its_registration(hixl: Controls) -> None:
    async with over_hixl() as pair:
        tensors = pattern(1, SHAPE)
        await pair.offer(tensors)
        held = stats()["registrations"]
        second = await pair.offer(tensors, key=adt.BlocksCacheKey(OWNER, model_id=1))
        assert stats()["registrations"] == held
        await pair.owner.cache_manager.unregister_cache(second)
        assert stats()["registrations"] == held
        overlapping = pair.owner.cache_manager.register_blocks_cache([tensors[0][1:]])
        with pytest.raises(adt.RegistrationError, match="overlap"):
            await overlapping.ready()


async def test_device_memory_goes_over_hixl_in_every_direction(hixl: Controls) -> None:
    """A link of host memory goes over tcp; an NPU's goes over hixl, whatever is preferred for the host's."""
    acl = Acl()
    blocks, size = 16, 4096
    desc = adt.CacheDesc(1, (blocks, size), "uint8", placement=adt.Placement.DEVICE)
    with acl.memory(blocks * size, blocks * size) as (there, here):
        async with linked("tcp", "hixl") as pair:
            acl.write(there, bytes(range(256)) * (blocks * size // 256))
            theirs = await pair.offer([there], desc=desc)
            mine = await pair.take([here], desc=desc)
            hosts = await pair.take(pattern(9, (blocks, size), tensors=1))
            manager = pair.user.cache_manager
            await manager.pull_blocks(KEY, mine, [1, 2, 5], [0, 3, 4])
            for src, dst in ((1, 0), (2, 3), (5, 4)):
                assert acl.read(here + dst * size, size) == acl.read(there + src * size, size)
            await manager.pull_blocks(KEY, hosts, [7], [1])
            assert hosts.tensors[0][1].tobytes() == acl.read(there + 7 * size, size)
            hosts.tensors[0][2] = 77
            await manager.push_blocks(KEY, hosts, [2], [9])
            assert acl.read(there + 9 * size, size) == bytes([77]) * size
            assert theirs.placement is adt.Placement.DEVICE
            await manager.unregister_cache(mine)
            await pair.owner.cache_manager.unregister_cache(theirs)


async def test_a_link_goes_on_with_the_next_transport_where_hixl_does_not_connect(hixl: Controls) -> None:
    hixl.set("CONNECT_STALLS", 1)
    config = adt.Config(transports=("hixl", "tcp"), link_timeout=2.0)
    async with (
        adt.DataDist(OWNER, listen="127.0.0.1:0", config=config) as owner,
        adt.DataDist(USER, config=config) as user,
    ):
        link = await user.link(adt.ClusterInfo(OWNER, str(owner.listen_address)))
        assert link.path.transport == "tcp"
        assert "HIXL" in link.path.reasons["hixl"]


@pytest.mark.parametrize("ender", ["owner", "user"])
async def test_the_end_of_a_side_ends_what_is_under_way(hixl: Controls, ender: str) -> None:
    async with over_hixl(drain_timeout=0.2) as pair:
        _, mine = await caches(pair)
        hixl.set("STALL", -1)
        stalls = hixl.count("stalls")
        pulls = [pair.user.cache_manager.pull_blocks(KEY, mine, [i], [i + 20]) for i in range(10)]
        await until(lambda: hixl.count("stalls") > stalls)
        # Those not handed to HIXL yet stall as well: none may arrive before the end.
        (pair.owner if ender == "owner" else pair.user).abort()
        results = await asyncio.gather(*pulls, return_exceptions=True)
        wanted = adt.PeerLostError if ender == "owner" else adt.ClosedError
        assert all(isinstance(result, wanted) for result in results), results


async def test_the_same_peers_link_again(hixl: Controls) -> None:
    async with over_hixl() as pair:
        theirs, mine = await caches(pair)
        for number in range(3):
            await pair.user.unlink(adt.ClusterInfo(OWNER))
            await pair.user.link(adt.ClusterInfo(OWNER, str(pair.owner.listen_address)))
            await pair.user.cache_manager.pull_blocks(KEY, mine, [number], [50], wait=True)
            same(theirs, mine, [number], [50])


async def test_limits_are_named(hixl: Controls) -> None:
    page = 4096
    base = np.zeros(4200 * page, np.uint8)
    config = adt.Config(transports=("hixl",))
    async with adt.DataDist(OWNER, config=config) as dd:
        many = [base[i * page : (i + 1) * page].reshape(4, -1) for i in range(4097)]
        with pytest.raises(adt.DataDistError, match="4096"):
            await dd.cache_manager.register_blocks_cache(many, remote=None).ready()
        few = dd.cache_manager.register_blocks_cache(many[:8], remote=None)
        await few.ready()
    options = {"GlobalResourceConfig": '{"comm_resource_config": {"protocol_desc": ["hccs:device"]}}'}
    async with adt.DataDist(OWNER, config=adt.Config(transports=("hixl",), hixl_options=options)) as dd:
        start = -base.ctypes.data % (2 << 20) + 64
        with pytest.raises(adt.DataDistError, match="2097152"):
            await dd.cache_manager.register_blocks_cache([base[start : start + page].reshape(4, -1)]).ready()


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (adt.Config(transports=("hixl",), device_id=77), r"aclrtSetDevice\(77\)"),
        (adt.Config(transports=("hixl",), hixl_library="/nowhere/libcann_hixl.so"), "nowhere"),
    ],
)
async def test_why_hixl_cannot_be_used_is_said(hixl: Controls, config: adt.Config, reason: str) -> None:
    with pytest.raises(adt.TransportError, match=reason):
        async with adt.DataDist(OWNER, config=config):
            pass


def test_an_engine_that_nobody_uses_ends(hixl: Controls) -> None:
    engine, words = _hixl.open_engine(adt.Config(transports=("hixl",)), "127.0.0.1")
    assert engine is not None, words
    assert "127.0.0.1:" in words
    assert stats()["engines"] == 1
    began = time.monotonic()
    del engine
    assert stats()["engines"] == 0
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("engine", ["client-server", "hccl-comm"])
async def test_random_rounds_leave_memory_quiet(
    hixl: Controls, monkeypatch: pytest.MonkeyPatch, engine: str, scale: Scale
) -> None:
    """Stalls, failures, cancels, deadlines, late caches and caches taken back, all at once: what is done is quiet."""
    monkeypatch.setenv("HIXL_STANDIN_ENGINE", engine)
    rng = random.Random(f"hixl {engine}")
    async with over_hixl(drain_timeout=0.02) as pair:
        theirs, mine = await caches(pair)
        hixl.set("REUSE", rng.randrange(2))
        for number in range(scale(8)):
            hixl.set("DELAY_US", rng.choice((0, 300)))
            hixl.set("STALL", rng.choice((0, 0, 1, 3)))
            hixl.set("STALL_MS", rng.choice((0, 30)))
            hixl.set("FAIL", rng.choice((0, 0, 2)))
            extra = None
            if rng.random() < 0.5:
                extra = pair.owner.cache_manager.register_blocks_cache(
                    pattern(number, SHAPE), key=adt.BlocksCacheKey(OWNER, model_id=1 + number)
                )
            before = [tensor.copy() for tensor in theirs.tensors]
            order = rng.sample(range(SHAPE[0]), SHAPE[0])
            quiet: dict[int, bytes] = {}
            pulls = []
            for start in range(0, len(order), 4):
                blocks = order[start : start + 4]
                timeout = rng.choice((0.5, 0.5, 0.005))
                pull = pair.user.cache_manager.pull_blocks(KEY, mine, blocks[::-1], blocks, timeout=timeout)
                pull.add_done_callback(_Held(mine, blocks, quiet))
                pulls.append((pull, blocks))
            await asyncio.sleep(rng.random() * 0.01)
            for pull, _ in rng.sample(pulls, 4):
                pull.cancel()
            if extra is not None:
                await extra.ready()
                await pair.owner.cache_manager.unregister_cache(extra, timeout=120.0)
            results = await asyncio.gather(*(pull for pull, _ in pulls), return_exceptions=True)
            hixl.set("STALL", 0)
            for (_, blocks), result in zip(pulls, results, strict=True):
                if isinstance(result, BaseException):
                    # One may fail twice by the failures of its neighbours' connection.
                    allowed = (asyncio.CancelledError, adt.TransferTimeout, adt.TransportError)
                    assert isinstance(result, allowed), result
                else:
                    same(theirs, mine, blocks[::-1], blocks)
            await asyncio.sleep(0.01)
            assert len(quiet) == SHAPE[0]
            assert all(_held(mine, block) == was for block, was in quiet.items())
            for tensor, was in zip(theirs.tensors, before, strict=True):
                np.testing.assert_array_equal(tensor, was)
        hixl.set("FAIL", 0)
        await pair.user.cache_manager.pull_blocks(KEY, mine, [3], [4])
        same(theirs, mine, [3], [4])


class _Held:
    """Keeps what blocks hold when their transfer is done."""

    def __init__(self, cache: adt.Cache, blocks: list[int], into: dict[int, bytes]) -> None:
        self.cache, self.blocks, self.into = cache, blocks, into

    def __call__(self, done: object) -> None:
        self.into.update((block, _held(self.cache, block)) for block in self.blocks)


def _held(cache: adt.Cache, block: int) -> bytes:
    return b"".join(tensor[block].tobytes() for tensor in cache.tensors)
