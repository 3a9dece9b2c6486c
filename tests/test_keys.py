"""Keys of batch slots: who finds what under them, which pulls take them, and waiting for one that is not there yet."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import weakref
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

import aiodatadist as adt
from aiodatadist.control import wire

from .hixl_standin import HIXL
from .pairs import OWNER, USER, Pair, linked, pattern
from .peers import spawn

SHAPE = (4, 32)
PATIENCE = 60


def request(number: int, **options: Any) -> adt.CacheKey:
    return adt.CacheKey(OWNER, number, **options)


def prefix(number: int, **options: Any) -> adt.CacheKey:
    return adt.CacheKey(OWNER, prefix_id=number, **options)


async def until(reached: Any) -> None:
    async with asyncio.timeout(PATIENCE):
        while not reached():
            await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def setting(transport: str = "shm", tensors: int = 2) -> AsyncIterator[tuple[Pair, adt.Cache]]:
    """Yield a pair and a cache of the user's to pull into."""
    async with linked(transport) as pair:
        yield pair, await pair.take(pattern(9, SHAPE, tensors=tensors), remote=None)


async def allocated(pair: Pair, keys: list[adt.CacheKey], *, tensors: int = 2, **options: Any) -> adt.Cache:
    cache = pair.owner.cache_manager.allocate_cache(adt.CacheDesc(tensors, SHAPE, "uint8"), keys=keys, **options)
    for i, tensor in enumerate(cache.tensors):
        tensor[...] = np.arange(tensor.size).reshape(SHAPE) + i
    return await pair.shown(cache)


def found(pair: Pair) -> set[adt.CacheKey]:
    """Return the keys that the user knows."""
    return set(pair.link.slots)


# What finds what. -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["shm", "tcp", HIXL])
async def test_each_slot_is_found_under_its_key(transport: str) -> None:
    keys = [request(1), adt.CacheKey(OWNER), prefix(2, model_id=7), request(3, model_id=7, prefix_id=2**64 - 2)]
    async with setting(transport) as (pair, mine):
        theirs = await pair.shown(pair.owner.cache_manager.register_cache(pattern(1, SHAPE), keys=keys))
        assert found(pair) == {request(1), prefix(2, model_id=7), prefix(2**64 - 2, model_id=7)}
        assert dict(theirs.keys) == {0: request(1), 2: prefix(2, model_id=7), 3: prefix(2**64 - 2, model_id=7)}
        for slot, key in theirs.keys.items():
            await pair.user.cache_manager.pull_cache(key, mine, dst_batch_index=1)
            for here, there in zip(mine.tensors, theirs.tensors, strict=True):
                np.testing.assert_array_equal(here[1], there[slot])
        for wrong in (request(2), request(1, model_id=7), prefix(2), request(3, model_id=7)):
            with pytest.raises(adt.CacheNotFound, match="wait=True"):
                _ = pair.user.cache_manager.pull_cache(wrong, mine)
        for wrong in (adt.CacheKey(OWNER), request(1, prefix_id=2)):
            with pytest.raises(adt.ArgumentError, match="req_id"):
                _ = pair.user.cache_manager.pull_cache(wrong, mine)


async def test_keys_that_cannot_be_registered() -> None:
    async with setting() as (pair, _):
        caches = pair.owner.cache_manager
        caches.register_cache(pattern(1, SHAPE), keys=[request(1), prefix(2)])
        for error, keys in (
            (adt.CacheExists, [request(5), request(1)]),
            (adt.CacheExists, [request(7, prefix_id=2)]),
            (adt.CacheExists, [request(5), request(5)]),
            (adt.CacheExists, [prefix(5), request(9, prefix_id=5)]),
            (adt.ArgumentError, [request(i) for i in range(10, 10 + SHAPE[0] + 1)]),
            (adt.ArgumentError, [adt.CacheKey(USER, 5)]),
            (adt.ArgumentTypeError, [adt.BlocksCacheKey(OWNER)]),
            (adt.ArgumentTypeError, request(5)),
            (adt.ArgumentTypeError, {0: request(5)}),
        ):
            before = caches.caches
            with pytest.raises(error):
                caches.register_cache(pattern(1, SHAPE), keys=keys)  # type: ignore[arg-type]
            with pytest.raises(error):
                caches.allocate_cache(adt.CacheDesc(1, SHAPE, "uint8"), keys=keys)  # type: ignore[arg-type]
            assert caches.caches == before
        with pytest.raises(adt.ArgumentError, match="remote=None"):
            caches.register_cache(pattern(1, SHAPE), keys=[request(5)], remote=None)
        # Nothing of what was refused is left behind.
        caches.register_cache(pattern(1, SHAPE), keys=[request(5), adt.CacheKey(OWNER), adt.CacheKey(OWNER), prefix(5)])
        assert len(caches.caches) == 2


