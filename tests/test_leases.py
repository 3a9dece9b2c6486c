"""Leases, from the prefill node that holds blocks to the decode node that adopts, pulls and releases them."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

import aiodatadist as adt

from . import lease_rounds
from .conftest import Scale
from .pairs import OWNER, USER, Pair, linked
from .peers import spawn

pytestmark = pytest.mark.loop

TRANSPORTS = ("shm", "tcp")
LONG = 3600.0
BLOCKS, BLOCK_BYTES = 64, 4096


@pytest.fixture(params=TRANSPORTS)
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    names = ("shm", "tcp") if request.param == "shm" else ("tcp",)
    async with linked(*names) as made:
        yield made
        made.__dict__.clear()  # pytest keeps what fixtures gave, and nothing native may be left


async def offer(pair: Pair, blocks: int = BLOCKS, **options: Any) -> adt.Cache:
    return await pair.offer([np.zeros((blocks, BLOCK_BYTES), np.uint8) for _ in range(2)], **options)


def leases(dd: adt.DataDist) -> dict[str, Any]:
    found: dict[str, Any] = dd.stats()["leases"]
    return found


async def next_of(events: adt.EventStream, *kinds: Any) -> Any:
    async for event in events:
        if isinstance(event, kinds):
            return event
    raise AssertionError("the events have ended")


async def test_a_lease_from_hold_to_release(pair: Pair) -> None:
    cache = await offer(pair)
    caches = pair.owner.cache_manager
    here, there = pair.owner.events(), pair.user.events()
    lease = caches.hold(cache, np.array([5, 3, 5], np.uint16), LONG, peer=USER)
    assert lease.blocks.tolist() == [3, 5]
    assert (lease.state, lease.adopted, lease.end, lease.peer) == ("held", False, None, USER)
    assert lease.nbytes == 2 * 2 * BLOCK_BYTES
    assert LONG - 60 < lease.expires_in <= LONG
    assert np.flatnonzero(caches.held(cache)).tolist() == [3, 5]
    assert await pair.user.adopt_lease(OWNER, lease.id) == LONG
    assert await pair.user.adopt_lease(OWNER, lease.id) == LONG
    assert lease.adopted
    other = caches.hold(cache, range(4, 6), LONG)
    stats = leases(pair.owner)
    assert (stats["held"], stats["ending"], stats["blocks"], stats["bytes"]) == (2, 0, 3, 3 * 2 * BLOCK_BYTES)
    assert (stats["deferred_bytes"], leases(pair.user)["adopted"]) == (0, 1)
    assert LONG - 60 < stats["next_expiry"] <= LONG

    mine = await pair.take([np.ones((BLOCKS, BLOCK_BYTES), np.uint8) for _ in range(2)])
    await pair.user.cache_manager.pull_blocks(adt.BlocksCacheKey(OWNER), mine, [3, 5], [3, 5])
    assert await pair.user.release_lease(OWNER, lease.id) is True
    assert await lease.wait_over() is adt.LeaseEnd.RELEASED
    assert (lease.state, lease.end, lease.expires_in, lease.adopted) == ("over", adt.LeaseEnd.RELEASED, 0.0, False)
    assert np.flatnonzero(caches.held(cache)).tolist() == [4, 5]
    event = await next_of(here, adt.LeaseReleased, adt.LeaseExpired)
    assert event == adt.LeaseReleased(lease.id, cache.id, USER, lease.nbytes, adt.LeaseEnd.RELEASED)

    async with other:
        await pair.user.adopt_lease(OWNER, other.id)
    assert other.end is adt.LeaseEnd.RELEASED
    assert await next_of(there, adt.LeaseLost) == adt.LeaseLost(OWNER, other.id, adt.LeaseEnd.RELEASED)
    assert not caches.held(cache).any()
    assert leases(pair.user)["lost"]["released"] == 1
    assert repr(other.id) in repr(other)


async def test_what_cannot_be_held(pair: Pair) -> None:
    cache = await offer(pair)
    hold = pair.owner.cache_manager.hold
    for blocks in ([BLOCKS], [-1], [2**63], np.array([0, BLOCKS], np.int64), np.array([2**64 - 1], np.uint64)):
        with pytest.raises(adt.BlockIndexError):
            hold(cache, blocks, 1.0)
    for blocks in ([0.5], "12", np.zeros(BLOCKS, bool), [True], 3):
        with pytest.raises(adt.ArgumentTypeError):
            hold(cache, blocks, 1.0)  # type: ignore[arg-type]
    for ttl in (0, -1.0, float("nan"), float("inf"), 0.001, 10**400):
        with pytest.raises(adt.ArgumentError):
            hold(cache, [1], ttl)
    for ttl in (None, "1", True):
        with pytest.raises(adt.ArgumentTypeError):
            hold(cache, [1], ttl)  # type: ignore[arg-type]
    for peer in (-1, 2**64, OWNER):
        with pytest.raises(adt.ArgumentError):
            hold(cache, [1], 1.0, peer=peer)
    mine = await pair.take([np.zeros((4, 4), np.uint8)])
    with pytest.raises(adt.ArgumentError):
        hold(mine, [1], 1.0)
    with pytest.raises(adt.ArgumentError):
        pair.owner.adopt_lease(OWNER, 1)
    with pytest.raises(adt.ArgumentError):
        pair.owner.release_lease(OWNER, 1)
    with pytest.raises(adt.NotLinkedError):
        pair.owner.adopt_lease(77, 1)
    assert leases(pair.owner)["held"] == 0
    empty = hold(cache, [], 1.0)
    assert (empty.nbytes, empty.blocks.size) == (0, 0)
    await empty.release()
    await pair.owner.cache_manager.unregister_cache(cache)
    with pytest.raises(adt.ClosedError):
        hold(cache, [1], 1.0)


async def test_a_lease_belongs_to_its_loop(pair: Pair) -> None:
    lease = pair.owner.cache_manager.hold(await offer(pair), [1], LONG)
    caught: list[BaseException] = []

    def elsewhere() -> None:
        for call in (lease.release, lease.wait_over):
            try:
                call()
            except adt.WrongLoopError as why:
                caught.append(why)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert len(caught) == 2
    assert lease.state == "held"


# --- aborts, refusals, unknown ids ------------------------------------------------------------------------------------


async def test_l1_no_lease_is_left_after_random_aborts(pair: Pair, scale: Scale) -> None:
    tally = await lease_rounds.rounds(pair, range(scale(400, least=50)))
    assert tally.causes["cancel"] > 0
    assert tally.ends["released"] > 0
    assert not [row for dd in (pair.owner, pair.user) for row in dd.dump() if "lease" in row.kind]


async def test_l1_an_adoption_that_is_given_up_is_given_back(pair: Pair) -> None:
    cache = await offer(pair)
    lease = pair.owner.cache_manager.hold(cache, [1], LONG)
    adoption = pair.user.adopt_lease(OWNER, lease.id)
    assert not adoption.done()
    assert [row.kind for row in pair.user.dump()] == ["adopt-lease"]
    adoption.cancel()
    assert adoption.cancelled()
    assert await lease.wait_over() is adt.LeaseEnd.RELEASED
    assert leases(pair.user)["adopted"] == 0

    # But not what another call wants, or has.
    lease = pair.owner.cache_manager.hold(cache, [1], LONG)
    first, second = (pair.user.adopt_lease(OWNER, lease.id) for _ in range(2))
    first.cancel()
    assert await second == LONG
    pair.user.adopt_lease(OWNER, lease.id).cancel()
    assert await pair.user.adopt_lease(OWNER, lease.id) == LONG
    assert lease.adopted
    # A release ends the adoptions that are on their way.
    late = pair.user.adopt_lease(OWNER, lease.id)
    assert await pair.user.release_lease(OWNER, lease.id) is True
    with pytest.raises(adt.LeaseError):
        await late
    assert leases(pair.user)["adopted"] == 0


async def test_l2_a_refusal_frees_at_once(pair: Pair) -> None:
    """The consumer has not adopted it, and says no: the owner waits for no TTL."""
    lease = pair.owner.cache_manager.hold(await offer(pair), [1, 2], LONG, peer=USER)
    refusal = pair.user.release_lease(OWNER, lease.id)
    # The owner's answer and the end of the lease come with the same round trip, which some turns of the loop are.
    assert await refusal is True
    assert await lease.wait_over() is adt.LeaseEnd.RELEASED


async def test_l3_releasing_what_is_unknown_or_over_is_harmless_and_told(pair: Pair) -> None:
    cache = await offer(pair)
    lease = pair.owner.cache_manager.hold(cache, [1], LONG, peer=USER)
    stranger = pair.owner.cache_manager.hold(cache, [2], LONG, peer=77)
    for unknown in (0, 1, 2**64 - 1, stranger.id):
        assert await pair.user.release_lease(OWNER, unknown) is False
        with pytest.raises(adt.LeaseError):
            await pair.user.adopt_lease(OWNER, unknown)
    assert await pair.user.release_lease(OWNER, lease.id) is True
    assert await pair.user.release_lease(OWNER, lease.id) is False
    assert await pair.user.release_lease(77, lease.id) is False  # not linked
    assert await lease.release() is adt.LeaseEnd.RELEASED
    assert stranger.state == "held"
    assert await stranger.release() is adt.LeaseEnd.RELEASED
    assert leases(pair.owner)["ended"] == {"released": 2, "expired": 0, "peer_lost": 0, "closed": 0}


# --- time -------------------------------------------------------------------------------------------------------------


async def test_l4_a_lease_that_nobody_adopts_expires_at_its_ttl(pair: Pair) -> None:
    cache = await offer(pair)
    events = pair.owner.events()
    began = time.monotonic()  # the engine's clock; uvloop's counts whole milliseconds
    lease = pair.owner.cache_manager.hold(cache, [1], 0.05, peer=USER)
    event = await next_of(events, adt.LeaseExpired)
    assert time.monotonic() - began >= 0.05
    assert event == adt.LeaseExpired(lease.id, cache.id, USER, lease.nbytes, adt.LeaseEnd.EXPIRED)
    assert await lease.wait_over() is adt.LeaseEnd.EXPIRED
    with pytest.raises(adt.LeaseError):
        await pair.user.adopt_lease(OWNER, lease.id)


async def test_l4_a_consumer_whose_loop_is_blocked_keeps_its_leases() -> None:
    """Its engine renews; stopped altogether, it loses them at the TTL, and not before."""
    async with (
        adt.DataDist(OWNER, listen="127.0.0.1:0", config=adt.Config(heartbeat_limit=60.0)) as owner,
        spawn(USER, listen=None, heartbeat_limit=60.0) as peer,
    ):
        cache = owner.cache_manager.register_blocks_cache([np.zeros((8, 8), np.uint8)])
        await peer.call("link", cluster_id=OWNER, address=str(owner.listen_address))
        lease = owner.cache_manager.hold(cache, [1], 2.0, peer=USER)
        await peer.run(f"await dd.adopt_lease({OWNER}, {lease.id})")
        began = time.monotonic()
        await peer.run("import time; time.sleep(3.0)")
        assert time.monotonic() - began >= 3.0
        assert lease.state == "held"
        assert lease.adopted

        peer.stop()
        stopped, left = asyncio.get_running_loop().time(), lease.expires_in
        waiting = lease.wait_over()
        while lease.state == "held":
            await asyncio.sleep(0.005)
        assert asyncio.get_running_loop().time() - stopped >= left - 0.01
        # Over shm a stopped process may touch memory when it wakes: the lease has ended, and is not over.
        assert lease.state == "ending"
        stats = leases(owner)
        assert (stats["held"], stats["ending"], stats["deferred_bytes"]) == (0, 1, lease.nbytes)
        assert owner.cache_manager.held(cache)[1]
        assert not waiting.done()
        peer.resume()
        assert await waiting is adt.LeaseEnd.EXPIRED
        assert leases(owner)["deferred_bytes"] == 0


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_l7_the_hold_of_a_killed_consumer_ends_at_the_ttl(transport: str) -> None:
    config = adt.Config(transports=(transport, "tcp") if transport == "shm" else ("tcp",))
    loop = asyncio.get_running_loop()
    async with (
        adt.DataDist(OWNER, listen="127.0.0.1:0", config=config) as owner,
        spawn(USER, listen=None, transports=list(config.transports)) as peer,
    ):
        cache = owner.cache_manager.register_blocks_cache([np.zeros((8, 8), np.uint8)])
        await peer.call("link", cluster_id=OWNER, address=str(owner.listen_address))
        lease = owner.cache_manager.hold(cache, [1], 1.0, peer=USER)
        await peer.run(f"await dd.adopt_lease({OWNER}, {lease.id})")
        left, asked = lease.expires_in, loop.time()
        peer.kill()
        assert await lease.wait_over() is adt.LeaseEnd.PEER_LOST
        assert loop.time() - asked >= left - 0.01
        assert not owner.cache_manager.held(cache).any()


async def test_l7_a_consumer_hears_that_the_owner_was_killed() -> None:
    async with spawn(OWNER) as peer, adt.DataDist(USER) as user:
        await peer.cache("kv")
        await user.link(peer.info)
        events = user.events()
        lease_id = await peer.run(
            f"return dd.cache_manager.hold(peer.caches['kv'], [1, 2], {LONG}, peer={USER}).id",
        )
        assert await user.adopt_lease(OWNER, lease_id) == LONG
        peer.kill()
        assert await next_of(events, adt.LeaseLost) == adt.LeaseLost(OWNER, lease_id, adt.LeaseEnd.PEER_LOST)
        assert leases(user)["adopted"] == 0
        assert await user.release_lease(OWNER, lease_id) is False


async def test_after_linking_again_a_lease_can_be_adopted_again(pair: Pair) -> None:
    lease = pair.owner.cache_manager.hold(await offer(pair), [1], LONG)
    await pair.user.adopt_lease(OWNER, lease.id)
    events = pair.user.events()
    await pair.user.unlink(adt.ClusterInfo(OWNER))
    assert await next_of(events, adt.LeaseLost) == adt.LeaseLost(OWNER, lease.id, adt.LeaseEnd.PEER_LOST)
    assert (lease.state, lease.adopted) == ("held", False)
    await pair.user.link(adt.ClusterInfo(OWNER, str(pair.owner.listen_address)))
    assert await pair.user.adopt_lease(OWNER, lease.id) == LONG
    assert lease.adopted
    assert await pair.user.release_lease(OWNER, lease.id) is True
    assert await lease.wait_over() is adt.LeaseEnd.RELEASED


# --- what must be quiet -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["pull", "push"])
@pytest.mark.parametrize("how", ["expired", "released"])
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_u5_a_lease_is_not_over_while_a_transfer_is_in_flight(transport: str, how: str, kind: str) -> None:
    """The consumer is stopped in the middle of traffic: what it holds of the owner's memory is not reused."""
    names = ("shm", "tcp") if transport == "shm" else ("tcp",)
    config = adt.Config(transports=names, heartbeat_limit=60.0, drain_timeout=60.0)
    shape = (512, 16384)
    async with (
        adt.DataDist(OWNER, listen="127.0.0.1:0", config=config) as owner,
        spawn(USER, listen=None, transports=list(names), heartbeat_limit=60.0) as peer,
    ):
        cache = owner.cache_manager.register_blocks_cache(
            [np.zeros(shape, np.uint8) for _ in range(4)], key=adt.BlocksCacheKey(OWNER)
        )
        await cache.ready()
        await peer.call("link", cluster_id=OWNER, address=str(owner.listen_address))
        await peer.cache("mine", tensors=4, shape=shape, model_id=None)
        number = await peer.call("begin_traffic", kind=kind, name="mine", cluster_id=OWNER)
        while not (await peer.call("traffic", number=number))["done"]:
            await asyncio.sleep(0.001)
        lease = owner.cache_manager.hold(cache, range(512), LONG if how == "released" else 0.05, peer=USER)
        peer.stop()
        waiting = lease.release() if how == "released" else lease.wait_over()
        while lease.state == "held":
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)  # the answer of a peer that runs would be there
        assert lease.state == "ending"
        assert owner.cache_manager.held(cache).all()
        assert leases(owner)["deferred_bytes"] == lease.nbytes
        peer.resume()
        assert await waiting is (adt.LeaseEnd.RELEASED if how == "released" else adt.LeaseEnd.EXPIRED)
        assert not owner.cache_manager.held(cache).any()
        assert (await peer.call("end_traffic", number=number))["error"] is None


