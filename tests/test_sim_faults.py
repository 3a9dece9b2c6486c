"""Faults that users of other transfer libraries met, in the simulated cluster: at every moment, and by the clock.

`test_project` keeps the list of their ids.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

import aiodatadist as adt
from aiodatadist.testing import Access, SimCluster, Way

from .pairs import pattern
from .test_sim import KEY, OWNER, TRANSPORTS, USER, seen, simulated, two

FIXED = Way(latency=(1e-3, 1e-3))  # one trip is a millisecond
TRIP = 1e-3
SLOW = Way(latency=(1e-4, 1e-4), bandwidth=1e6, fragment=1024)
LATE = Way(latency=(1e-4, 1e-3), fragment=256, visible=(0.0, 0.5), reorder=0.5, reorder_by=0.5)
LOSSY = Way(latency=(1e-4, 5e-3), loss=0.3, resend=0.05, split=0.5, reorder=0.3, reorder_by=0.01, duplicate=0.3)
ALL = list(range(64))


async def next_of(events: adt.EventStream, *kinds: type[Any]) -> Any:
    async for event in events:
        if isinstance(event, kinds):
            return event
    raise AssertionError("the events ended")


async def lost(sim: SimCluster, cluster_id: int, peer: int) -> None:
    while peer in sim[cluster_id].links:
        await asyncio.sleep(0.05)


def pull(sim: SimCluster, mine: adt.Cache, blocks: list[int], **options: Any) -> adt.Transfer[None]:
    return sim[USER].cache_manager.pull_blocks(KEY, mine, blocks, blocks, **options)


def push(sim: SimCluster, mine: adt.Cache, blocks: list[int], **options: Any) -> adt.Transfer[None]:
    return sim[USER].cache_manager.push_blocks(KEY, mine, blocks, blocks, **options)


# Timeouts and hangs. ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("how", ["cancel", "deadline"])
def test_t1_the_owner_hears_within_a_trip_that_a_push_has_failed(transport: str, how: str) -> None:
    async def check(sim: SimCluster) -> None:
        _, mine = await two(sim, (64, 4096), transports=(transport,))
        sim.set_way(FIXED.replace(bandwidth=1e7, fragment=4096))
        events = sim[OWNER].events()
        transfer = push(sim, mine, ALL, timeout=5e-3 if how == "deadline" else 60.0)
        await asyncio.sleep(2e-3)
        if how == "cancel":
            transfer.cancel()
        await asyncio.wait([transfer])
        at = sim.now()
        event = await next_of(events, adt.TransferEnded)
        assert (event.cluster_id, event.kind) == (USER, "push")
        # The future ends when local memory is quiet; the word is sent once the wire is, and queues behind the data.
        assert sim.now() - at <= 2 * TRIP + 64 * 2 * 4096 / 1e7

    simulated(check)


@pytest.mark.parametrize("opcode", [pull, push])
def test_t3_a_deadline_holds_to_the_microsecond_where_all_is_silent(opcode: Callable[..., Any]) -> None:
    async def check(sim: SimCluster) -> None:
        _, mine = await two(sim, drain_timeout=0.5)
        events = sim[USER].events()
        sim.block(USER, OWNER)
        sim.block(OWNER, USER)
        before = sim.now()
        with pytest.raises(adt.TransferTimeout):
            await opcode(sim, mine, [1, 2], timeout=2.0)
        assert sim.now() - before == pytest.approx(2.5, abs=1e-4)  # what does not drain ends by force
        changed = await next_of(events, adt.LinkStateChanged)
        assert changed.new is adt.LinkState.BROKEN
        assert sim.now() - before < 15.0

    simulated(check)


@pytest.mark.parametrize("silent", [False, True])
def test_t4_a_peer_that_dies_in_the_handshake_fails_all_who_wait(silent: bool) -> None:
    async def check(sim: SimCluster) -> None:
        await sim.datadist(OWNER)
        user = await sim.datadist(USER)
        before = sim.now()
        links = [user.link(sim.info(OWNER), timeout=3.0) for _ in range(20)]
        while not any(event[1:4] == ("stream", USER, OWNER) for event in sim.trace.events):
            await asyncio.sleep(1e-5)
        sim.crash(OWNER, silent=silent)
        ends = await asyncio.gather(*links, return_exceptions=True)
        assert all(isinstance(end, adt.LinkError) for end in ends), ends
        assert sim.now() - before <= 3.0 + 1e-3
        assert user.dump() == []

    simulated(check)


@pytest.mark.seeds(20)
def test_t5_both_sides_link_at_once_and_neither_waits_for_ever(seed: int) -> None:
    async def check(sim: SimCluster) -> None:
        one, other = await sim.datadist(OWNER), await sim.datadist(USER)
        sim.set_way(Way(latency=(1e-5, 5e-3), split=0.5))

        async def link(dd: adt.DataDist, to: int) -> adt.Link:
            await asyncio.sleep(sim.random.uniform(0, 5e-3))
            return await dd.link(sim.info(to))

        links = await asyncio.gather(*(link(one, USER) for _ in range(3)), *(link(other, OWNER) for _ in range(3)))
        assert {link.state for link in links} == {adt.LinkState.READY}

    simulated(check, seed)


@pytest.mark.seeds(20)
def test_t7_lost_and_late_control_messages_hang_nothing(seed: int) -> None:
    async def check(sim: SimCluster) -> None:
        sim.set_way(LOSSY)
        theirs, mine = await two(sim, transports=(TRANSPORTS[seed % 2],))
        for number in range(3):
            await pull(sim, mine, [number], notify=b"%d" % number)
        notes = sim[OWNER].notifications()
        assert [(await anext(notes)).payload for _ in range(3)] == [b"0", b"1", b"2"]
        await sim[OWNER].cache_manager.unregister_cache(theirs)
        await sim[USER].unlink(adt.ClusterInfo(OWNER))
        assert not sim[OWNER].links

    simulated(check, seed)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("silent", [False, True])
def test_t8_closing_beside_a_dead_peer_is_bounded(transport: str, silent: bool) -> None:
    async def check(sim: SimCluster) -> None:
        _, mine = await two(sim, (64, 16384), transports=(transport,))
        sim.set_way(SLOW)
        transfer = push(sim, mine, ALL, timeout=None)
        await asyncio.sleep(1e-2)
        sim.crash(OWNER, silent=silent)
        before = sim.now()
        await sim[USER].aclose(timeout=2.0)
        assert sim.now() - before < 10.0
        assert isinstance(transfer.exception(), (adt.PeerLostError, adt.ClosedError))
        await asyncio.sleep(1.0)  # the network has seen what the engine has closed
        assert not sim.network.host(USER).ends

    simulated(check)


@pytest.mark.parametrize("call", ["link", "unlink", "fence", "pull", "push", "adopt", "release", "layers"])
def test_t10_each_wait_ends_at_its_deadline(call: str) -> None:
    async def check(sim: SimCluster) -> None:
        theirs, mine = await two(sim, drain_timeout=0.1)
        user = sim[USER]
        lease = sim[OWNER].cache_manager.hold(theirs, [1], 60.0)
        third, gate = await sim.datadist(3), adt.LayerGate(1)
        for one, other in ((USER, OWNER), (OWNER, USER), (3, OWNER), (OWNER, 3)):
            sim.block(one, other)
        calls: dict[str, Callable[[], Awaitable[Any]]] = {
            "link": lambda: third.link(sim.info(OWNER), timeout=0.7),
            "unlink": lambda: user.unlink(adt.ClusterInfo(OWNER), timeout=0.7),
            "fence": lambda: user.fence(OWNER, timeout=0.05),  # beyond drain_timeout the engine shuts the peer out
            "pull": lambda: pull(sim, mine, [1], timeout=0.7),
            "push": lambda: push(sim, mine, [1], timeout=0.7),
            "adopt": lambda: user.adopt_lease(OWNER, lease.id, timeout=0.7),
            "release": lambda: user.release_lease(OWNER, lease.id, timeout=0.7),
            "layers": lambda: user.cache_manager.transfer_cache_async(
                mine, gate, [adt.TransferWithCacheKeyConfig(KEY)], [1], [1], timeout=0.7
            ),
        }
        before = sim.now()
        if call == "layers":
            (result,) = await calls[call]()
            assert isinstance(result.error, TimeoutError)
        else:
            with pytest.raises(TimeoutError):
                await calls[call]()
        assert sim.now() - before == pytest.approx(0.05 if call == "fence" else 0.7, abs=0.101)

    simulated(check)


# Leases. ----------------------------------------------------------------------------------------------------


@pytest.mark.seeds(10)
def test_l1_no_lease_is_left_after_random_aborts(seed: int) -> None:
    async def check(sim: SimCluster) -> None:
        theirs, mine = await two(sim)
        sim.set_way(LOSSY)

        async def request(block: int) -> None:
            lease = sim[OWNER].cache_manager.hold(theirs, [block], 1.0, peer=USER)
            with contextlib.suppress(asyncio.CancelledError, adt.DataDistError, TimeoutError):
                async with asyncio.timeout(sim.random.uniform(0, 0.5)):
                    await sim[USER].adopt_lease(OWNER, lease.id)
                    await pull(sim, mine, [block])
            await sim[USER].release_lease(OWNER, lease.id)

        await asyncio.gather(*(request(block) for block in range(20)))
        await asyncio.sleep(5.0)
        stats = sim[OWNER].stats()["leases"]
        assert (stats["held"], stats["ending"], stats["deferred_bytes"]) == (0, 0, 0)
        assert not sim[OWNER].cache_manager.held(theirs).any()

    simulated(check, seed)


def test_l2_l3_a_refusal_frees_within_a_round_trip() -> None:
    async def check(sim: SimCluster) -> None:
        theirs, mine = await two(sim)
        sim.set_way(FIXED)
        lease = sim[OWNER].cache_manager.hold(theirs, [1, 2], 480.0, peer=USER)
        aborted = pull(sim, mine, [1])
        aborted.cancel()
        await asyncio.wait([aborted])
        assert await sim[USER].release_lease(OWNER, lease.id + 1) is False  # nobody's: harmless
        before = sim.now()
        released = sim[USER].release_lease(OWNER, lease.id)
        assert await lease.wait_over() is adt.LeaseEnd.RELEASED
        assert sim.now() - before < 2 * TRIP
        assert await released is True

    simulated(check)


@pytest.mark.parametrize("how", ["stop", "block", "crash"])
def test_l4_l7_a_lease_ends_at_its_ttl_and_not_before(how: str) -> None:
    async def check(sim: SimCluster) -> None:
        theirs, _ = await two(sim)
        sim.set_way(FIXED)
        events = sim[OWNER].events()
        lease = sim[OWNER].cache_manager.hold(theirs, [1], 2.0, peer=USER)
        assert await sim[USER].adopt_lease(OWNER, lease.id) == 2.0
        await asyncio.sleep(60.0)
        assert lease.state == "held"  # it is renewed
        before = sim.now()
        if how == "stop":
            sim.stop(USER)
        elif how == "block":
            sim.block(USER, OWNER)
        else:
            sim.crash(USER, silent=True)
        event = await next_of(events, adt.LeaseExpired)
        assert event.lease_id == lease.id
        # Renewals come at a quarter of the TTL; after the end a fence waits for what the peer may still do.
        assert 1.5 <= sim.now() - before <= 2.0 + TRIP + 15.0
        assert lease.expires_in == 0.0
        assert not sim[OWNER].cache_manager.held(theirs).any()

    simulated(check)


def test_l5_zero_work_ends_well_and_is_told() -> None:
    async def check(sim: SimCluster) -> None:
        _, mine = await two(sim)
        await pull(sim, mine, [], notify=b"full hit")
        assert (await anext(sim[OWNER].notifications())).payload == b"full hit"

    simulated(check)


def test_l7_the_consumer_hears_that_the_owner_has_gone() -> None:
    async def check(sim: SimCluster) -> None:
        theirs, _ = await two(sim)
        events = sim[USER].events()
        lease = sim[OWNER].cache_manager.hold(theirs, [1], 60.0, peer=USER)
        await sim[USER].adopt_lease(OWNER, lease.id)
        sim.crash(OWNER)
        event = await next_of(events, adt.LeaseLost)
        assert event.lease_id == lease.id

    simulated(check)


def test_l8_a_scheduler_knows_what_will_be_free() -> None:
    """Blocks whose lease has ended while they are pulled are deferred, and the event that frees them comes."""

    async def check(sim: SimCluster) -> None:
        theirs, mine = await two(sim, (64, 4096))
        sim.set_way(SLOW)
        for _ in range(3):
            events = sim[OWNER].events()
            lease = sim[OWNER].cache_manager.hold(theirs, ALL[:32], 60.0, peer=USER)
            await sim[USER].adopt_lease(OWNER, lease.id)
            transfer = pull(sim, mine, ALL[:32])
            await asyncio.sleep(1e-2)
            ending = lease.release()
            await asyncio.sleep(1e-3)
            assert sim[OWNER].stats()["leases"]["deferred_bytes"] == lease.nbytes
            assert not transfer.done()
            await next_of(events, adt.LeaseReleased)
            assert sim[OWNER].stats()["leases"]["deferred_bytes"] == 0
            await asyncio.gather(transfer, ending)

    simulated(check)


# Memory that is used again. ---------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("how", ["cancel", "deadline", "unlink"])
@pytest.mark.parametrize("drain", [0.0, 0.1, 5.0])
def test_u1_u8_what_comes_late_touches_no_block_that_was_given_back(transport: str, how: str, drain: float) -> None:
    async def check(sim: SimCluster) -> None:
        _, mine = await two(sim, (64, 1024), transports=(transport,), drain_timeout=drain)
        sim.set_way(LATE)
        transfer = pull(sim, mine, ALL, timeout=0.02 if how == "deadline" else 60.0)
        await asyncio.sleep(0.01)
        if how == "cancel":
            sim.stall(OWNER, USER, 1.0)
            transfer.cancel()
        elif how == "unlink":
            sim[USER].unlink(adt.ClusterInfo(OWNER), force=True)
        await asyncio.wait([transfer])
        for tensor in mine.tensors:
            tensor[:] = 0xEE
        await asyncio.sleep(60.0)
        assert all((tensor == 0xEE).all() for tensor in mine.tensors)

    simulated(check)


@pytest.mark.parametrize("opcode", [pull, push])
def test_u2_a_fence_never_ends_before_the_last_access(opcode: Callable[..., Any]) -> None:
    async def check(sim: SimCluster) -> None:
        _, mine = await two(sim, (64, 1024), drain_timeout=0.05)
        sim.set_way(LATE)
        accesses: list[Access] = []
        sim.watch(lambda access: accesses.append(access) if access.cluster_id == OWNER else None)
        transfers = [opcode(sim, mine, ALL[start::4]) for start in range(4)]
        await asyncio.sleep(2e-3)
        for transfer in transfers[:2]:
            transfer.cancel()
        await sim[OWNER].fence(USER)
        count = len(accesses)
        assert count
        await asyncio.wait(transfers)
        await asyncio.sleep(10.0)
        assert len(accesses) == count

    simulated(check)


def test_u4_a_dropped_future_keeps_its_memory() -> None:
    async def check(sim: SimCluster) -> None:
        theirs, mine = await two(sim, (64, 1024))
        sim.set_way(SLOW)
        held = weakref.ref(mine.tensors[0])
        started = pull(sim, mine, ALL, notify=b"there")
        del started, mine
        gc.collect()
        await anext(sim[OWNER].notifications())
        tensor = held()
        assert tensor is not None
        np.testing.assert_array_equal(tensor, theirs.tensors[0])

    simulated(check)


def test_u5_a_lease_is_over_after_the_last_access_to_its_blocks() -> None:
    async def check(sim: SimCluster) -> None:
        theirs, mine = await two(sim, (64, 4096))
        sim.set_way(SLOW)
        last = 0.0

        def watch(access: Access) -> None:
            nonlocal last
            if access.cluster_id == OWNER:
                last = access.at

        sim.watch(watch)
        lease = sim[OWNER].cache_manager.hold(
            theirs, ALL, 0.05, peer=USER
        )  # shorter than the transfer, and not adopted
        transfer = pull(sim, mine, ALL)
        assert await lease.wait_over() is adt.LeaseEnd.EXPIRED
        over = sim.now()
        await transfer
        assert 0.05 < last <= over

    simulated(check)


@pytest.mark.seeds(10)
def test_u6_what_a_notification_follows_is_visible(seed: int) -> None:
    async def check(sim: SimCluster) -> None:
        theirs, mine = await two(sim, (64, 1024))
        sim.set_way(LATE)
        notes = sim[OWNER].notifications()
        transfers = [push(sim, mine, ALL[start::4], notify=bytes([start])) for start in range(4)]
        for _ in range(4):
            start = (await anext(notes)).payload[0]
            for ours, other in zip(mine.tensors, theirs.tensors, strict=True):
                np.testing.assert_array_equal(other[start::4], ours[start::4])
        await asyncio.gather(*transfers)

    simulated(check, seed)


# Peers that die and come back. ------------------------------------------------------------------------------


@pytest.mark.parametrize("silent", [False, True])
def test_p2_p3_a_peer_that_comes_back_is_used_again_with_its_new_memory(silent: bool) -> None:
    async def check(sim: SimCluster) -> None:
        await sim.datadist(OWNER)
        user = await sim.datadist(USER)
        await user.link(sim.info(OWNER), auto_relink=True)
        mine = user.cache_manager.register_blocks_cache(pattern(2, (64, 64)))
        accesses: list[Access] = []
        sim.watch(accesses.append)
        for life in range(1, 4):
            theirs = sim[OWNER].cache_manager.register_blocks_cache(pattern(10 + life, (64, 64)), key=KEY)
            await theirs.ready()
            while OWNER not in user.links:
                await asyncio.sleep(0.1)
            await seen(user.links[OWNER], theirs)
            accesses.clear()
            await pull(sim, mine, ALL)
            np.testing.assert_array_equal(mine.tensors[1], theirs.tensors[1])
            assert {access.incarnation for access in accesses if access.cluster_id == OWNER} == {life}
            sim.crash(OWNER, silent=silent)
            await lost(sim, USER, OWNER)
            await asyncio.sleep(20.0)  # some attempts fail
            await sim.restart(OWNER)

    simulated(check)


def test_p5_a_hundred_callers_share_a_handshake() -> None:
    async def check(sim: SimCluster) -> None:
        await sim.datadist(OWNER)
        user = await sim.datadist(USER)
        links = await asyncio.gather(*(user.link(sim.info(OWNER)) for _ in range(100)))
        assert len(set(map(id, links))) == 1
        # One control and one engine connection.
        assert len([event for event in sim.trace.events if event[1] == "connect"]) == 2

    simulated(check)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("opcode", [pull, push])
def test_p6_p7_what_a_broken_link_has_cut_short_fails_and_is_done_anew(
    transport: str, opcode: Callable[..., Any]
) -> None:
    async def check(sim: SimCluster) -> None:
        theirs, mine = await two(sim, (64, 16384), transports=(transport,))
        sim.set_way(SLOW.replace(bandwidth=1e7))
        epoch = sim[USER].links[OWNER].epoch
        transfer = opcode(sim, mine, ALL)
        await asyncio.sleep(0.01)
        sim.cut(USER, OWNER)
        with pytest.raises(adt.PeerLostError):
            await transfer
        await lost(sim, OWNER, USER)
        sim.set_way(Way())
        link = await sim[USER].link(sim.info(OWNER))
        assert link.epoch > epoch
        await seen(link, theirs)
        await opcode(sim, mine, ALL)
        for ours, other in zip(mine.tensors, theirs.tensors, strict=True):
            np.testing.assert_array_equal(ours, other)

    simulated(check)


# Handshakes. ------------------------------------------------------------------------------------------------


def test_h2_another_name_than_was_meant_is_refused() -> None:
    async def check(sim: SimCluster) -> None:
        await sim.datadist(OWNER)
        user = await sim.datadist(USER)
        with pytest.raises(adt.HandshakeError, match="cluster 9 was meant"):
            await user.link(adt.ClusterInfo(9, sim.info(OWNER).addresses[0]))
        assert not user.links

    simulated(check)


@pytest.mark.seeds(20)
def test_h4_a_peer_that_is_replaced_in_the_middle_of_a_handshake_is_not_taken_for_the_old_one(seed: int) -> None:
    async def check(sim: SimCluster) -> None:
        await sim.datadist(OWNER)
        user = await sim.datadist(USER)
        sim.set_way(FIXED)
        linking = user.link(sim.info(OWNER), timeout=5.0)
        await asyncio.sleep(sim.random.uniform(0, 12 * TRIP))
        owner = await sim.restart(OWNER)
        with contextlib.suppress(adt.LinkError):
            await linking
        theirs = owner.cache_manager.register_blocks_cache(pattern(3, (64, 64)), key=KEY)
        await theirs.ready()
        while True:
            with contextlib.suppress(adt.LinkError, TimeoutError):  # perhaps it is that of the old one
                link = await user.link(sim.info(OWNER))
                async with asyncio.timeout(1.0):
                    await seen(link, theirs)
                break
        mine = user.cache_manager.register_blocks_cache(pattern(4, (64, 64)))
        await pull(sim, mine, ALL)
        np.testing.assert_array_equal(mine.tensors[0], theirs.tensors[0])

    simulated(check, seed)


def test_h5_each_waiter_gets_the_cause() -> None:
    async def check(sim: SimCluster) -> None:
        await sim.datadist(OWNER)
        user = await sim.datadist(USER)
        sim.crash(OWNER)
        ends = await asyncio.gather(*(user.link(sim.info(OWNER)) for _ in range(5)), return_exceptions=True)
        assert len({id(end) for end in ends}) == 5
        for end in ends:
            assert isinstance(end, adt.LinkError)
            why: BaseException | None = end
            while why is not None and not isinstance(why, ConnectionRefusedError):
                why = why.__cause__
            assert why is not None, repr(end)

    simulated(check)


# Time. ------------------------------------------------------------------------------------------------------


@pytest.mark.seeds(10)
def test_e7_how_long_anybody_takes_changes_no_result(seed: int) -> None:
    """Engines and tasks that are late by any time: what comes out is the same."""

    async def check(sim: SimCluster) -> None:
        theirs, mine = await two(sim)
        sim.set_way(Way(latency=(0.0, 2e-3), split=0.5, reorder=0.5, reorder_by=0.01))
        for cluster_id in (OWNER, USER):
            most = sim.random.choice((0.0, 1e-3, 0.05))
            sim.lag(cluster_id, 0.0, most)
        ends = []
        for start in (
            lambda: pull(sim, mine, [0], notify=b"x"),
            lambda: push(sim, mine, [1]),
            lambda: sim[USER].cache_manager.pull_blocks(adt.BlocksCacheKey(OWNER, 5), mine, [0], [0]),
            lambda: sim[USER].link(sim.info(OWNER)),
            lambda: sim[OWNER].fence(USER),
        ):
            try:
                await start()
            except adt.DataDistError as error:
                ends.append(type(error).__name__)
            else:
                ends.append("ok")
        assert ends == ["ok", "ok", "CacheNotFound", "ok", "ok"]
        np.testing.assert_array_equal(mine.tensors[0][[0, 1]], theirs.tensors[0][[0, 1]])

    simulated(check, seed)