async def test_more_keys_than_a_cache_or_a_message_takes() -> None:
    keys = [request(2**64 - 2 - i, model_id=2**64 - 1) for i in range(wire.SLOT_KEYS_MAX + 1)]
    key = wire.SlotKey(slot=2**32 - 1, model_id=2**64 - 1, req_id=2**64 - 1)
    assert len(wire.encode(key)) - wire.LENGTH_SIZE == wire.SLOT_KEY_MAX_BYTES  # type: ignore[arg-type]
    desc = adt.CacheDesc(1, (len(keys), 1), "uint8")
    async with linked("shm") as pair:
        with pytest.raises(adt.ArgumentError, match="65537 batch slots"):
            pair.owner.cache_manager.allocate_cache(desc, keys=keys)
        await pair.shown(pair.owner.cache_manager.allocate_cache(desc, keys=keys[1:]))
        assert found(pair) == set(keys[1:])
    async with linked("shm", user={"control_max_bytes": 65536, "notify_max_bytes": 1024}) as pair:
        cache = await pair.shown(pair.owner.cache_manager.allocate_cache(desc, keys=keys[:2000]))
        told = len(found(pair))
        assert found(pair) == set(keys[:told])
        assert 1000 < told < 2000
        for name in keys[:2000]:
            assert pair.owner.cache_manager.remove_cache_key(name)
        await until(lambda: not found(pair))
        assert pair.link.error is None
        assert not cache.keys


async def test_both_kinds_of_access_to_one_cache() -> None:
    """The original's MIX: blocks by id or blocks key, slots by key or index, at once."""
    async with setting() as (pair, mine):
        theirs = await pair.offer(pattern(1, SHAPE))
        pull_blocks, pull_cache = pair.user.cache_manager.pull_blocks, pair.user.cache_manager.pull_cache
        await asyncio.gather(
            pull_blocks(adt.BlocksCacheKey(OWNER), mine, [3], [0]),
            pull_blocks(adt.CacheKeyByIdAndIndex(OWNER, theirs.id), mine, [2], [1]),
            pull_cache(adt.CacheKeyByIdAndIndex(OWNER, theirs.id, 1), mine, dst_batch_index=2),
            pull_blocks(adt.CacheKeyByIdAndIndex(OWNER, theirs.id, 0), mine, None, [3]),
        )
        for here, there in zip(mine.tensors, theirs.tensors, strict=True):
            np.testing.assert_array_equal(here, there[::-1])