async def test_l8_a_scheduler_that_waits_for_leases_makes_progress(pair: Pair, scale: Scale) -> None:
    """More requests than blocks, and each waits for an event instead of evicting or polling."""
    cache = await offer(pair, 8)
    mine = await pair.take([np.zeros((8, BLOCK_BYTES), np.uint8) for _ in range(2)])
    caches, events = pair.owner.cache_manager, pair.owner.events()
    draw, tasks, deferred = random.Random(2), set(), []

    async def consume(lease_id: int, block: int) -> None:
        if draw.random() < 0.2:
            return  # forgets it: the lease runs out
        with contextlib.suppress(adt.LeaseError):
            await pair.user.adopt_lease(OWNER, lease_id)
            await pair.user.cache_manager.pull_blocks(adt.BlocksCacheKey(OWNER), mine, [block], [block])
        await pair.user.release_lease(OWNER, lease_id)

    served = ended = 0
    wanted = scale(100, least=20)
    while served < wanted:
        free = np.flatnonzero(~caches.held(cache))
        for block in free.tolist():
            lease = caches.hold(cache, [block], 0.05, peer=USER)
            tasks.add(asyncio.create_task(consume(lease.id, block)))
            served += 1
        stats = leases(pair.owner)
        assert stats["next_expiry"] is None or 0 <= stats["next_expiry"] <= 0.05
        deferred.append(stats["deferred_bytes"])
        await next_of(events, adt.LeaseExpired, adt.LeaseReleased)
        ended += 1
    await asyncio.gather(*tasks)
    while caches.held(cache).any():
        await next_of(events, adt.LeaseExpired, adt.LeaseReleased)
    assert sum(leases(pair.owner)["ended"].values()) == served
    assert all(0 <= number <= cache.geometry.num_blocks * 2 * BLOCK_BYTES for number in deferred)