async def test_sides_that_do_not_go_together() -> None:
    async with setting() as (pair, mine):
        theirs = await pair.shown(pair.owner.cache_manager.register_cache(pattern(1, SHAPE), keys=[request(1)]))
        await pair.offer(pattern(1, SHAPE))
        by_id = adt.CacheKeyByIdAndIndex(OWNER, theirs.id)
        caches, blocks_key = pair.user.cache_manager, adt.BlocksCacheKey(OWNER)
        other = await pair.take(pattern(3, (4, 8)), remote=None)
        floats = await pair.take(pattern(3, (4, 8), np.float32), remote=None)
        for error, words, call in (
            (adt.ArgumentError, "neither src_blocks nor", lambda: caches.pull_blocks(request(1), mine)),
            (adt.ArgumentError, "neither src_blocks nor", lambda: caches.push_blocks(request(1), mine)),
            (adt.ArgumentError, "no batch slot; give a CacheKey or", lambda: caches.pull_cache(blocks_key, mine)),
            (
                adt.ArgumentError,
                "no batch slot; give src_blocks",
                lambda: caches.pull_blocks(blocks_key, mine, None, [0]),
            ),
            (adt.ArgumentError, "names a batch slot", lambda: caches.pull_blocks(request(1), mine, [0], [0])),
            (adt.ArgumentError, "names a batch slot", lambda: caches.push_blocks(request(1), mine, [0], [0])),
            (
                adt.ArgumentError,
                "give one of both",
                lambda: caches.pull_blocks(by_id, mine, [0], [0], dst_batch_index=0),
            ),
            (adt.ArgumentError, "omit size", lambda: caches.pull_blocks(by_id, mine, [0], [0], size=4)),
            (adt.ArgumentError, "size=33 exceeds the 32", lambda: caches.pull_cache(by_id, mine, size=33)),
            (adt.ArgumentError, "size=-2", lambda: caches.pull_cache(by_id, mine, size=-2)),
            (adt.ArgumentTypeError, "size", lambda: caches.pull_cache(by_id, mine, size=1.0)),
            (adt.ArgumentError, "size=9 exceeds the 8", lambda: caches.pull_cache(by_id, other, size=9)),
            (adt.CacheMismatch, "block_shape", lambda: caches.pull_cache(by_id, other)),
            (adt.CacheMismatch, "dtype", lambda: caches.pull_cache(by_id, floats)),
            (adt.BlockIndexError, "dst_batch_index=4", lambda: caches.pull_cache(by_id, mine, dst_batch_index=4)),
            (adt.BlockIndexError, "src_batch_index=4", lambda: caches.push_cache(by_id, mine, src_batch_index=4)),
            (adt.ArgumentError, "dst_batch_index", lambda: caches.pull_cache(by_id, mine, dst_batch_index=-1)),
            (
                adt.BlockIndexError,
                "batch_index=4 is outside the peer's",
                lambda: caches.pull_cache(by_id._replace(batch_index=4), mine),
            ),
            (adt.BlockIndexError, "the list has 5 blocks", lambda: caches.pull_blocks(by_id, other, None, range(5))),
            (adt.BlockIndexError, "the list has 1 blocks", lambda: caches.pull_blocks(by_id, other, None, [0], size=9)),
            (adt.BlockIndexError, "twice", lambda: caches.pull_blocks(by_id, other, None, [1, 1])),
            (adt.BlockIndexError, "dst_blocks[1]=4", lambda: caches.pull_blocks(by_id, other, None, [0, 4])),
        ):
            with pytest.raises(error) as refused:
                call()
            assert words in str(refused.value), refused.value
        assert pair.user.stats()["total"]["started"] == 0


async def test_rows_of_slots_and_blocks_must_agree() -> None:
    async with linked("shm") as pair:
        theirs = await pair.shown(pair.owner.cache_manager.register_cache(pattern(1, (2, 8, 2, 4))))
        key = adt.CacheKeyByIdAndIndex(OWNER, theirs.id, 1)
        fits = await pair.take(pattern(2, (8, 4, 2, 4)), remote=None)
        turned = await pair.take(pattern(2, (8, 4, 4, 2)), remote=None)
        flat = await pair.take(pattern(2, (8, 32)), remote=None)
        with pytest.raises(adt.CacheMismatch, match=r"shape\[2:\]"):
            _ = pair.user.cache_manager.pull_blocks(key, turned, None, [0, 1])
        for cache in (fits, flat):
            await pair.user.cache_manager.pull_blocks(key, cache, None, [5, 1])
            for here, there in zip(cache.tensors, theirs.tensors, strict=True):
                assert here[5].tobytes() + here[1].tobytes() == there[1].tobytes()


# Keys that pulls take. --------------------------------------------------------------------------------------


@pytest.mark.loop
@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_a_pull_takes_the_key_of_an_allocated_cache(transport: str) -> None:
    async with setting(transport) as (pair, mine):
        caches = pair.user.cache_manager
        theirs = await allocated(pair, [request(1), request(2), prefix(3), request(4)])
        await caches.pull_cache(request(1), mine)
        await caches.pull_cache(prefix(3), mine)
        await caches.pull_cache(adt.CacheKeyByIdAndIndex(OWNER, theirs.id, 1), mine)  # its key is request 2
        await caches.pull_blocks(adt.CacheKeyByIdAndIndex(OWNER, theirs.id), mine, [3], [0])  # blocks take none
        await until(lambda: set(theirs.keys.values()) == {prefix(3), request(4)})
        await until(lambda: found(pair) == {prefix(3), request(4)})
        with pytest.raises(adt.CacheNotFound):
            _ = caches.pull_cache(request(1), mine)
        # What was taken can be given again.
        again = await allocated(pair, [request(1)])
        await caches.pull_blocks(request(1), mine, None, [2])
        await until(lambda: not again.keys)
        assert pair.link.error is None


async def test_a_registered_cache_keeps_its_keys() -> None:
    async with setting() as (pair, mine):
        theirs = await pair.shown(pair.owner.cache_manager.register_cache(pattern(1, SHAPE), keys=[request(1)]))
        for _ in range(3):
            await pair.user.cache_manager.pull_cache(request(1), mine, notify=b"pulled")
        async for _ in pair.owner.notifications():
            if pair.owner.stats()["unread"] == 0:
                break
        assert dict(theirs.keys) == {0: request(1)}


async def test_layers_take_the_key_when_all_were_pulled_each_slot_for_itself() -> None:
    async with setting(tensors=6) as (pair, mine):
        theirs = await allocated(pair, [request(1), request(2)], tensors=6)
        pull = pair.user.cache_manager.pull_cache

        async def layers(number: int, start: int, stop: int) -> None:
            layers = range(start, stop)
            await pull(request(number), mine, src_layer_range=layers, dst_layer_range=layers, notify=b"")
            await anext(aiter(pair.owner.notifications()))  # behind the word of the pull

        await layers(1, 0, 2)
        await layers(2, 1, 3)
        await layers(1, 0, 1)  # again
        assert set(theirs.keys) == {0, 1}
        await layers(2, 0, 1)
        assert set(theirs.keys) == {0}
        await layers(1, 1, 3)
        assert set(theirs.keys) == set()


async def test_a_pull_that_fails_keeps_the_key() -> None:
    async with linked("tcp", user={"inline_bytes": 0, "drain_timeout": 0.0}) as pair:
        desc = adt.CacheDesc(8, (2, 1 << 20), "uint8")
        theirs = await pair.shown(pair.owner.cache_manager.allocate_cache(desc, keys=[request(1)]))
        mine = pair.user.cache_manager.allocate_cache(desc, remote=None)
        await mine.ready()
        cancelled = 0
        async with asyncio.timeout(PATIENCE):
            while not cancelled:
                pull = pair.user.cache_manager.pull_cache(request(1), mine)
                await asyncio.sleep(0)
                pull.cancel()
                await asyncio.wait((pull,))
                cancelled += pull.cancelled() and pull.progress.bytes_done < pull.progress.bytes_total
        # Through the same stream, behind whatever was said of the pull.
        await pair.user.cache_manager.pull_blocks(
            adt.CacheKeyByIdAndIndex(OWNER, theirs.id), mine, [], [], notify=b"after"
        )
        await anext(aiter(pair.owner.notifications()))
        assert dict(theirs.keys) == {0: request(1)}
        await pair.user.cache_manager.pull_cache(request(1), mine)
        await until(lambda: not theirs.keys)


async def test_l5_an_empty_pull_by_key_says_that_the_request_is_done_with() -> None:
    """A full cache hit moves nothing; the owner must hear of it all the same."""
    async with setting() as (pair, mine):
        theirs = await allocated(pair, [request(1)])
        await pair.user.cache_manager.pull_blocks(request(1), mine, None, [], notify=b"hit")
        assert (await anext(aiter(pair.owner.notifications()))).payload == b"hit"
        assert not theirs.keys


async def test_unlinking_does_not_lose_what_was_pulled(monkeypatch: pytest.MonkeyPatch) -> None:
    async with setting() as (pair, mine):
        theirs = await allocated(pair, [request(1)])
        gone = pair.owner.cache_manager.deallocate_cache(theirs)
        no_room = asyncio.Event()
        monkeypatch.setattr(pair.link._channel.stream, "flush", lambda _: no_room.wait())
        await pair.user.cache_manager.pull_cache(request(1), mine)
        await pair.user.unlink(adt.ClusterInfo(OWNER))
        async with asyncio.timeout(PATIENCE):
            await gone