async def test_v1_how_leases_ended_is_counted_apart_from_transfers(pair: Pair) -> None:
    cache = await offer(pair)
    hold, owner, user = pair.owner.cache_manager.hold, pair.owner, pair.user
    there = user.events()

    def counts() -> tuple[dict[str, int], dict[str, int], int]:
        counters = user.stats()["total"]
        failed = sum(counters[name] for name in ("failed", "timed_out", "peer_lost", "aborted", "lease_expired"))
        return leases(owner)["ended"], leases(user)["lost"], failed

    zero = dict.fromkeys(("released", "expired", "peer_lost", "closed"), 0)
    assert counts() == (zero, zero, 0)

    # A transfer fails: no lease is counted.
    mine = await pair.take([np.zeros((BLOCKS, BLOCK_BYTES), np.uint8) for _ in range(2)])
    lease = hold(cache, [1], LONG, peer=USER)
    await user.adopt_lease(OWNER, lease.id)
    transfer = user.cache_manager.pull_blocks(
        adt.BlocksCacheKey(OWNER), mine, range(BLOCKS), range(BLOCKS), timeout=1e-6
    )
    with contextlib.suppress(adt.TransferTimeout):
        await transfer
    failed = counts()[2]
    assert counts() == (zero, zero, failed)

    # A lease expires: no transfer is counted.
    await hold(cache, [2], 0.02, peer=USER).wait_over()
    assert counts() == ({**zero, "expired": 1}, zero, failed)

    # The link is lost, and then the time is over.
    short = hold(cache, [3], 1.0, peer=USER)
    await user.adopt_lease(OWNER, short.id)
    await user.unlink(adt.ClusterInfo(OWNER), force=True)
    assert await short.wait_over() is adt.LeaseEnd.PEER_LOST
    assert counts() == ({**zero, "expired": 1, "peer_lost": 1}, {**zero, "peer_lost": 2}, failed)

    # The owner takes its cache back.
    await user.link(adt.ClusterInfo(OWNER, str(owner.listen_address)))
    await user.adopt_lease(OWNER, lease.id)
    await owner.cache_manager.unregister_cache(cache)
    assert await lease.wait_over() is adt.LeaseEnd.CLOSED
    while (await next_of(there, adt.LeaseLost)).end is not adt.LeaseEnd.CLOSED:
        pass
    assert counts() == (
        {**zero, "expired": 1, "peer_lost": 1, "closed": 1},
        {**zero, "peer_lost": 2, "closed": 1},
        failed,
    )