async def test_deallocating_waits_for_the_keys() -> None:
    async with setting() as (pair, mine):
        theirs = await allocated(pair, [request(1), request(2), prefix(3)])
        done = pair.owner.cache_manager.deallocate_cache(theirs)
        assert theirs.closed
        assert "released" in repr(theirs)
        await pair.user.cache_manager.pull_cache(request(1), mine)
        with pytest.raises(adt.MemoryStillExposed, match="kept by"):
            await pair.owner.cache_manager.deallocate_cache(theirs, timeout=0.01)
        assert pair.owner.cache_manager.remove_cache_key(prefix(3))
        assert not pair.owner.cache_manager.remove_cache_key(prefix(3))
        assert not done.done()
        with pytest.raises(adt.ClosedError):
            _ = pair.owner.cache_manager.copy_blocks(theirs, {0: [1]})
        await pair.user.cache_manager.pull_cache(request(2), mine)
        async with asyncio.timeout(PATIENCE):
            await done
        assert theirs.tensors == ()
        assert theirs.id not in pair.owner.cache_manager.caches
        await until(lambda: not found(pair))


async def test_unregistering_does_not_wait_for_keys() -> None:
    async with setting() as (pair, mine):
        theirs = await allocated(pair, [request(1)])
        waiting = pair.owner.cache_manager.deallocate_cache(theirs)
        async with asyncio.timeout(PATIENCE):
            await pair.owner.cache_manager.unregister_cache(theirs)
            await waiting
        await until(lambda: not found(pair))
        with pytest.raises(adt.CacheNotFound):
            _ = pair.user.cache_manager.pull_cache(request(1), mine)
        await allocated(pair, [request(1)])


async def test_removing_keys_checks_them() -> None:
    async with setting() as (pair, _):
        caches = pair.owner.cache_manager
        for error, key in (
            (adt.ArgumentTypeError, adt.BlocksCacheKey(OWNER)),
            (adt.ArgumentError, adt.CacheKey(USER, 1)),
            (adt.ArgumentError, adt.CacheKey(OWNER)),
        ):
            with pytest.raises(error):
                caches.remove_cache_key(key)  # type: ignore[arg-type]
        assert not caches.remove_cache_key(request(1))


async def test_keys_that_change_before_and_while_the_peer_links() -> None:
    async with adt.DataDist(OWNER, listen="127.0.0.1:0") as owner:
        cache = owner.cache_manager.allocate_cache(
            adt.CacheDesc(1, (64, 8), "uint8"), keys=[request(i) for i in range(64)]
        )
        assert owner.cache_manager.remove_cache_key(request(0))  # before it is registered
        await cache.ready()
        assert owner.cache_manager.remove_cache_key(request(1))
        async with adt.DataDist(USER) as user:
            linking = user.link(adt.ClusterInfo(OWNER, owner.listen_address))
            for number in range(2, 32):
                await asyncio.sleep(0)
                assert owner.cache_manager.remove_cache_key(request(number))
            link = await linking
            await until(lambda: set(link.slots) == {request(i) for i in range(32, 64)})
            for number in range(32, 64):
                owner.cache_manager.remove_cache_key(request(number))
            await until(lambda: not link.slots)
            assert link.error is None


@pytest.mark.parametrize(
    "lie",
    [
        {"tensor": 1, "count": 2},
        {"tensor": 2**32 - 1, "count": 2**32 - 1},
    ],
)
async def test_a_peer_that_claims_to_have_pulled_what_is_not_there(lie: dict[str, int]) -> None:
    async with setting() as (pair, _):
        theirs = await allocated(pair, [request(1)])
        pair.link._channel.send(wire.SlotPulled(cache_id=theirs.id, slot=0, **lie))
        await until(lambda: pair.link.error is not None)
        assert dict(theirs.keys) == {0: request(1)}


async def test_a_peer_that_claims_pulls_of_what_does_not_exist_is_ignored() -> None:
    async with setting() as (pair, mine):
        theirs = await allocated(pair, [prefix(1)])
        for cache_id, slot in ((theirs.id + 100, 0), (theirs.id, 3), (theirs.id, 2**32 - 1), (theirs.id, 0)):
            pair.link._channel.send(wire.SlotPulled(cache_id=cache_id, slot=slot, tensor=0, count=2))
        await pair.user.cache_manager.pull_cache(prefix(1), mine, notify=b"")
        await anext(aiter(pair.owner.notifications()))
        assert dict(theirs.keys) == {0: prefix(1)}


# Waiting for a key. -----------------------------------------------------------------------------------------


@pytest.mark.loop
@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_a_pull_waits_for_what_is_registered_later(transport: str) -> None:
    async with setting(transport) as (pair, mine):
        pull_cache, pull_blocks = pair.user.cache_manager.pull_cache, pair.user.cache_manager.pull_blocks
        blocks = np.array([0, 1])
        next_id = max((cache.id for cache in pair.owner.cache_manager.caches.values()), default=0) + 1
        pulls = [
            pull_cache(request(1), mine, dst_batch_index=3, wait=True),
            pull_blocks(adt.BlocksCacheKey(OWNER), mine, blocks, blocks, wait=True, notify=b"landed"),
            pull_cache(adt.CacheKeyByIdAndIndex(OWNER, next_id, 1), mine, dst_batch_index=2, wait=True),
        ]
        blocks[:] = 9  # read during the call
        rows = pair.user.dump()
        assert [row.kind for row in rows] == ["pull"] * 3
        assert all("waiting until the peer registers" in row.state for row in rows)
        slots = await pair.shown(pair.owner.cache_manager.register_cache(pattern(1, SHAPE), keys=[request(1)]))
        assert slots.id == next_id
        theirs = await pair.offer(pattern(2, SHAPE))
        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(*pulls)
        for here, by_slot, by_block in zip(mine.tensors, slots.tensors, theirs.tensors, strict=True):
            np.testing.assert_array_equal(here[[3, 2]], by_slot[[0, 1]])
            np.testing.assert_array_equal(here[:2], by_block[:2])
        assert (await anext(aiter(pair.owner.notifications()))).payload == b"landed"
        assert pair.user.dump() == []


async def test_what_does_not_fit_is_told_when_it_is_there() -> None:
    async with setting() as (pair, mine):
        pull = pair.user.cache_manager.pull_blocks
        outside = pull(adt.BlocksCacheKey(OWNER), mine, [7], [0], wait=True)
        wrong = pull(adt.BlocksCacheKey(OWNER, 1), mine, [0], [0], wait=True)
        for error, call in (
            (adt.BlockIndexError, lambda: pull(adt.BlocksCacheKey(OWNER), mine, [2**70], [0], wait=True)),
            (adt.ArgumentTypeError, lambda: pull(adt.BlocksCacheKey(OWNER), mine, "0", [0], wait=True)),
            (adt.ArgumentTypeError, lambda: pull(adt.BlocksCacheKey(OWNER), mine, [0], [0], wait=True, notify=1)),
            (adt.NotLinkedError, lambda: pull(adt.BlocksCacheKey(77), mine, [0], [0], wait=True)),
        ):
            with pytest.raises(error):
                call()
        await pair.offer(pattern(1, SHAPE))
        await pair.offer(pattern(1, (4, 16)), key=adt.BlocksCacheKey(OWNER, 1))
        with pytest.raises(adt.BlockIndexError, match=r"\[0\]=7"):
            await outside
        with pytest.raises(adt.CacheMismatch, match="block_shape"):
            await wrong


@pytest.mark.loop
async def test_the_wait_for_a_key_ends_by_deadline_cancel_and_the_end_of_the_link() -> None:
    async with setting() as (pair, mine):
        pull = pair.user.cache_manager.pull_cache

        def missing(**options: Any) -> adt.Transfer[None]:
            return pull(request(404), mine, wait=True, **options)

        with pytest.raises(adt.TransferTimeout, match="waiting until the peer registers"):
            await missing(timeout=0.02)
        cancelled = missing()
        assert cancelled.cancel("no more")
        with pytest.raises(asyncio.CancelledError, match="no more"):
            await cancelled
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await missing(timeout=None)
        assert pair.link._remote._wanted == {}
        left = missing(timeout=None)
        await pair.user.unlink(adt.ClusterInfo(OWNER))
        with pytest.raises(adt.PeerLostError):
            await left
        assert pair.user.dump() == []
        counts = pair.user.stats()["total"]
        assert counts["started"] == 4