# --- closing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["aclose", "abort"])
async def test_closing_the_owner_ends_its_leases(pair: Pair, how: str) -> None:
    cache = await offer(pair)
    adopted, free = (pair.owner.cache_manager.hold(cache, [i], LONG, peer=peer) for i, peer in ((1, USER), (2, 77)))
    await pair.user.adopt_lease(OWNER, adopted.id)
    events, theirs = pair.owner.events(), pair.user.events()
    waiting = [adopted.wait_over(), free.wait_over()]
    if how == "aclose":
        await pair.owner.aclose(10.0)
    else:
        pair.owner.abort()
        await pair.owner.wait_closed()
    assert await asyncio.gather(*waiting) == [adt.LeaseEnd.CLOSED] * 2
    assert [event.end async for event in events if isinstance(event, adt.LeaseReleased)] == [adt.LeaseEnd.CLOSED] * 2
    assert (await next_of(theirs, adt.LeaseLost)).lease_id == adopted.id
    assert (adopted.state, await adopted.release(), await free.wait_over()) == ("over", *[adt.LeaseEnd.CLOSED] * 2)
    with pytest.raises(adt.ClosedError):
        pair.owner.cache_manager.hold(cache, [1], LONG)


@pytest.mark.parametrize("how", ["aclose", "abort"])
async def test_closing_the_consumer(pair: Pair, how: str) -> None:
    """In good order it releases what it has adopted; else the TTL ends it."""
    lease = pair.owner.cache_manager.hold(await offer(pair), [1], LONG if how == "aclose" else 1.0, peer=USER)
    await pair.user.adopt_lease(OWNER, lease.id)
    pending = pair.user.adopt_lease(OWNER, 5)
    if how == "aclose":
        await pair.user.aclose(10.0)
    else:
        pair.user.abort()
        await pair.user.wait_closed()
    assert pending.done()
    assert pending.exception() is not None
    expected = adt.LeaseEnd.RELEASED if how == "aclose" else adt.LeaseEnd.PEER_LOST
    assert await lease.wait_over() is expected


async def test_cancelling_a_wait_for_the_end_changes_nothing(pair: Pair) -> None:
    lease = pair.owner.cache_manager.hold(await offer(pair), [1], LONG)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.001):
            await lease.wait_over()
    kept = lease.wait_over()
    lease.wait_over().cancel()
    assert lease.state == "held"
    lease.release().cancel()
    assert await kept is adt.LeaseEnd.RELEASED