async def test_closing_ends_the_wait_for_a_key() -> None:
    async with setting() as (pair, mine):
        left = pair.user.cache_manager.pull_cache(request(404), mine, wait=True, timeout=None)
        closing = asyncio.create_task(pair.user.aclose(0.2))
        with pytest.raises((adt.ClosedError, adt.PeerLostError)):
            async with asyncio.timeout(PATIENCE):
                await left
        await closing


async def test_a_local_cache_that_goes_ends_the_wait_for_a_key() -> None:
    async with setting() as (pair, mine):
        left = pair.user.cache_manager.pull_cache(request(1), mine, wait=True, timeout=None)
        await pair.user.cache_manager.unregister_cache(mine)
        with pytest.raises(adt.ClosedError, match="unregistered"):
            async with asyncio.timeout(PATIENCE):
                await left
        assert pair.link._remote._wanted == {}


async def test_what_waited_for_a_key_and_then_for_a_credit_is_listed() -> None:
    async with linked("shm", owner={"notify_credits": 1}) as pair:
        mine = await pair.take(pattern(9, SHAPE), remote=None)
        pull = pair.user.cache_manager.pull_cache
        left = pull(request(1), mine, wait=True, notify=b"second", timeout=None)
        await allocated(pair, [prefix(1)])
        await pull(prefix(1), mine, notify=b"first")
        await allocated(pair, [request(1)])
        await until(
            lambda: [row.state for row in pair.user.dump()] == ["waiting for the peer to read its notifications"]
        )
        notes = aiter(pair.owner.notifications())
        assert [(await anext(notes)).payload for _ in range(2)] == [b"first", b"second"]
        await left
        assert pair.user.dump() == []


async def test_what_waited_for_a_key_lets_go_of_its_cache_at_the_end() -> None:
    async with linked("shm") as pair:
        tensor = np.zeros(SHAPE, np.uint8)
        alive = weakref.ref(tensor)
        dd = adt.DataDist(3)
        nodes = [dd]
        await dd.open()
        await dd.link(adt.ClusterInfo(OWNER, str(pair.owner.listen_address)))
        mine = dd.cache_manager.register_blocks_cache([tensor], remote=None)
        await mine.ready()
        left = dd.cache_manager.pull_cache(request(1), mine, wait=True, timeout=None)
        del dd, tensor, mine

        def drop() -> None:
            nodes.clear()
            gc.collect()

        with pytest.warns(ResourceWarning):
            drop()
        await until(left.done)
        assert isinstance(left.exception(), adt.ClosedError)

        def forgotten() -> bool:
            gc.collect()
            return alive() is None

        await until(forgotten)


async def test_a_peer_that_dies_while_its_key_is_waited_for() -> None:
    async with spawn(5) as peer, adt.DataDist(USER) as dd:
        await dd.link(peer.info)
        mine = dd.cache_manager.register_blocks_cache(pattern(1, SHAPE), remote=None)
        left = dd.cache_manager.pull_cache(adt.CacheKey(5, 1), mine, wait=True, timeout=None)
        peer.kill()
        with pytest.raises(adt.PeerLostError):
            async with asyncio.timeout(PATIENCE):
                await left


@pytest.mark.loop
async def test_nothing_waits_for_a_cache_beyond_an_abort() -> None:
    """Transfers whose cache is still being registered, or whose key is missing, have ended when the closing has."""
    async with linked("shm") as pair:
        manager, gate = pair.user.cache_manager, threading.Event()
        register = manager._register_natively

        def held_back(cache: adt.Cache) -> Any:
            gate.wait()
            return register(cache)

        manager._register_natively = held_back  # type: ignore[method-assign]
        mine = manager.register_blocks_cache(pattern(1, SHAPE))
        other = manager.register_blocks_cache(pattern(1, SHAPE))
        await pair.offer(pattern(1, SHAPE))
        transfers = [
            manager.pull_blocks(adt.BlocksCacheKey(OWNER), mine, [0], [0], timeout=None),
            manager.pull_cache(request(404), mine, wait=True, timeout=None),
            manager.copy_blocks(mine, {0: [1]}, timeout=None),
            manager.swap_blocks(mine, other, {0: 1}, timeout=None),
        ]
        assert len(pair.user.dump()) == 4
        pair.user.abort()
        assert all(isinstance(transfer.exception(), adt.ClosedError) for transfer in transfers)
        gate.set()
        await pair.user.wait_closed()
